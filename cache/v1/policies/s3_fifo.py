"""S3-FIFO: three queues, of which a small one filters."""

from __future__ import annotations

from cache.errors import CacheError, require
from cache.v1.policies.base import CachePolicy
from cache.v1.policies.places import GhostQueue, PlaceQueue

MOST_COUNTED_HITS = 3
"""A counter has two bits."""


class S3FIFO(CachePolicy):
    """New content passes a small queue; what is found there moves to the main one.

    - Content that is new enters the small queue, content that was evicted from it
      lately (it is a *ghost*) the main one. Blocks enter at their first release.
    - While the small queue has its share or more of all blocks queued, its first block
      goes: to the main queue if it was found `move_to_main` times, else out of the
      cache, and becomes a ghost.
    - Else the first block of the main queue goes: to its end if it was found, with one
      hit less to its name, else out of the cache.

    A block in use keeps its place and is passed over. Where one queue has only such
    blocks the other one gives.

    Parameters
    ----------
    num_blocks
        Size of the pool.
    small
        Share of the small queue.
    ghosts
        Contents remembered, over `num_blocks`.
    move_to_main
        Hits that move a block out of the small queue.

    Notes
    -----
    Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023; as
    in its authors' later code (libCacheSim, ``S3FIFO.c``), until the first eviction
    what the small queue does not hold enters the main one. The paper moves blocks that
    were found more than once, so `move_to_main` is 2.
    """

    def __init__(
        self,
        num_blocks: int,
        small: float = 0.1,
        ghosts: float = 0.9,
        move_to_main: int = 2,
    ) -> None:
        _share("small", small)
        _share("ghosts", ghosts)
        if not 1 <= move_to_main <= MOST_COUNTED_HITS:
            raise CacheError(
                f"move_to_main must be 1 to {MOST_COUNTED_HITS}, got {move_to_main}"
            )
        self._small_share = small
        self._num_small_at_first = int(num_blocks * small)
        self._most_ghosts = int(num_blocks * ghosts)
        self._move_to_main = move_to_main
        self._small = PlaceQueue()
        self._main = PlaceQueue()
        self._ghosts = GhostQueue()
        self._content: dict[int, int] = {}
        self._num_hits: dict[int, int] = {}
        self._returning: set[int] = set()
        self._enters_main: set[int] = set()
        self._has_evicted = False

    def cached(self, block_id: int, content: int, depth: int) -> None:
        """See `CachePolicy.cached`."""
        self._content[block_id] = content
        self._num_hits[block_id] = 0
        if content in self._returning:
            self._returning.remove(content)
            self._enters_main.add(block_id)
        elif self._ghosts.remove(content):
            self._enters_main.add(block_id)

    def hit(self, block_id: int) -> None:
        """See `CachePolicy.hit`."""
        self._num_hits[block_id] = min(self._num_hits[block_id] + 1, MOST_COUNTED_HITS)
        self._small.pin(block_id)
        self._main.pin(block_id)

    def released(self, block_id: int) -> None:
        """See `CachePolicy.released`."""
        for queue in (self._small, self._main):
            if block_id in queue:
                queue.unpin(block_id)
                return
        is_full = not self._has_evicted and len(self._small) >= self._num_small_at_first
        if block_id in self._enters_main or is_full:
            self._enters_main.discard(block_id)
            self._main.append(block_id)
        else:
            self._small.append(block_id)

    def evict(self, incoming: int | None) -> int:
        """See `CachePolicy.evict`."""
        self._has_evicted = True
        if incoming is not None and self._ghosts.remove(incoming):
            self._returning.add(incoming)
        while True:
            block_id = (
                self._evict_small() if self._is_small_next() else self._evict_main()
            )
            if block_id is not None:
                del self._num_hits[block_id]
                return block_id

    @property
    def num_evictable(self) -> int:
        """See `CachePolicy.num_evictable`."""
        return self._small.num_evictable + self._main.num_evictable

    def check(self) -> None:
        """Prove the queues, and that each block stands in one at most."""
        self._small.check()
        self._main.check()
        require(
            len(self._ghosts) <= self._most_ghosts,
            f"s3_fifo: {len(self._ghosts)} ghosts, at most {self._most_ghosts}",
        )
        require(
            self._content.keys() == self._num_hits.keys(),
            "s3_fifo: content and hits of different blocks",
        )
        require(
            all((i in self._small) + (i in self._main) <= 1 for i in self._content),
            "s3_fifo: a block stands in both queues",
        )

    def _is_small_next(self) -> bool:
        if not self._main.num_evictable:
            return True
        num_queued = len(self._small) + len(self._main)
        most = int(num_queued * self._small_share)
        return self._small.num_evictable > 0 and len(self._small) >= most

    def _evict_small(self) -> int | None:
        """Walk the small queue; return what it gives up, None if it all moved on."""
        while self._small.num_evictable:
            block_id = self._small.popleft()
            if self._num_hits[block_id] < self._move_to_main:
                self._remember(self._content.pop(block_id))
                return block_id
            self._num_hits[block_id] = 0
            self._main.append(block_id)
        return None

    def _evict_main(self) -> int:
        """Walk the main queue until a block goes that was not found."""
        while True:
            block_id = self._main.popleft()
            if not self._num_hits[block_id]:
                del self._content[block_id]
                return block_id
            self._num_hits[block_id] -= 1
            self._main.append(block_id)

    def _remember(self, content: int) -> None:
        ghosts = self._ghosts
        if not self._most_ghosts or content in ghosts:
            return
        if len(ghosts) == self._most_ghosts:
            ghosts.popleft()
        ghosts.append(content)


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise CacheError(f"{name} must be a share, 0 to 1, got {value}")
