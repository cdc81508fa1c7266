"""The scheduler of SGLang's engines that compute prompts for others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cache.errors import require
from sim.scheduler.sglang.rooms import Send, room_of
from sim.scheduler.sglang.scheduler import SglangScheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.sglang.requests import Entry, ScheduleBatch, SglangOutput
    from sim.scheduler.sglang.settings import Settings

APART: Final = "prefill and decode are apart, and requests are looked at one by one"
"""Why steps are taken one by one."""


class PrefillScheduler(SglangScheduler):
    """`SglangScheduler` that only prefills, and holds prompts until they are sent.

    ::

        bootstrapping   its decoder has no slots for it yet
        queue           as ever; nothing decodes beside
        in_flight       computed, and sent to the decoder; then the tree may evict it

    A chunk is sent, as far as its pages are full, when it has been computed, and the
    rest with the first token. From 0.5.19 on pages that the tree had are sent when the
    first batch of their prompt begins, with overlap behind the one that runs.

    Attributes
    ----------
    bootstrapping, in_flight
        See above, in order.
    sends
        Pages whose sending begins; the sender empties it.

    Notes
    -----
    Source: SGLang 0.5.9 and 0.5.23, ``disaggregation/prefill.py``.
    """

    stepwise_reason = APART

    def __init__(self, settings: Settings, cache: CacheConfig | None = None) -> None:
        super().__init__(apart(settings), cache)
        self.bootstrapping: list[Entry] = []
        self.in_flight: dict[Request, Entry] = {}
        self.sends: list[Send] = []
        self._num_sent: dict[Entry, int] = {}  # pages of prompts on their way
        self._found: list[tuple[Entry, int]] = []  # sent behind the batch that runs
        self._num_buffers = 2 * self.settings.max_running_requests

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self.bootstrapping)

    def _enter(self, entry: Entry) -> None:
        entry.max_new_tokens = 1
        self.bootstrapping.append(entry)

    def abort(self, request: Request) -> None:
        entry = self._entries[request]
        if entry in self.bootstrapping:
            self.bootstrapping.remove(entry)
            self.queue.enter(entry)  # out of which it is withdrawn
        super().abort(request)
        if not (entry.is_ended or entry is self._dropping):
            self._num_sent.pop(entry, None)

    def _drop_chunk(self) -> None:
        if self._dropping is not None:
            del self._num_sent[self._dropping]
        super()._drop_chunk()

    # -- a call ---------------------------------------------------------------

    def rests(self) -> bool:
        """Look for prompts whose turn may come; return whether there are none."""
        if self.chunked is None and not self.queue.entries:
            self._pop_bootstrapped()
        return self.chunked is None and not self.queue.entries

    def schedule(self, now_s: float) -> SglangOutput:
        self._pop_bootstrapped()
        is_beside = self.settings.overlap and self._last is not None
        output = super().schedule(now_s)
        output.stuck = output.mode is None
        if self.settings.makes_plans:
            self._found = [(entry, num) for entry, num, _ in output.entries]
            if not is_beside:
                self._send_found()
        return output

    def _send_found(self) -> None:
        """Send pages that were there before the latest batch began."""
        found, self._found = self._found, []
        for entry, num_tokens in found:
            if not num_tokens % self.settings.page_size:
                self._send(entry, num_tokens, is_last=False)

    def _has_something(self) -> bool:
        return bool(super()._has_something() or self.bootstrapping or self.in_flight)

    def _pop_bootstrapped(self) -> None:
        """Let prompts wait for their turn for which there are slots to send them to."""
        if not self.bootstrapping:
            return
        num_left = self._num_buffers - len(self._num_sent)
        still: list[Entry] = []
        for entry in self.bootstrapping:
            if num_left and room_of(entry.request).is_allocated:
                self._num_sent[entry] = 0
                self.queue.enter(entry)
                num_left -= 1
            else:
                still.append(entry)
        self.bootstrapping = still

    def _next_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        self._drop_chunk()
        self.running_batch.is_full = False
        chunked = self.chunked
        if chunked is not None:
            self.holdings.share(chunked, is_chunk=True)
            if not self.settings.overlap:
                self._send(chunked, chunked.num_fill_tokens, is_last=False)
        return self._prefill_batch(output)

    def _num_admissible(self, num_running: int, num_held: int = 0) -> int:
        num_rows = self.holdings.request_slots.num_free + num_held
        return min(super()._num_admissible(num_running, num_held), num_rows)

    def _in_group(self, output: SglangOutput) -> bool:
        del output
        return False

    # -- prompts that are sent --------------------------------------------------

    def update(self, finished: Sequence[Request]) -> None:
        assert self._processing is not None
        output, _ = self._processing
        self._send_found()
        super().update(finished)
        for entry, num_before, num_new in output.entries:
            if entry is output.chunked and self.settings.overlap:
                self._send(entry, num_before + num_new, is_last=False)

    def _send(self, entry: Entry, num_tokens: int, *, is_last: bool) -> None:
        """Send what was computed of a prompt, unless it was withdrawn."""
        if entry not in self._num_sent or self._ends(entry):
            return
        size = self.settings.page_size
        num_pages = -(-num_tokens // size) if is_last else num_tokens // size
        num_new = num_pages - self._num_sent[entry]
        if num_new > 0:
            self._num_sent[entry] = num_pages
            self.sends.append(Send(entry.request, num_new, is_last))

    def _ends(self, entry: Entry) -> bool:
        """Whether a prompt ends here, as it was withdrawn from a batch.

        Before 0.5.20 it goes on until it is sent, or its sender is told.
        """
        return entry.is_ended and self.settings.patch >= 20

    def _end(self, entry: Entry) -> None:
        if self._ends(entry):
            self.holdings.release(entry)
            super()._end(entry)
            del self._num_sent[entry]
            return
        entry.is_finished = True
        self.holdings.share(entry)
        self._send(entry, entry.num_fill_tokens, is_last=True)
        self.in_flight[entry.request] = entry
        self.ended.append(entry.request)
        self._entries.pop(entry.request, None)
        if entry.is_ended:
            self._ending.remove(entry)

    def release(self, requests: Iterable[Request]) -> None:
        """Let go of prompts that have been sent, or are not wanted any more."""
        for request in requests:
            entry = self.in_flight.pop(request)
            self.holdings.end(entry)
            del self._num_sent[entry]

    def check(self) -> None:
        super().check()
        require(
            all(entry.slot < 0 for entry in self.bootstrapping),
            "a prompt holds slots before its decoder does",
        )
        held = {*self.in_flight.values()}
        require(
            held <= self.holdings.holders.keys(),
            "a prompt is being sent of which nothing is held",
        )


def apart(settings: Settings) -> Settings:
    """Return the release's settings where prefill and decode are apart."""
    return replace(settings, need_sort=True, max_queued_requests=None)
