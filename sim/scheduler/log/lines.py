"""Parts that the logs of all generations share: a line a step, and table changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request

Line = dict[str, Any]

NO_DECISIONS = ("start_s", "end_s", "seqs")
"""Fields of a recorded schedule that decision logs do not have: times, and what follows
from the other lines."""


class Names(Protocol):
    """Names of requests, by request id."""

    def __getitem__(self, request_id: int, /) -> str:
        """Return the name of a request."""
        ...


class StepLog(Protocol):
    """Writes the lines of a scheduler, in the words of its generation."""

    def batch(self, output: Any) -> Line:
        """Return the batch, what was preempted and moved, and changed tables."""
        ...

    def queues(self) -> Line:
        """Return queues and free blocks, right after the call."""
        ...

    def free(self) -> list[int]:
        """Return the number of free blocks of each tier."""
        ...

    def requests(self) -> list[Request]:
        """Return the requests in all queues."""
        ...

    def queries(self, output: Any) -> Line:
        """Return the queries of a recorded schedule, beside the batch."""
        ...

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has left."""
        ...


class TableChanges:
    """Block tables as last logged, to log changes only."""

    def __init__(self) -> None:
        self._logged: dict[str, list[int]] = {}

    def length(self, key: str) -> int:
        """Return how many blocks the table had when it was last logged."""
        return len(self._logged.get(key, ()))

    def grow(self, key: str, new_ids: list[int]) -> list[Any] | None:
        """Do as `change` for a table that is known to have grown at its end only."""
        if not new_ids:
            return None
        logged = self._logged.setdefault(key, [])
        keep = len(logged)
        logged += new_ids
        return [keep, new_ids]

    def forget(self, key: str) -> None:
        """Drop a table; it counts as empty from now on."""
        self._logged.pop(key, None)

    def change(self, key: str, ids: list[int]) -> list[Any] | None:
        """Return ``[keep, ids behind them]``, or None if nothing changed."""
        last = self._logged.get(key, [])
        if ids == last:
            return None
        keep = 0
        for now, before in zip(ids, last, strict=False):
            if now != before:
                break
            keep += 1
        self._logged[key] = ids
        return [keep, ids[keep:]]


def preemptions(output: Any, names: Names) -> list[list[str]]:
    """Return victims and modes, in the order performed."""
    return [
        [names[preemption.request.request_id], preemption.mode.value]
        for preemption in output.preemptions
    ]


def names_of(requests: Iterable[Request], names: Names) -> list[str]:
    """Return the names of requests, in order."""
    return [names[request.request_id] for request in requests]
