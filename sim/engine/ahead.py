"""When steps end that are formed while the one before runs, many at a time."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from typing import TYPE_CHECKING

from sim.costs.ahead import HostAhead
from sim.costs.pricing import batch_total_of, ends_ahead_of
from sim.engine.pipeline import NOTHING, Stages, StepInFlight
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel, DecodeEnds
    from sim.results.step_log import StepLog


class HostQueue(Stages):
    """`BatchQueue` of two, of a scheduler that keeps its decodes on a clock.

    A turn is what an engine core does at a time: it forms a step, and waits for the
    output of the one before. So between turns one step at most is in flight. Steps are
    told by their shapes, and quiet ones in stretches. As long as the host is hidden,
    these follow from the GPU alone::

        turn       end of the step before
        step       ends its seconds on the GPU after that

    Parameters
    ----------
    cost_model
        See `Stages`.
    log
        Takes the ends of quiet steps, and when outputs are processed.

    Attributes
    ----------
    computes
        Whether the step that was in flight when the latest one entered has tokens.
    """

    def __init__(self, cost_model: CostModel, log: StepLog) -> None:
        super().__init__(cost_model)
        self._model = cost_model if isinstance(cost_model, HostAhead) else None
        self._total_s = batch_total_of(
            cost_model if self._model is None else self._model.model
        )
        self._log = log
        self._in_flight_s = -inf  # the end of the step in flight, if there is one
        self._computes = self.computes = False

    @property
    def has_steps(self) -> bool:
        """Whether an output is to come."""
        return self._in_flight_s > -inf

    @property
    def num_steps(self) -> int:
        """Steps of which the output is to come."""
        return int(self._in_flight_s > -inf)

    def enter(
        self, now_s: float, shape: Sequence[int], has_requests: bool
    ) -> tuple[float, float, float]:
        """Let a step of these six fields enter.

        Returns
        -------
        (float, float, float)
            Its length, its end, and when the next one is formed.
        """
        total_s = self._total_s(*shape)
        num_decodes, _, num_prefills, num_tokens, _, _ = shape
        computes = bool(num_decodes or num_tokens)
        model = self._model
        if computes and model is not None:
            host_s, gpu_s = model.split(total_s, num_decodes + num_prefills)
            end_s = self._enter_ahead(now_s, host_s, gpu_s)
        else:
            end_s = self.end_s(now_s, BatchShape(*shape), total_s)
        turn_s = now_s if now_s > self._ready_s else self._ready_s
        oldest_s, self._in_flight_s = self._in_flight_s, end_s
        self.computes = self._computes and oldest_s > -inf
        self._computes = computes
        if oldest_s == -inf and not (computes or has_requests):
            oldest_s, self._in_flight_s = end_s, -inf
        self.has_output = oldest_s > -inf
        if self.has_output:
            turn_s = oldest_s if oldest_s > turn_s else turn_s
            self._log.outputs_s.append(turn_s)
        return total_s, end_s, turn_s

    def pop(self, now_s: float) -> StepInFlight:
        """Return the step in flight; it is processed no earlier than now."""
        end_s, self._in_flight_s = self._in_flight_s, -inf
        end_s = max(end_s, now_s, self._ready_s)
        self._log.outputs_s.append(end_s)
        self.has_output = True
        return StepInFlight(-1, NOTHING, end_s)

    def decode_ends(self, num_decodes: int) -> DecodeEnds:
        """Return what takes and logs quiet steps of so many decodes, saying the turns.

        These are fewer than asked for where the host begins, or ceases, to be hidden.
        """
        model, log_ends = self._model, self._log.ends_s.extend
        log_outputs = self._log.outputs_s.extend
        if model is None:
            return partial(self._take_late, num_decodes, inf)
        host_s = model.split(model.prepare_s, num_decodes)[0]
        hidden_ns = round(host_s * 1e9)
        ends_of = ends_ahead_of(model, num_decodes)
        take_late = partial(self._take_late, num_decodes, host_s)

        def turns(
            context: int, num_steps: int, now_s: float, until_s: float
        ) -> list[float]:
            oldest_s = self._in_flight_s
            if not now_s + host_s <= oldest_s == self._last_s:
                return take_late(context, num_steps, now_s, until_s)
            ends_s = ends_of(context, num_steps, oldest_s, until_s)
            turns_s = [oldest_s, *ends_s]
            last_s = turns_s.pop()
            if not turns_s[-1] < last_s < inf:
                ends_s.pop()
                if not ends_s:
                    return take_late(context, num_steps, now_s, until_s)
                last_s = turns_s.pop()
            log_ends(ends_s)
            log_outputs(turns_s)
            num_steps = len(ends_s)
            self._ready_s = (turns_s[-2] if num_steps > 1 else now_s) + host_s
            self._in_flight_s = self._last_s = last_s
            self._hidden_ns += hidden_ns * num_steps
            self._computes = True
            return turns_s

        return turns

    def _take_late(  # noqa: PLR0917 - those of `DecodeEnds`
        self,
        num_decodes: int,
        host_s: float,
        context: int,
        num_steps: int,
        now_s: float,
        until_s: float,
    ) -> list[float]:
        """Take quiet steps one by one until the host is hidden; return the turns."""
        turns_s: list[float] = []
        for at in range(context, context + num_steps * num_decodes, num_decodes):
            shape = (num_decodes, at, 0, 0, 0, 0)
            _, end_s, turn_s = self.enter(now_s, shape, has_requests=True)
            self._log.ends_s.append(end_s)
            is_long = now_s < end_s < inf
            now_s = turn_s if is_long else nan  # which is refused
            turns_s.append(now_s)
            if not (is_long and now_s < until_s) or (
                now_s + host_s <= self._in_flight_s == self._last_s
            ):
                break
        return turns_s
