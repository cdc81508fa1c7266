"""The scheduler of SGLang 0.5.9: prefill first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.sglang.adder import Added, PrefillAdder
from sim.scheduler.sglang.holdings import OutOfMemoryError
from sim.scheduler.sglang.requests import Entry, Mode, ScheduleBatch, SglangOutput
from sim.scheduler.sglang.state import SglangState
from sim.scheduler.v1.in_flight import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.scheduler.base import SchedulerOutput


class SglangScheduler(SglangState):
    """Prefill first; the running requests decode where there is nothing to prefill.

    1. A prompt of which a chunk was computed goes into the tree as far as it is.
    2. The batch that was prefilled joins those that run.
    3. The queue is sorted, and requests are taken from its head while the budgets of
       `PrefillAdder` hold. Once memory was found short nothing is admitted until a
       request leaves (`is_full`).
    4. Nothing taken: all that run decode. If the next tokens do not fit even when
       unlocked nodes are evicted, requests with few outputs are *retracted*: they lose
       their slots, wait at the end of the queue and are prefilled again.

    Notes
    -----
    Source: SGLang 0.5.9, ``managers/scheduler.py`` (`get_next_batch_to_run`),
    ``managers/schedule_batch.py``, ``managers/scheduler_output_processor_mixin.py``.
    """

    generation = "sglang"

    def add_request(self, request: Request) -> None:
        if not self._entries and request.arrival_s > self._rested_s:
            self._rest()
        prompt = self.holdings.numbers.prompt(request)
        entry = Entry.of(request, prompt, self.settings)
        self._entries[request] = entry
        self._enter(entry)

    def _enter(self, entry: Entry) -> None:
        """Put a request that has come, or comes back, into a queue."""
        self.queue.enter(entry)

    def abort(self, request: Request) -> None:
        # In a batch it goes on until the next token of it is processed.
        request.move_to(RequestStatus.FINISHED_ABORTED)
        entry = self._entries.pop(request)
        self._rested_s = self._now_s
        if self.settings.makes_plans and entry is self.chunked:
            self._dropping = entry
        elif not self.queue.withdraw(entry):
            entry.is_ended = True
            self._ending.append(entry)

    # -- a call ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SglangOutput:
        self._now_s = now_s
        output = SglangOutput()
        self.holdings.count_evictions()
        batch = self._next_batch(output)
        self._last = batch
        if batch is not None:
            output.take(batch)
        self._queued_output = output if self.settings.overlap else None
        self._refuse_rejected(output)
        self._tell_of_tree()
        return output

    def _tell_of_tree(self) -> None:
        if self.note_tree is not None:
            counts = self._told_of_tree = self.holdings.tree_counts
            self.note_tree(self._now_s, counts, self.ratio.value)

    def _next_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Return the batch of the step: prompts, else all that run."""
        self._drop_chunk()
        chunked, last, running = self.chunked, self._last, self.running_batch
        if chunked is not None and not chunked.is_parked:
            self.holdings.share(chunked, is_chunk=True)
        if last is not None and last.mode is not Mode.DECODE:
            if last.filter((chunked, last.chunked)):
                running.is_full = False
            self._merge(last)
        running = self.running_batch
        if self.settings.patch >= 23:
            if running.filter():
                running.is_full = False
        elif running.is_prefill_only:
            running.filter()
            if self.settings.patch >= 11 and not running.entries:
                running.is_full = False
        batch = self._prefill_batch(output)
        running = self.running_batch
        if batch is not None or running.is_prefill_only or not running.entries:
            return batch
        return self._decode_batch(output)

    def _merge(self, last: ScheduleBatch) -> None:
        """Let the requests of a prefill batch run on.

        Those that may write nothing are computed once. Before 0.5.10 they run no more;
        since then they stand beside the others until they have ended.
        """
        running, entries = self.running_batch, last.entries
        is_over = last.is_prefill_only and self.settings.patch < 10
        if is_over or not entries:
            return
        if running.entries:
            running.entries = running.entries + entries
            running.is_prefill_only &= last.is_prefill_only
        else:
            self.running_batch = ScheduleBatch(
                entries, is_prefill_only=last.is_prefill_only
            )

    def _drop_chunk(self) -> None:
        """Let go of a prompt that was withdrawn between two of its chunks.

        Source: SGLang 0.5.20, `process_pending_chunked_abort`.
        """
        entry, self._dropping = self._dropping, None
        if entry is not None:
            self.holdings.release(entry)
            entry.is_finished = True
            self.chunked = None
            self.queue.dropped.append(entry.request)

    def _finishing(self, entries: Iterable[Entry]) -> set[Entry]:
        """Return those whose queued result is their last by their limits.

        Source: SGLang 0.5.22, `_reqs_finishing_inflight`.
        """
        if self.settings.patch < 22 or self._queued_output is None:
            return set()
        awaited = {entry for entry, _, _ in self._queued_output.entries}
        return {
            each
            for each in entries
            if each in awaited and each.num_outputs + 1 >= each.max_new_tokens
        }

    # -- prefill --------------------------------------------------------------

    def _prefill_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        settings, running = self.settings, self.running_batch
        if (
            settings.enable_priority_scheduling
            or settings.swa is not None
            or (settings.patch >= 22 and not running.entries)
        ):
            running.is_full = False
        if self.chunked is None and (running.is_full or not self.queue.entries):
            return None
        is_mixed = settings.is_mixed
        num_running = len(running.entries)
        if (
            settings.patch >= 11  # before, the queue is sorted all the same
            and self.chunked is None
            and not settings.enable_priority_scheduling
            and self._num_admissible(num_running) <= 0
        ):
            running.is_full = True
            return None
        self._policy.sort(self.queue.entries)
        adder = PrefillAdder(
            settings,
            self.cache,
            running.entries,
            ratio=self.ratio.value,
            num_mixed=num_running if is_mixed else 0,
        )
        if self.chunked is not None:
            self.chunked.go_on()
            if not adder.continue_chunk(self.chunked):
                self.chunked = None
        preempted: list[Entry] = []
        self._take_waiting(adder, num_running, preempted, output)
        if not adder.taken and settings.patch >= 22:
            for entry in preempted:
                self.queue.enter(entry)
            return None
        if not adder.taken:
            self._lose(preempted, output)
            return None
        self.queue.leave(adder.taken)
        for entry in preempted:
            self.queue.enter(entry)
        if adder.chunked is not None:
            self.chunked = adder.chunked
        batch = ScheduleBatch(adder.taken, mode=Mode.EXTEND, chunked=self.chunked)
        batch.is_prefill_only = all(each.max_new_tokens == 0 for each in batch.entries)
        for entry in batch.entries:
            self.holdings.admit(entry, self._now_s)
        self.holdings.extend(batch.entries)
        if is_mixed and running.entries:
            self._mix(batch, running)
        return batch

    def _mix(self, batch: ScheduleBatch, running: ScheduleBatch) -> None:
        """Let those that run decode beside prompts; from 0.5.22 on if there is room."""
        finishing = self._finishing(running.entries)
        running.filter(finishing)
        if finishing:
            running.is_full = False
        if self.settings.makes_plans and not running.entries:
            return
        if self.settings.patch >= 22 and not self._has_room(running.entries):
            return
        if running.entries:
            self.holdings.grow(running.entries)
            for entry in running.entries:
                entry.num_filled = entry.num_tokens
            batch.entries = batch.entries + running.entries
            batch.num_decoding = len(running.entries)
            batch.mode, batch.is_prefill_only = Mode.MIXED, False
        self.running_batch = ScheduleBatch(is_full=running.is_full)

    def _take_waiting(
        self,
        adder: PrefillAdder,
        num_running: int,
        preempted: list[Entry],
        output: SglangOutput,
    ) -> None:
        """Take requests from the head of the queue until one does not fit."""
        running, makes_plans = self.running_batch, self.settings.makes_plans
        most = self._num_admissible(num_running)
        for entry in self.queue.entries:
            if makes_plans:
                num_held = 0
                if self.settings.patch >= 23:
                    if adder.state() is Added.OTHER:
                        break
                    num_held = sum(each.slot >= 0 for each in adder.taken)
                most = self._num_admissible(len(running.entries), num_held)
            if len(adder.taken) >= most:
                running.is_full = True
            if running.is_full and not (
                self.settings.enable_priority_scheduling
                and self._preempt_for(entry, adder, preempted, output)
            ):
                break
            self.holdings.look_up(entry)
            added = adder.add(entry)
            if adder.taken[-1:] != [entry]:
                entry.table.clear()
            if added is not Added.CONTINUE:
                if added is Added.NO_TOKEN:
                    running.is_full = self.settings.patch < 22 or bool(
                        adder.taken or running.entries
                    )
                break

    def _num_admissible(self, num_running: int, num_held: int = 0) -> int:
        """Return how many may join: from 0.5.12 on, as many as there are rows, too.

        `num_held` of them hold rows already, which 0.5.23 counts.
        """
        most = self.settings.max_running_requests - num_running
        if self.settings.patch < 12:
            return most
        num_rows = self.holdings.request_slots.num_free
        return min(most, num_rows + num_held)

    # -- decode ---------------------------------------------------------------

    def _decode_batch(self, output: SglangOutput) -> ScheduleBatch | None:
        """Let all that run decode; retract some where memory is short."""
        running = self.running_batch
        finishing = self._finishing(running.entries)
        shrank = running.filter(finishing)
        if not running.entries:
            running.is_full = False
            return None
        if self._has_room(running.entries):
            self.ratio.decay()
        elif finishing:  # whose slots are free after this step
            running.is_full = False
            return None
        else:
            shrank = True
            self._retract(output)
        if shrank:
            running.is_full = False
        if not running.entries:
            return None
        self._grow(running.entries)
        running.mode = Mode.DECODE
        running.chunked, running.num_decoding = None, 0
        return running

    def _has_room(self, entries: Sequence[Entry]) -> bool:
        return self.holdings.has_room(entries)

    def _grow(self, entries: Sequence[Entry]) -> None:
        self.holdings.grow(entries)

    def _retract(self, output: SglangOutput) -> None:
        """Take slots from requests with few outputs until the others may decode."""
        entries = sorted(
            self.running_batch.entries,
            key=lambda each: (each.num_outputs, -each.num_prompt_tokens),
            reverse=True,
        )
        retracted: list[Entry] = []
        while not retracted or not self.holdings.has_room(entries):
            if len(entries) == 1:
                break
            entry = entries.pop()
            retracted.append(entry)
            found = self.holdings.retract(
                entry, len(entries), entries[0], "no slot to decode"
            )
            output.preemptions += found
            output.retracted.append(entry.request)
        if len(entries) == 1 and not self.holdings.has_room(entries):
            # limits leave room for each alone from 0.5.22 on, but for such engines
            if not self.settings.gives_up_last:
                raise OutOfMemoryError(
                    "Failed to retract any request. No space left for only one request."
                )
            reason = "no slot to decode, with all others retracted"
            entry = entries.pop()
            output.preemptions += self.holdings.retract(entry, 0, entry, reason)
            self.queue.rejected.append((entry, reason))
        self.running_batch.entries = entries
        self.ratio.retracted(entries)
        for entry in retracted:
            self._enter(entry)

    # -- priorities -----------------------------------------------------------

    def _preempt_for(
        self,
        entry: Entry,
        adder: PrefillAdder,
        preempted: list[Entry],
        output: SglangOutput,
    ) -> bool:
        """Push less urgent requests out for one that waits, if that seems to do."""
        running = self.running_batch
        movable = [
            each
            for each in running.entries
            if not (each.is_finished or each in preempted)
        ]
        need = adder.need(entry)
        out = self._policy.victims(entry, movable, need, adder.expected)
        leaving = [each for each in running.entries if each in out]
        for num_released, each in enumerate(leaving, start=1):
            adder.release(each)
            num_left = len(running.entries) - num_released
            output.preemptions += self.holdings.retract(
                each, num_left, entry, "a more urgent request waits"
            )
            output.preempted.append(each.request)
        preempted += out  # in the order of the search, the least urgent first
        running.entries = [each for each in running.entries if each not in out]
        return bool(out)

    def _lose(self, preempted: Sequence[Entry], output: SglangOutput) -> None:
        """Forget requests that were pushed out for one that did not fit.

        So does the release; the engine is told that they will not be served.
        """
        self.num_lost_requests += len(preempted)
        for entry in preempted:
            self._turn_away(
                entry,
                "pushed out for a more urgent request that then did not fit: SGLang "
                "forgets it",
                output,
            )

    def _turn_away(self, entry: Entry, reason: str, output: SglangOutput) -> None:
        request = entry.request
        if request.status.is_finished:
            return
        request.reason = reason
        request.move_to(RequestStatus.FINISHED_REJECTED)
        del self._entries[request]
        output.ignored.append(request)

    def _refuse_rejected(self, output: SglangOutput) -> None:
        """Tell the engine of requests that were turned away."""
        rejected, output.dropped = self.queue.take_left()
        output.rejected = [entry.request for entry, _ in rejected]
        for entry, reason in rejected:
            self._turn_away(entry, reason, output)
            if entry.is_ended:
                self._ending.remove(entry)

    # -- results --------------------------------------------------------------

    def deliver(self, output: SchedulerOutput) -> Delivery:
        """Take the oldest batch out of flight; return whose tokens count."""
        if not isinstance(output, SglangOutput):  # none was in flight
            output = SglangOutput()
        requests: list[Request] = []
        stale: list[Request] = []
        wasted: list[Request] = []
        entries: list[Entry] = []
        for entry, _, _ in output.entries:
            request = entry.request
            if entry is output.chunked:
                continue
            if entry.is_finished:
                wasted.append(request)
                if entry in self._ended_at_rest:  # by this very token
                    self._ended_at_rest.remove(entry)
                else:
                    self.num_wasted_tokens += 1
            elif entry.is_retracted:
                stale.append(request)
            else:
                entries.append(entry)
                if not request.status.is_finished:
                    requests.append(request)
        self._processing = output, entries
        return Delivery(requests, stale, wasted)

    def update(self, finished: Sequence[Request]) -> None:
        """Share or free what the requests of the delivered batch hold."""
        if finished:
            self._rested_s = finished[-1].finish_s
        assert self._processing is not None
        (output, entries), self._processing = self._processing, None
        if output is self._queued_output:
            self._queued_output = None
        num_prompts = len(output.entries) - output.num_decoding
        decoding = {entry for entry, _, _ in output.entries[num_prompts:]}
        is_decode = output.mode is Mode.DECODE
        self.ended = []
        in_group = self._in_group(output)
        if in_group:
            self.holdings.allocator.begin_group()
        for entry in entries:
            if entry.request.status.is_finished:
                self._end(entry)
            elif not (is_decode or entry in decoding):
                self.holdings.share(entry)
        if in_group:
            self.holdings.allocator.end_group()
        if self._is_idle(output):
            self.ratio.reset()

    def _in_group(self, output: SglangOutput) -> bool:
        """Whether all that the results of a batch free is freed at once."""
        return output.mode is Mode.DECODE or self.settings.makes_plans

    def _is_idle(self, output: SglangOutput) -> bool:
        """Whether the release's loop had nothing to run, nor a result to process."""
        was_idle, self._was_idle = self._was_idle, self._last is None
        if self.settings.patch >= 11 and self._has_something():
            return False
        if not self.settings.overlap:
            return self._last is None
        return self._last is None and was_idle and output.mode is None

    def _has_something(self) -> bool:
        return bool(self.queue.entries or self.running_batch.entries or self.chunked)

    def _end(self, entry: Entry) -> None:
        """Let a request go: its last output has been processed."""
        entry.is_finished = True
        if entry.slot >= 0:
            self.holdings.end(entry)
        self.ended.append(entry.request)
        if entry.is_ended:
            self._ending.remove(entry)
            entry.max_new_tokens -= 1  # for the token that it ended with, which is lost
        else:
            del self._entries[entry.request]

    def _rest(self) -> None:
        """Do what the release's loop does while there is nothing to do.

        Requests that were withdrawn while they ran end with their next token.
        """
        self._drop_chunk()
        self._ended_at_rest = [each for each in self._ending if each.slot >= 0]
        for entry in self._ended_at_rest:
            self._end(entry)
        self.chunked = None
        self._queued_output = None
        self.running_batch = ScheduleBatch()
        self._last = None
        self.ratio.reset()
