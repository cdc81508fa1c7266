"""When steps end that are formed while the one before runs, many at a time."""

from __future__ import annotations

from array import array
from math import inf
from typing import TYPE_CHECKING, Any

from sim.costs.pricing import batch_total_of
from sim.costs.steps.ahead import HostAhead
from sim.engine.common_prefix import ByCommonPrefix
from sim.engine.pipeline import NOTHING, Stages, StepInFlight
from sim.engine.steps.base import ByCount, no_length
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Sized

    from sim.costs.base import BatchTotal, CostModel, DecodeEnds
    from sim.engine.common_prefix import CommonPrefixes
    from sim.results.recording.step_log import StepLog


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
    total_s
        The price of a step of six fields, in seconds.
    hosts
        What the host takes of it, by its requests: in seconds, and in nanoseconds.
        Without requests, or if the model does not say, nothing hides it.
    quiet
        The same of quiet steps, by their decodes, and when these end if it is hidden.
    steady_s
        When the step in flight ends, if it has tokens and the turn before brought an
        output; else -inf. While the host stays hidden that remains so, and of all that
        is noted here only this and `hidden_ns` change.
    computes
        Whether the step that was in flight when the latest one entered has tokens.
    """

    def __init__(self, cost_model: CostModel, log: StepLog) -> None:
        super().__init__(cost_model)
        self._cost_model = cost_model
        self._model = cost_model if isinstance(cost_model, HostAhead) else None
        self.hosts = ByCount(self._host)
        self.quiet: Any = self._quiet_steps_of(cost_model)
        self.total_s: BatchTotal = _total_s_of(cost_model)
        self._shape_of: Callable[[Sequence[int]], BatchShape] = _shape_of
        self._log = log
        if log.tell_outputs is not None:  # of the engine that this one replaces
            log.flush()
        self._log_end, log.tell_outputs = log.ends_s.append, self._tell_outputs
        self._awaited = array("d")  # the end of a step that the log has, in flight
        self._late: list[tuple[int, float]] = []
        self._in_flight_s = -inf  # the end of the step in flight, if there is one
        self._computes = self.computes = False
        self.steady_s = -inf

    def share(self, prefixes: CommonPrefixes) -> None:
        """Price steps by the prefix that their requests share, as it is noted."""
        self.total_s = ByCommonPrefix(prefixes, _total_s_of)
        self.quiet = ByCommonPrefix(prefixes, self._quiet_steps_of)
        self._shape_of = prefixes.shape

    @property
    def has_steps(self) -> bool:
        """Whether an output is to come."""
        return self.steady_s > -inf or self._in_flight_s > -inf

    @property
    def num_steps(self) -> int:
        """Steps of which the output is to come."""
        return int(self.has_steps)

    def enter(self, now_s: float, shape: Sequence[int], requests: Sized) -> float:
        """Let a step of these six fields enter; return when the next one is formed.

        `requests` run or wait then.

        Raises
        ------
        CostError
            If it takes no finite time of more than zero (invariant 3).
        """
        total_s = self.total_s(*shape)
        oldest_s, computed = self._in_flight_s, self._computes
        if self.steady_s > -inf:
            oldest_s = self.last_s = self.steady_s
            computed = True
        num_decodes, _, num_prefills, num_tokens, _, _ = shape
        computes = bool(num_decodes or num_tokens)
        if computes and self._model is not None:
            host_s, gpu_s = self._model.split(total_s, num_decodes + num_prefills)
            end_s = self._enter_ahead(now_s, host_s, gpu_s)
        else:
            end_s = self.end_s(now_s, self._shape_of(shape), total_s)
        if not now_s < end_s < inf:
            raise no_length(self._cost_model, BatchShape(*shape), now_s)
        turn_s = now_s if now_s > self._ready_s else self._ready_s
        self.computes = computed and oldest_s > -inf
        self._in_flight_s, self._computes = end_s, computes
        if oldest_s == -inf and not (computes or requests):
            oldest_s, self._in_flight_s = end_s, -inf
            self._log_end(end_s)
            self.has_output, self.steady_s = True, -inf
            return self._processed(oldest_s, turn_s)
        self.has_output = oldest_s > -inf
        self.steady_s = end_s if computes and self.has_output else -inf
        if self.has_output:
            turn_s = self._processed(oldest_s, turn_s)
        self._log_end(end_s)
        return turn_s

    def pop(self, now_s: float) -> StepInFlight:
        """Return the step in flight; it is processed no earlier than now."""
        end_s = self._in_flight_s
        if self.steady_s > -inf:
            end_s = self.last_s = self.steady_s
        self._in_flight_s = self.steady_s = -inf
        self.has_output = True
        end_s = self._processed(end_s, max(now_s, self._ready_s))
        return StepInFlight(-1, NOTHING, end_s)

    def _processed(self, end_s: float, now_s: float) -> float:
        """Note when the output of the latest step in the log is processed; return it.

        At the end of that step, but no earlier than now.
        """
        if now_s > end_s:
            self._late.append((len(self._awaited) + len(self._log.ends_s) - 1, now_s))
            return now_s
        return end_s

    def _tell_outputs(self) -> None:
        """Tell the log when outputs were processed, of all steps but one in flight."""
        outputs_s = self._awaited + self._log.ends_s
        num_known = len(outputs_s) - self.num_steps
        self._awaited = outputs_s[num_known:]
        for row, output_s in self._late:
            outputs_s[row] = output_s
        self._late.clear()
        self._log.outputs_s += outputs_s[:num_known]

    def _host(self, num_rows: int) -> tuple[float, int]:
        model = self._model
        if model is None or not num_rows:
            return inf, 0
        host_s = model.split(model.prepare_s, num_rows)[0]
        return host_s, round(host_s * 1e9)

    def _quiet_steps_of(
        self, model: CostModel
    ) -> ByCount[tuple[float, int, DecodeEnds]]:
        """Return the host's part of quiet steps by decodes, and when these end."""
        ends_of = model.decode_ends if isinstance(model, HostAhead) else None

        def quiet(num_decodes: int) -> tuple[float, int, DecodeEnds]:
            ends = _no_ends if ends_of is None else ends_of(num_decodes)
            return *self.hosts[num_decodes], ends

        return ByCount(quiet)

    def take_late(
        self,
        num_decodes: int,
        context: int,
        num_steps: int,
        now_s: float,
        until_s: float,
    ) -> list[float]:
        """Take quiet steps one by one, and log them; return the turns.

        These are fewer than asked for where the host begins to be hidden.
        """
        host_s, _ = self.hosts[num_decodes]
        turns_s: list[float] = []
        for at in range(context, context + num_steps * num_decodes, num_decodes):
            shape = (num_decodes, at, 0, 0, 0, 0)
            now_s = self.enter(now_s, shape, shape)
            turns_s.append(now_s)
            if not now_s < until_s or not self.has_output:
                break
            if now_s + host_s <= self.steady_s:
                break
        return turns_s


def _total_s_of(model: CostModel) -> BatchTotal:
    return batch_total_of(model.model if isinstance(model, HostAhead) else model)


def _shape_of(shape: Sequence[int]) -> BatchShape:
    return BatchShape(*shape)


def _no_ends(*stretch: float) -> list[float]:
    """Return the ends of no steps."""
    del stretch
    return []
