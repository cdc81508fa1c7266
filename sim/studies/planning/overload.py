"""Runs that cannot keep up, seen early and cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.engine.stepwise import Engine
    from sim.simulation.run import Simulation
    from sim.studies.planning.objectives import Objective
    from workloads.spec import RequestSpec

EVERY_STEPS = 512
_MIN_QUEUE, _QUEUE_SHARE, _GROWTH = 100, 0.1, 1.5
_MIN_LATE, _LATE_SHARE = 10, 0.02


def _num_from(specs: Sequence[RequestSpec], time_s: float) -> int:
    """Return how many requests arrive at a time or later."""
    if isinstance(specs, RequestColumns):
        return int((specs.arrival_s >= time_s).sum())
    return sum(spec.arrival_s >= time_s for spec in specs)


def is_overloaded(num_late: int, num_requests: int) -> bool:
    """Whether the queue was long when the last request arrived.

    Latencies then tell how long the run was, not how good the engine is.

    Parameters
    ----------
    num_late
        Requests that had not begun by then.
    num_requests
        All that count.
    """
    return num_late > max(_MIN_LATE, _LATE_SHARE * num_requests)


class OverloadWatch:
    """Stops a run that has lost already.

    Two signs. *Certain*: as many requests wait longer than a bound on a percentile of
    TTFT allows as must not, whatever is still to come; the run would have missed the
    objective, so that stopping changes no answer. *Growth*: a tenth of all requests
    wait, and half as many again as at half of the time so far.

    Parameters
    ----------
    simulation
        Before it runs.
    objectives
        What the run is held to.
    warmup_s
        Requests that arrive earlier do not count.

    Attributes
    ----------
    was_cut
        Whether the run was stopped.
    """

    def __init__(
        self, simulation: Simulation, objectives: Sequence[Objective], warmup_s: float
    ) -> None:
        self.was_cut = False
        self._stop = simulation.stop
        self._active = simulation.recorder.active
        self._warmup_s = warmup_s
        num_counted = _num_from(simulation.specs, warmup_s)
        self._max_queue = max(_MIN_QUEUE, _QUEUE_SHARE * simulation.num_requests)
        self._bounds = [
            # One more than the share above the percentile moves the percentile itself.
            (each.limit / 1e3, num_counted * (1 - each.percent / 100) + 1)
            for each in objectives
            if each.of == "ttft" and each.percent is not None
        ]
        self._history: list[tuple[float, int]] = []
        simulation.engine.observe(EVERY_STEPS, self._look)

    def _look(self, engine: Engine) -> None:
        now_s, num_waiting = engine.env.now, engine.scheduler.num_waiting
        self._history.append((now_s, num_waiting))
        fewest = min((most for _, most in self._bounds), default=self._max_queue)
        if num_waiting <= min(fewest, self._max_queue):
            return
        if self._has_lost(now_s) or self._grows(now_s, num_waiting):
            self.was_cut = True
            self._stop()

    def _has_lost(self, now_s: float) -> bool:
        if not self._bounds:
            return False
        waits_s = [
            now_s - each.arrival_s
            for each in self._active.values()
            # NaN, before the first token, differs from itself.
            if each.first_token_s != each.first_token_s
            and each.arrival_s >= self._warmup_s
        ]
        return any(
            sum(wait_s > limit_s for wait_s in waits_s) > most
            for limit_s, most in self._bounds
        )

    def _grows(self, now_s: float, num_waiting: int) -> bool:
        if num_waiting <= self._max_queue:
            return False
        at_half = next(n for at_s, n in self._history if at_s >= now_s / 2)
        return num_waiting > _GROWTH * at_half
