"""Waiting requests of an engine with a connector: some of them hold blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.v1.queues import REQUEST_QUEUES, RequestQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.scheduler.request import Request


class HoldingQueues:
    """Two queues: what holds blocks is always looked at before what holds none.

    Parameters
    ----------
    scheduling_policy
        Of both.

    Attributes
    ----------
    holding
        Requests that load, and those that have loaded and are not admitted yet.
    fresh
        The others, preempted ones included.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py`` (`kv_holding_waiting`).
    """

    def __init__(self, scheduling_policy: str) -> None:
        make = REQUEST_QUEUES[scheduling_policy]
        self.holding: RequestQueue = make()
        self.fresh: RequestQueue = make()
        self.add_request = self.fresh.add_request
        self.prepend_request = self.fresh.prepend_request
        self.prepend_requests = self.fresh.prepend_requests

    @property
    def first(self) -> RequestQueue:
        """The queue that is looked at next."""
        return self.holding if len(self.holding) else self.fresh

    def peek_request(self) -> Request:
        return self.first.peek_request()

    def pop_request(self) -> Request:
        return self.first.pop_request()

    def set_aside(self, holding: Sequence[Request], fresh: Sequence[Request]) -> None:
        """Put what a scan has passed over in front of its queue, in its order."""
        self.holding.prepend_requests(holding[::-1])
        self.fresh.prepend_requests(fresh[::-1])

    def remove(self, request: Request) -> None:
        queue = self.holding if request in self.holding else self.fresh
        queue.remove(request)

    def __len__(self) -> int:
        return len(self.holding) + len(self.fresh)

    def __iter__(self) -> Iterator[Request]:
        yield from self.holding
        yield from self.fresh
