"""Requests that wait."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from cache.errors import require
from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from sim.scheduler.request import Request
    from sim.scheduler.sglang.policy import SchedulePolicy
    from sim.scheduler.sglang.requests import Entry
    from sim.scheduler.sglang.settings import Settings


class WaitingQueue:
    """The queue and its limit, which holds for requests that come back, too.

    Parameters
    ----------
    settings
        Of the scheduler.
    policy
        Its order.

    Attributes
    ----------
    entries
        The queue.
    rejected, dropped
        What was turned away and why, mostly by the limit, and requests that were
        withdrawn, since the latest `take_left`.

    Notes
    -----
    Source: SGLang 0.5.9, ``managers/scheduler.py`` (`_add_request_to_queue`,
    `_abort_on_queued_limit`, `abort_request`).
    """

    def __init__(self, settings: Settings, policy: SchedulePolicy) -> None:
        self.entries: list[Entry] = []
        self.rejected: list[tuple[Entry, str]] = []
        self.dropped: list[Request] = []
        self._most = settings.max_queued_requests
        self._by_priority = settings.enable_priority_scheduling
        self._policy = policy
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self.entries)

    def enter(self, entry: Entry) -> None:
        """Put a request at the end, in place of the least urgent one at the limit."""
        entries = self.entries
        entry.entered = next(self._numbers)
        if self._most is None or len(entries) < self._most:
            entries.append(entry)
            return
        turned_away = entry
        if self._by_priority and entries:
            least = max(entries, key=self._policy.urgency)
            if self._policy.less_urgent(least, entry) > 0:
                turned_away = least
                entries.remove(least)
                entries.append(entry)
        self.rejected.append((turned_away, f"{self._most} requests waited already"))

    def withdraw(self, entry: Entry) -> bool:
        """Drop a request if it waits; return whether it did."""
        if entry not in self.entries:
            return False
        self.entries.remove(entry)
        self.dropped.append(entry.request)
        return True

    def leave(self, taken: list[Entry]) -> None:
        """Drop requests that have joined a batch."""
        if self.entries[: len(taken)] == taken:  # most come from its head
            del self.entries[: len(taken)]
            return
        left = set(taken)
        self.entries = [each for each in self.entries if each not in left]

    def take_left(self) -> tuple[list[tuple[Entry, str]], list[Request]]:
        """Return the requests that were rejected and dropped since the latest call."""
        found = self.rejected, self.dropped
        self.rejected, self.dropped = [], []
        return found

    def check(self) -> None:
        """Prove in O(n) that requests stand here once, and as requests that wait."""
        require(
            len({entry.request for entry in self.entries}) == len(self.entries),
            "a request stands twice in the queue",
        )
        for entry in self.entries:
            request = entry.request
            require(
                request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                and entry.slot < 0,
                f"request {request.request_id} waits as {request.status.value}, with "
                f"request slot {entry.slot}",
            )
