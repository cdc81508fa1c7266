"""The clairvoyant bound: a policy that has read the future."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from cache.v1.policies.keyed import HeldBlock, KeyedPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence


class FutureReads(Protocol):
    """Which requests look for which content, known beforehand."""

    def readers(self, content: int) -> Sequence[int]:
        """Return the requests that look for a content, ascending."""
        ...

    def contents(self, request_id: int) -> Sequence[int]:
        """Return the contents that a request looks for, as far as others do, too."""
        ...


class Clairvoyant(KeyedPolicy):
    """Evicts what is read last, or never again. No engine can do this.

    Of blocks whose next reader is the same the deepest goes first, so that what is kept
    of a prompt is its beginning, and a copy of what another block holds goes before all
    others. With requests served one after the other in the order foretold no policy
    finds more. In an engine they overlap, blocks are held and requests preempted, so
    there it is an estimate of the bound.

    Parameters
    ----------
    future
        The blocks that each request will read, in the order of the workload.

    Notes
    -----
    Source: Belady, A study of replacement algorithms for a virtual-storage computer,
    IBM Systems Journal 5(2), 1966 (MIN). Why it is a bound for prefixes, too:
    `workloads.analysis.belady`.
    """

    def __init__(self, future: FutureReads) -> None:
        super().__init__()
        self._future = future
        self._begun: set[int] = set()
        self._num_past: dict[int, int] = {}
        self._copies: dict[int, list[HeldBlock]] = {}
        self._was_next: Sequence[int] = ()
        """Contents whose next reader has just begun."""

    def begins(self, request_id: int) -> None:
        """See `CachePolicy.begins`: what it reads is read next by others."""
        if request_id in self._begun:
            return
        self._requeue_passed()
        self._begun.add(request_id)
        self._was_next = self._future.contents(request_id)

    def evict(self, incoming: int | None) -> int:
        """See `CachePolicy.evict`."""
        self._requeue_passed()
        return super().evict(incoming)

    def cached(self, block_id: int, content: int, depth: int) -> None:
        """See `CachePolicy.cached`."""
        super().cached(block_id, content, depth)
        self._copies.setdefault(content, []).append(self._held[block_id])

    def key(self, block: HeldBlock) -> tuple[float, int]:
        """See `KeyedPolicy.key`."""
        if self._copies[block.content][0] is not block:
            return -math.inf, -block.depth
        return -self._next_reader(block.content), -block.depth

    def _forget(self, block: HeldBlock) -> int:
        block_id = super()._forget(block)
        copies = self._copies[block.content]
        copies.remove(block)
        if not copies:
            del self._copies[block.content]
        elif copies[0].is_evictable:
            self._requeue(copies[0])
        return block_id

    def _requeue_passed(self) -> None:
        """Give a later place to what the latest request did not find, though cached."""
        for content in self._was_next:
            for block in self._copies.get(content, ()):
                if block.is_evictable:
                    self._requeue(block)
        self._was_next = ()

    def _requeue(self, block: HeldBlock) -> None:
        """Give an evictable block the place of its present key."""
        block.released_at = self._num_released
        self._num_released += 1
        self._push(block)

    def _next_reader(self, content: int) -> float:
        """Return the first reader that has not begun, or infinity."""
        readers = self._future.readers(content)
        num_past = self._num_past.get(content, 0)
        while num_past < len(readers) and readers[num_past] in self._begun:
            num_past += 1
        if num_past:
            self._num_past[content] = num_past
        return readers[num_past] if num_past < len(readers) else math.inf
