"""Queues that blocks in use stay in: the parts that policies are made of."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from cache.errors import CacheError, require

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUM_STALE_ENTRIES_ALLOWED = 64


class PlaceQueue:
    """First in, first out; a block in use keeps its place and is passed over.

    `len` counts all blocks that have a place.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._next_place = 0
        # Evictable blocks: those never in use since they came stand in line, by place;
        # those that are back from use in a heap.
        self._line: OrderedDict[int, int] = OrderedDict()
        self._back: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._places

    @property
    def num_evictable(self) -> int:
        """Blocks that are not in use."""
        return len(self._line) + len(self._back)

    def append(self, block_id: int) -> None:
        """Give an evictable block the last place. O(1).

        Raises
        ------
        CacheError
            If it has a place already.
        """
        if block_id in self._places:
            raise CacheError(f"block {block_id} stands in the queue already")
        self._places[block_id] = self._line[block_id] = self._next_place
        self._next_place += 1

    def pin(self, block_id: int) -> None:
        """Note that a block is in use, if it stands here. O(1)."""
        if self._line.pop(block_id, None) is None:
            self._back.pop(block_id, None)

    def unpin(self, block_id: int) -> None:
        """Note that a block with a place is evictable again. O(log n)."""
        back, heap = self._back, self._heap
        back[block_id] = place = self._places[block_id]
        if len(heap) > 2 * len(back) + _NUM_STALE_ENTRIES_ALLOWED:
            heap[:] = [(place, other) for other, place in back.items()]
            heapify(heap)
        else:
            heappush(heap, (place, block_id))

    def popleft(self) -> int:
        """Remove and return the first evictable block. O(log n).

        Raises
        ------
        CacheError
            If there is none.
        """
        heap, back, line = self._heap, self._back, self._line
        while heap and back.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        if not heap and not line:
            raise CacheError("no block of the queue can be evicted")
        if not heap or (line and next(iter(line.values())) < heap[0][0]):
            block_id, _ = line.popitem(last=False)
        else:
            _, block_id = heappop(heap)
            del back[block_id]
        del self._places[block_id]
        return block_id

    def check(self) -> None:
        """Prove that evictable blocks can be reached, each at its own place."""
        live = {i: place for place, i in self._heap if self._back.get(i) == place}
        require(live == self._back, "queue: a block back from use cannot be reached")
        line = list(self._line.values())
        require(line == sorted(line), "queue: the line is out of order")
        require(
            self._line.keys().isdisjoint(self._back)
            and all(
                self._places.get(i) == p for i, p in (self._line | self._back).items()
            ),
            "queue: a block stands twice, or at another's place",
        )


class RecencyList:
    """Least recently released first; a block in use belongs to it, without a place.

    `len` counts all blocks that belong to it.
    """

    def __init__(self) -> None:
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._in_use: set[int] = set()

    def __len__(self) -> int:
        return len(self._evictable) + len(self._in_use)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._evictable or block_id in self._in_use

    @property
    def num_evictable(self) -> int:
        """Blocks that are not in use."""
        return len(self._evictable)

    @property
    def first(self) -> int:
        """The least recently released evictable block."""
        return next(iter(self._evictable))

    def append(self, block_id: int) -> None:
        """Make a block the most recently released one, new or back from use. O(1)."""
        self._in_use.discard(block_id)
        self._evictable[block_id] = None
        self._evictable.move_to_end(block_id)

    def pin(self, block_id: int) -> None:
        """Take a block into use, whether or not it belonged here. O(1)."""
        self._evictable.pop(block_id, None)
        self._in_use.add(block_id)

    def remove(self, block_id: int) -> None:
        """Let a block go. O(1)."""
        self._evictable.pop(block_id, None)
        self._in_use.discard(block_id)

    def popleft(self) -> int:
        """Remove and return the least recently released evictable block. O(1)."""
        return self._evictable.popitem(last=False)[0]

    def check(self) -> None:
        """Prove that no block is both in use and evictable."""
        require(
            self._in_use.isdisjoint(self._evictable),
            "list: a block in use is evictable",
        )


class GhostQueue:
    """Contents that were evicted lately, the oldest forgotten first."""

    def __init__(self) -> None:
        self._contents: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, content: int) -> bool:
        return content in self._contents

    def __iter__(self) -> Iterator[int]:
        return iter(self._contents)

    def append(self, content: int) -> None:
        """Remember a content as the latest."""
        self._contents[content] = None
        self._contents.move_to_end(content)

    def remove(self, content: int) -> bool:
        """Forget a content; return whether it was remembered."""
        if content not in self._contents:
            return False
        del self._contents[content]
        return True

    def popleft(self) -> int:
        """Forget the oldest content."""
        return self._contents.popitem(last=False)[0]
