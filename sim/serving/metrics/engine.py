"""``/metrics`` of a served engine: what a step shows is counted as it happens."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry

from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from sim.costs.base import StepCost
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.serving.live import LiveEngine

    MakeMetrics = Callable[[CollectorRegistry, LiveEngine], "EngineMetrics"]

_SERVED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class EngineMetrics(Protocol):
    """Metrics under the names of an engine; `engine` is the data-parallel rank."""

    def scheduled(self, engine: int, output: SchedulerOutput) -> None:
        """Count the decisions of a scheduler call."""
        ...

    def first_token(self, engine: int, request: Request, now_s: float) -> None:
        """Count the end of a prefill."""
        ...

    def tokens(self, engine: int, num_tokens: int, gaps_s: Sequence[float]) -> None:
        """Count the tokens of a step, and how long after the last ones each came."""
        ...

    def ended(self, engine: int, request: Request, reason: str) -> None:
        """Count a request that was served."""
        ...

    def state(self, live: LiveEngine) -> None:
        """Set the gauges that are read when they are asked for."""
        ...


def metrics_of(live: LiveEngine, make: MakeMetrics) -> CollectorRegistry:
    """Return the metrics of an engine, under the names of what `make` returns."""
    registry = _Registry()
    metrics = make(registry, live)
    registry.told = (metrics, live)
    for index, engine in enumerate(live.run.engines):
        engine.listeners.append(_Steps(index, metrics, live))
    return registry


class _Registry(CollectorRegistry):
    """Metrics whose gauges are set just before they are read."""

    told: tuple[EngineMetrics, LiveEngine] | None = None

    def collect(self) -> Iterable[Metric]:
        if self.told is not None:
            metrics, live = self.told
            metrics.state(live)
        return super().collect()


class _Steps:
    """Counts in metrics what the steps of one engine gave; see `StepListener`."""

    def __init__(self, index: int, metrics: EngineMetrics, live: LiveEngine) -> None:
        self._index = index
        self._metrics = metrics
        self._live = live
        self._in_flight: deque[list[Request]] = deque()
        self._seen: dict[Request, tuple[int, float]] = {}  # tokens, and when

    def scheduled(
        self,
        step: int,
        start_s: float,
        cost: StepCost,
        output: SchedulerOutput,
        scheduler: Any,
    ) -> None:
        del step, start_s, cost, scheduler
        self._in_flight.append(list(output.scheduled))
        self._metrics.scheduled(self._index, output)

    def ended(self, end_s: float, finished: Sequence[Request], scheduler: Any) -> None:
        del scheduler
        seen, metrics, index = self._seen, self._metrics, self._index
        batch = self._in_flight.popleft() if self._in_flight else []
        num_tokens, gaps_s = 0, []
        ending = set(finished)
        for request in batch:
            if request.status.is_finished and request not in ending:
                continue  # it had ended while this step was in flight
            now = request.num_output_tokens
            before, last_s = seen.get(request, (0, end_s))
            if now == before:
                continue
            num_tokens += now - before
            if before == 0:
                metrics.first_token(index, request, end_s)
            else:
                gaps_s.append(end_s - last_s)
            seen[request] = (now, end_s)
        metrics.tokens(index, num_tokens, gaps_s)
        for request in finished:
            seen.pop(request, None)
            if request.status in _SERVED:
                metrics.ended(index, request, self._reason(request))
        if len(seen) > 2 * len(batch) + 64:  # requests of clients that have left
            self._seen = {r: s for r, s in seen.items() if not r.status.is_finished}

    def _reason(self, request: Request) -> str:
        is_stopped = request.status is RequestStatus.FINISHED_STOPPED
        ends_by_itself = self._live.ends_by_itself(request)
        return "stop" if is_stopped and ends_by_itself else "length"
