"""Engines with a KV connector that form steps ahead, their decodes on a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.v1.ahead import AheadScheduler
from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.scheduler import Shape
    from sim.scheduler.v1.settings import Settings


class AheadConnectorScheduler(ConnectorScheduler, AheadScheduler):
    """`AheadScheduler` with a KV connector.

    It decides as `sim.scheduler.v1.connectors.in_flight.QueuedConnectorScheduler` does,
    without a look at each decode. A decode on the clock is in the step in flight; so
    are, off the clock, the prompts of the latest call and the decodes that were taken
    off since. Where the connector fills blocks those of requests that leave come free
    when that step has ended.

    Parameters
    ----------
    settings, cache
        See `ConnectorScheduler`.
    """

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        self.drops_stale = self.connector.requires_kv_delivery
        self._defers_frees: bool = self.connector.fills_blocks
        if self._defers_frees:
            self._preempts_from_tail = False  # the tail may be in the step in flight
        self._written: set[Request] = set()  # off the clock, and in the step in flight
        self._paused: set[Request] = set()  # decodes that were taken off the clock
        self._leaving: list[Request] = []  # the step in flight writes their blocks

    # -- a call ---------------------------------------------------------------

    def form(self, now_s: float) -> Shape:
        shape = super().form(now_s)
        if self._defers_frees:
            self._written = {request for request, _, _ in self.prompts}
        return shape

    def take_off(self, requests: Sequence[Request]) -> None:
        super().take_off(requests)
        if self._defers_frees:
            self._written.update(requests)
        self._paused.update(requests)

    def _is_written(self, request: Request) -> bool:
        return self._defers_frees and (
            request in self._written or request not in self.prefilling
        )

    def _preempt(self, victim: Request, for_request: Request, reason: str) -> None:
        self._note_written((victim,))
        super()._preempt(victim, for_request, reason)

    def _admit(self, request: Request, num_hits: int, now_s: float) -> None:
        super()._admit(request, num_hits, now_s)
        self._paused.discard(request)

    def _num_processed_tokens(self, request: Request) -> int:
        if request not in self.running:
            return request.num_computed_tokens
        for each, before, _ in self.prompts:  # a decode in its first step, too
            if each is request:
                return before
        if request not in self.prefilling:
            return request.num_computed_tokens - 1
        return min(request.num_computed_tokens, request.num_tokens - 1)

    def _in_mid_way(self) -> dict[Request, None]:
        return {each: None for each in self.prefilling if each not in self._paused}

    def num_tokens_after(self, requests: Iterable[Request]) -> dict[Request, int]:
        after = super().num_tokens_after(requests)
        return {
            each: min(number, each.num_tokens)
            if each in self.prefilling
            else number - 1
            for each, number in after.items()
        }

    # -- between calls --------------------------------------------------------

    def end_step(self) -> None:
        """Note that the output of the oldest step in flight is there."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self.tables.free_as_one(request)
        if leaving:
            self.gate.look_again()

    def abort(self, request: Request) -> None:
        self._note_written((request,))
        super().abort(request)

    def update(self, finished: Sequence[Request]) -> None:
        self._note_written(finished)
        super().update(finished)

    def _note_written(self, requests: Iterable[Request]) -> None:
        """Note decodes that leave: the step in flight has a token of each."""
        for request in requests:
            if request in self.running and request not in self.prefilling:
                self.clock.settle(request, self.step)
                if self._defers_frees:
                    self._written.add(request)

    def _free_or_keep(self, request: Request) -> int:
        self._paused.discard(request)
        if request in self._kept or request not in self._written:
            return super()._free_or_keep(request)
        self._written.remove(request)
        self._leaving.append(request)
        return 0

    # -- counts and proof -----------------------------------------------------

    def quiet_steps(self, most: int) -> int:
        # With the output of the step in flight their blocks come free.
        return super().quiet_steps(min(most, 1) if self._leaving else most)

    def _holders(self) -> list[Request]:
        return [*super()._holders(), *self._leaving]
