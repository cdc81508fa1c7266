"""Waiting queues of the V1 scheduler: which request is looked at next."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.scheduler.request import Request


def urgency(request: Request) -> tuple[int, float, int]:
    """Return the sort key of the priority policy; the smallest is the most urgent.

    Source: vLLM 0.11.2, ``vllm/v1/core/sched/request_queue.py``.
    """
    return request.priority, request.arrival_s, request.request_id


class RequestQueue(Protocol):
    """Requests that hold no blocks, in the order in which they are admitted."""

    def add_request(self, request: Request, /) -> None:
        """Queue an arrival."""
        ...

    def prepend_request(self, request: Request, /) -> None:
        """Queue a preempted request."""
        ...

    def prepend_requests(self, requests: Sequence[Request]) -> None:
        """Queue again what a scan had set aside, one by one."""
        ...

    def peek_request(self) -> Request:
        """Return the head."""
        ...

    def pop_request(self) -> Request:
        """Remove and return the head."""
        ...

    def remove(self, request: Request, /) -> None:
        """Withdraw a request; O(n)."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Walk in the order of `pop_request`."""
        ...


class FCFSRequestQueue(deque["Request"]):
    """First come, first served; preempted requests come before those not begun yet."""

    # as methods of the deque: they are called for every request
    add_request = deque.append
    prepend_request = deque.appendleft
    pop_request = deque.popleft

    def prepend_requests(self, requests: Sequence[Request]) -> None:
        """Put requests at the front one by one, so that the last one comes first."""
        self.extendleft(requests)

    def peek_request(self) -> Request:
        """Return the front."""
        return self[0]


class PriorityRequestQueue:
    """The most urgent first, whether it was preempted or has just arrived: a heap."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []

    def add_request(self, request: Request) -> None:
        """Queue a request at its place. O(log n)."""
        heappush(self._heap, (urgency(request), request))

    def prepend_request(self, request: Request) -> None:
        """Queue a request at its place: a heap has no front to put it to."""
        self.add_request(request)

    def prepend_requests(self, requests: Sequence[Request]) -> None:
        """Queue requests at their places."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the most urgent request. O(1)."""
        return self._heap[0][1]

    def pop_request(self) -> Request:
        """Remove and return the most urgent request. O(log n)."""
        return heappop(self._heap)[1]

    def remove(self, request: Request, /) -> None:
        """Withdraw `request`. O(n).

        Raises
        ------
        ValueError
            If it is not queued.
        """
        self._heap.remove((urgency(request), request))
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """Walk from the most to the least urgent. O(n log n)."""
        return iter([request for _, request in sorted(self._heap)])


REQUEST_QUEUES: dict[str, type[FCFSRequestQueue] | type[PriorityRequestQueue]] = {
    "fcfs": FCFSRequestQueue,
    "priority": PriorityRequestQueue,
}
"""Scheduling policy to its waiting queue."""
