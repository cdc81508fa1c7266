"""The asynchronous scheduler of an installed vLLM, which has two steps in flight."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sim.errors import SchedulerError
from sim.scheduler.hosted.scheduler import VllmScheduler, request_key
from sim.scheduler.v1.in_flight import Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.hosted.engine import HostedStep
    from sim.scheduler.hosted.scheduler import HostedSettings
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig


class QueuedVllmScheduler(VllmScheduler):
    """`VllmScheduler` behind an engine core's queue of batches.

    See `sim.scheduler.v1.batch_queue.BatchQueueScheduler` for what that is.

    Attributes
    ----------
    num_wasted_tokens
        Outputs that were dropped so far, their requests having ended.
    """

    def __init__(self, settings: HostedSettings, cache: CacheConfig) -> None:
        if settings.pipeline_parallel_size > 1:
            raise SchedulerError(
                f"a hosted vLLM runs in one stage, pipeline_parallel_size is "
                f"{settings.pipeline_parallel_size}; leave it out, or take scheduler v1"
            )
        super().__init__(settings, cache)
        self.max_concurrent_batches = settings.max_concurrent_batches
        self._queue: deque[tuple[SchedulerOutput, HostedStep, list[str]]] = deque()
        self._brings: set[str] = set()
        self.num_wasted_tokens = 0

    @property
    def has_finish_notice(self) -> bool:
        """Whether requests have left since the latest call."""
        return self.engine.has_finish_notice

    def schedule(self, now_s: float) -> SchedulerOutput:
        output = super().schedule(now_s)
        step = self._step
        assert step is not None
        bring_output = [
            key for key in step.num_scheduled_tokens if not self.engine.is_chunk(key)
        ]
        self._queue.append((output, step, bring_output))
        return output

    def deliver(self, output: SchedulerOutput) -> Delivery:
        """Take a step, the oldest, out of flight, and say which of its tokens count.

        Where the output is that of none, there is room for another step ahead of it.
        """
        delivery = Delivery([], [], [])
        if not self._queue or self._queue[0][0] is not output:
            self._step = None
            return delivery
        _, self._step, bring_output = self._queue.popleft()
        wanted = set(bring_output)
        for request in output.scheduled:
            key = request_key(request)
            is_held = self.engine.holds(key)
            if is_held and self.engine.is_stale(key):
                delivery.stale.append(request)
            if key in wanted and not (is_held and self.engine.drops_output(key)):
                (delivery.requests if is_held else delivery.wasted).append(request)
        self._brings = {request_key(request) for request in delivery.requests}
        self.num_wasted_tokens += len(delivery.wasted)
        return delivery

    def update(self, finished: Sequence[Request]) -> None:
        if self._step is not None:
            self._finish(finished, self._brings)

    def num_placeholders(self, request: Request) -> int:
        """Return how many outputs of steps in flight a request awaits."""
        return self.engine.num_placeholders(request_key(request))
