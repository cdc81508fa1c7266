"""When steps end that are formed while the one before runs, many at a time."""

from __future__ import annotations

from bisect import bisect_left
from functools import reduce
from itertools import accumulate, repeat
from math import inf
from operator import add, le, lt, sub
from typing import TYPE_CHECKING

from sim.costs.ahead import HostAhead
from sim.costs.pricing import batch_total_of, decode_totals
from sim.engine.pipeline import NOTHING, BatchQueue, StepInFlight
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel, DecodeEnds
    from sim.costs.pricing import DecodeTotals
    from sim.results.step_log import StepLog


class HostQueue(BatchQueue):
    """`BatchQueue` of two, of a scheduler that keeps its decodes on a clock.

    A turn is what an engine core does at a time: it forms a step, and waits for the
    output of the one before. Steps are told by their shapes, and quiet ones in
    stretches. As long as the host is hidden, these follow from the GPU alone::

        turn       end of the step before
        step       ends its seconds on the GPU after that

    Parameters
    ----------
    cost_model
        See `BatchQueue`.
    log
        Takes the steps.
    """

    def __init__(self, cost_model: CostModel, log: StepLog) -> None:
        super().__init__(2, cost_model)
        self._cost_model = cost_model
        self._log = log
        self._model = cost_model if isinstance(cost_model, HostAhead) else None
        self._total_s = batch_total_of(
            cost_model if self._model is None else self._model.model
        )
        self._starts_s: list[float] = []
        self._ends_s: list[float] = []

    # -- one step -------------------------------------------------------------

    def enter(self, now_s: float, shape: Sequence[int]) -> tuple[float, float]:
        """Let a step of these six fields enter; return its length and its end.

        See `BatchQueue.end_s`.
        """
        num_decodes, _, num_prefills, num_tokens, _, _ = shape
        total_s = self._total_s(*shape)
        if not (num_decodes or num_tokens):
            return total_s, self._empty_end_s(now_s, total_s)
        if self._model is not None:
            host_s, gpu_s = self._model.split(total_s, num_decodes + num_prefills)
            return total_s, self._enter(now_s, ((0.0, host_s), (0.0, gpu_s)))
        if self._staged is None:
            return total_s, self._enter(now_s, ((0.0, total_s),))
        return total_s, self._enter(now_s, self._staged.stage_times(BatchShape(*shape)))

    def turn(
        self,
        step: int,
        now_s: float,
        end_s: float,
        shape: Sequence[int],
        has_requests: bool,
    ) -> float:
        """Take the step that has entered; return when the next one is formed."""
        computes = bool(shape[0] or shape[3])
        steps = self.steps
        steps.append(StepInFlight(step, NOTHING, end_s, computes))
        turn_s = now_s if now_s > self._ready_s else self._ready_s
        if len(steps) < 2 and (computes or has_requests):
            return turn_s
        oldest_s = steps.popleft().end_s
        return oldest_s if oldest_s > turn_s else turn_s

    # -- quiet steps ----------------------------------------------------------

    def decode_ends(self, num_decodes: int) -> DecodeEnds:
        """Return the turns of quiet steps, which are then taken; see `log_ends`."""
        model = self._cost_model if self._model is None else self._model.model
        totals = decode_totals(model, num_decodes)

        def turns(
            context: int, num_steps: int, now_s: float, until_s: float
        ) -> list[float]:
            return self._take(totals, num_decodes, context, num_steps, now_s, until_s)

        return turns

    def log_ends(self, turns: Sequence[float]) -> None:
        """Log starts and ends of the steps of these turns."""
        del turns
        self._log.starts_s.extend(self._starts_s)
        self._log.ends_s.extend(self._ends_s)

    def _take(  # noqa: PLR0917 - those of `DecodeEnds`
        self,
        totals: DecodeTotals,
        num_decodes: int,
        context: int,
        num_steps: int,
        now_s: float,
        until_s: float,
    ) -> list[float]:
        starts_s, ends_s = self._starts_s, self._ends_s = [], []
        turns_s: list[float] = []
        while num_steps:
            at = context + len(turns_s) * num_decodes
            found = self._take_hidden(
                totals, num_decodes, at, num_steps, now_s, until_s
            )
            if not found:
                end_s = self.enter(now_s, (num_decodes, at, 0, 0, 0, 0))[1]
                if not now_s < end_s < inf:
                    turns_s.append(end_s)  # which is refused
                    return turns_s
                found = [self.turn(0, now_s, end_s, (num_decodes, at, 0, 0), True)]
                starts_s.append(now_s)
                ends_s.append(end_s)
            num_steps -= len(found)
            turns_s += found
            now_s = turns_s[-1]
            if not now_s < until_s:
                break
        return turns_s

    def _take_hidden(  # noqa: PLR0917 - those of `_take`
        self,
        totals: DecodeTotals,
        num_decodes: int,
        context: int,
        num_steps: int,
        now_s: float,
        until_s: float,
    ) -> list[float]:
        """Take steps, of those ahead, that find the GPU at work; return their turns."""
        model, oldest_s = self._model, self.steps[-1].end_s
        if model is None or self._free_s[-1] != oldest_s:
            return []
        prepare_s = model.prepare_s
        host_s = model.split(prepare_s, num_decodes)[0]
        if now_s + host_s > oldest_s:
            return []
        if until_s < inf:
            gpu_s = totals(context, 1)[0] - prepare_s
            if gpu_s <= 0:
                return []
            num_steps = min(num_steps, max(int((until_s - oldest_s) / gpu_s), 0) + 2)
        parts_s = [total_s - prepare_s for total_s in totals(context, num_steps)]
        turns_s = [*accumulate(parts_s, initial=oldest_s)]
        ends_s = turns_s[1:]
        del turns_s[-1]
        num_taken = bisect_left(turns_s, until_s) + 1
        starts_s = [now_s, *turns_s[:-1]]
        are_hidden = [*map(le, map(add, starts_s, repeat(host_s)), turns_s)]
        if not all(are_hidden):
            num_taken = min(num_taken, are_hidden.index(False))
        del parts_s[num_taken:], turns_s[num_taken:], ends_s[num_taken:]
        del starts_s[num_taken:]
        if not (
            turns_s
            and min(parts_s) >= 0
            and all(map(lt, turns_s, ends_s))
            and ends_s[-1] < inf
        ):
            return []
        gains_s = map(sub, map(add, repeat(host_s), parts_s), map(sub, ends_s, turns_s))
        self.overlapped_s = reduce(
            add, map(max, gains_s, repeat(0.0)), self.overlapped_s
        )
        self._ready_s = starts_s[-1] + host_s
        self._free_s = [self._ready_s, ends_s[-1]]
        self.steps[-1] = StepInFlight(0, NOTHING, ends_s[-1], computes=True)
        self._starts_s += starts_s
        self._ends_s += ends_s
        return turns_s
