"""The order of the queue."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

from cache.sglang.allocator import SlotAllocator
from cache.sglang.radix_cache import RadixCache
from sim.scheduler.sglang.settings import (
    IN_BATCH_PREFIX_TOKENS,
    LONGEST_MATCHED_QUEUE,
    PREFIX_REFRESH_INTERVAL,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cache.sglang.allocator import Slots
    from cache.sglang.nodes import TreeNode
    from sim.scheduler.sglang.requests import Entry
    from sim.scheduler.sglang.settings import Settings


class SchedulePolicy:
    """Sorts the queue before a prefill batch is formed.

    Parameters
    ----------
    settings
        Of the scheduler.
    tree
        The prefixes that are cached; None without.
    tokens
        From a request to all its tokens.

    Notes
    -----
    Source: SGLang 0.5.9, ``managers/schedule_policy.py`` (`SchedulePolicy`).
    """

    def __init__(
        self,
        settings: Settings,
        tree: RadixCache | None,
        tokens: Callable[[Entry], Slots],
    ) -> None:
        self._policy = settings.policy
        self._by_priority = settings.enable_priority_scheduling
        self._threshold = settings.priority_scheduling_preemption_threshold
        self._sign = 1 if settings.schedule_low_priority_values_first else -1
        self._tree = tree
        self._tokens = tokens
        self._refreshes = settings.patch >= 22 and (
            settings.radix_eviction_policy == "lru" and tree is not None
        )
        self._num_refreshes = 0

    def urgency(self, entry: Entry) -> tuple[int, int]:
        """Return the sort key of the queue by priority: the smallest comes first."""
        return self._sign * entry.request.priority, entry.entered

    def less_urgent(self, running: Entry, waiting: Entry) -> int:
        """Return by how much a running request is less urgent than a waiting one."""
        return self._sign * (running.request.priority - waiting.request.priority)

    def victims(
        self,
        entry: Entry,
        running: Iterable[Entry],
        need: float,
        expected: Callable[[Entry], float],
    ) -> list[Entry]:
        """Return less urgent requests whose estimates free what one needs; or none.

        Parameters
        ----------
        entry
            Waits.
        running
            Those that may be pushed out.
        need
            Tokens that are missing.
        expected
            What a running request is expected to write yet.

        Notes
        -----
        Source: `PrefillAdder.preempt_to_schedule`.
        """
        out: list[Entry] = []
        for each in sorted(running, key=self.urgency, reverse=True):
            if self.less_urgent(each, entry) <= self._threshold:
                break
            out.append(each)
            need -= expected(each)
            if need <= 0:
                break
        return out if need <= 0 else []

    def sort(self, waiting: list[Entry]) -> None:
        """Sort the queue in place."""
        if self._policy == "lof":
            waiting.sort(key=self._longest_first)
        elif self._policy == "fcfs":
            if self._by_priority:
                waiting.sort(key=self.urgency)
        elif self._policy == "dfs-weight" or len(waiting) <= LONGEST_MATCHED_QUEUE:
            later = self._match(waiting)
            if self._policy == "lpm":
                waiting.sort(
                    key=lambda each: inf if each in later else -each.num_matched_tokens
                )
            else:
                self._sort_depth_first(waiting)
            return
        if self._refreshes and waiting:
            self._refresh(waiting)

    def _refresh(self, waiting: list[Entry]) -> None:
        """Touch what waiting requests would reuse, now and then, the first one last.

        Source: SGLang 0.5.22, `SchedulePolicy._touch_waiting_prefixes`.
        """
        assert self._tree is not None
        if self._num_refreshes % PREFIX_REFRESH_INTERVAL == 0:
            for entry in reversed(waiting[:LONGEST_MATCHED_QUEUE]):
                self._tree.match(self._tokens(entry))
        self._num_refreshes += 1

    def _longest_first(self, entry: Entry) -> tuple[int, ...]:
        if self._by_priority:
            return self._sign * entry.request.priority, -entry.max_new_tokens
        return (-entry.max_new_tokens,)

    def _match(self, waiting: list[Entry]) -> set[Entry]:
        """Look all up; return those whose prefix another one is about to store."""
        assert self._tree is not None
        found = RadixCache(SlotAllocator(1))  # prefixes of those that wait
        later: set[Entry] = set()
        for entry in waiting:
            tokens = self._tokens(entry)
            slots, node = self._tree.match(tokens)
            entry.num_matched_tokens, entry.table.node = len(slots), node
            if self._tree.unified:
                entry.num_matched_tokens = min(len(slots), max(len(tokens) - 1, 0))
            if len(slots) > IN_BATCH_PREFIX_TOKENS:
                continue
            others, _ = found.match(tokens)
            if len(others) >= IN_BATCH_PREFIX_TOKENS:
                later.add(entry)
            else:
                found.insert(tokens, tokens)
        found.clear()
        return later

    def _sort_depth_first(self, waiting: list[Entry]) -> None:
        """Put subtrees that most requests wait for first."""
        assert self._tree is not None
        at: dict[TreeNode | None, list[Entry]] = {}
        weights: Counter[TreeNode] = Counter()
        for entry in waiting:
            node = entry.table.node
            at.setdefault(node, []).append(entry)
            while node is not None:
                weights[node] += 1
                node = node.parent
        waiting[:] = _depth_first(self._tree.root, at, weights)


def _depth_first(
    root: TreeNode, at: dict[TreeNode | None, list[Entry]], weights: Counter[TreeNode]
) -> Iterator[Entry]:
    """Yield requests below a node, heaviest child first, then the node's own."""
    todo = [(root, False)]
    while todo:
        node, are_children_done = todo.pop()
        if are_children_done:
            yield from at.get(node, ())
            continue
        todo.append((node, True))
        children = [each for each in node.children.values() if weights[each]]
        children.sort(key=lambda each: -weights[each])
        todo += [(child, False) for child in reversed(children)]
