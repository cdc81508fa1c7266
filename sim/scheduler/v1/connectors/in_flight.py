"""Engines with a KV connector that have several steps in flight."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sim.scheduler.request import Request
from sim.scheduler.v1.batch_queue import BatchQueueScheduler
from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cache.v1.groups.table import Copies
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.in_flight import Delivery
    from sim.scheduler.v1.scheduler import Shape
    from sim.scheduler.v1.settings import Settings


class StepFence:
    """Which requests' blocks steps in flight still write.

    Steps with tokens are counted when they are formed and when they have ended. The
    blocks of a request that leaves come free when all steps of before have ended.
    """

    def __init__(self) -> None:
        self._num_formed = self._num_ended = 0
        self._latest: dict[Request, int] = {}  # step with tokens of it
        self._leaving: deque[tuple[int, Request | Sequence[Copies]]] = deque()

    def form(self, requests: Iterable[Request]) -> None:
        """Note the batch of a step."""
        batch = dict.fromkeys(requests, self._num_formed + 1)
        if batch:
            self._num_formed += 1
            self._latest.update(batch)

    def is_written(self, request: Request) -> bool:
        """Whether a step in flight has tokens of a request."""
        return self._latest.get(request, 0) > self._num_ended

    def hold(self, request: Request) -> None:
        """Keep the blocks of a request that has left until those steps have ended."""
        self._leaving.append((self._num_formed, request))

    def hold_copies(self, copies: Sequence[Copies]) -> None:
        """Keep blocks that are copied before the next step until it has ended."""
        self._leaving.append((self._num_formed + 1, copies))

    def forget(self, request: Request) -> None:
        """Take note of a request that leaves."""
        self._latest.pop(request, None)

    def end(self) -> Iterator[Request | Sequence[Copies]]:
        """Note that the oldest step has ended; return what lets go of blocks."""
        self._num_ended += 1
        leaving = self._leaving
        while leaving and leaving[0][0] <= self._num_ended:
            yield leaving.popleft()[1]

    def holders(self) -> list[Request]:
        """Return those that have left and hold blocks."""
        return [each for _, each in self._leaving if isinstance(each, Request)]


class QueuedConnectorScheduler(ConnectorScheduler, BatchQueueScheduler):
    """`ConnectorScheduler` that forms steps before it knows earlier outputs.

    What is different follows from blocks that a step in flight writes. A connector may
    fill a block as soon as it is free, in no order with that step, so:

    - Blocks of a request that has ended come free when the steps in flight have ended,
      and so do blocks that were copied before one of them.
    - A request with tokens in flight is not preempted. Where it would be the victim,
      no request behind it gets a token in that call.
    - Chunks are stored when their tokens are known; they are computed by then, or by
      the step in flight.

    A producer fills no blocks, and frees and preempts as without a connector; but what
    a victim has in flight is dropped, and computed again.

    Parameters
    ----------
    settings, cache
        See `ConnectorScheduler`.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py`` (`defer_block_free`).
    """

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        self._in_flight.drops_stale = self.connector.requires_kv_delivery
        self._fence = StepFence() if self.connector.fills_blocks else None
        if self._fence is not None:
            self.groups.keep_copies = self._fence.hold_copies

    def form(self, now_s: float) -> Shape:
        shape = super().form(now_s)
        if self._fence is not None:
            self._fence.form(request for request, _, _ in self.prompts)
        return shape

    def deliver(self, output: SchedulerOutput) -> Delivery:
        if self._fence is not None and output.scheduled:
            for each in self._fence.end():
                if isinstance(each, Request):
                    self.tables.free_as_one(each)
                else:
                    self.groups.free_copies(each)
        return super().deliver(output)

    def _is_written(self, request: Request) -> bool:
        return self._fence is not None and self._fence.is_written(request)

    def _free_or_keep(self, request: Request) -> int:
        fence = self._fence
        if fence is None or request in self._kept:
            return super()._free_or_keep(request)
        is_written = fence.is_written(request)
        fence.forget(request)
        if not is_written:
            return super()._free_or_keep(request)
        fence.hold(request)
        return 0

    def _num_processed_tokens(self, request: Request) -> int:
        return self._in_flight.num_processed_tokens(request)

    def _in_mid_way(self) -> dict[Request, None]:
        return dict.fromkeys(filter(self._in_flight.is_chunk, self.running))

    def num_tokens_after(self, requests: Iterable[Request]) -> dict[Request, int]:
        after = super().num_tokens_after(requests)
        return {each: min(number, each.num_tokens) for each, number in after.items()}

    def _holders(self) -> list[Request]:
        held = [] if self._fence is None else self._fence.holders()
        return [*super()._holders(), *held]
