"""W-TinyLFU: new content must be more popular than what it would replace."""

from __future__ import annotations

from cache.errors import CacheError, require
from cache.v1.policies.base import CachePolicy
from cache.v1.policies.count_min import CountMinSketch
from cache.v1.policies.places import RecencyList


class TinyLFU(CachePolicy):
    """A small window for what is new, and a test on the way into the main cache.

    The least recent block of the window and that of the main cache are compared by how
    often their contents were seen lately (computed or found, also while they were not
    cached); the rarer one goes, the new one on a tie. In the main cache blocks that
    were found are protected: those that were not go before them.

    An engine must hold what it computes while a request needs it, so content is not
    refused when it comes but when some block is to be given up: one that fails the test
    is evicted before any that was admitted. Blocks in use are never compared. They may
    need more room than the window has; what the main cache loses to them, it takes back
    from the window without a test, as it does until the first eviction.

    Parameters
    ----------
    num_blocks
        Size of the pool.
    window
        Share of the window.
    protected
        Share of the main cache that is protected.
    sample
        Additions after which counts are halved, over `num_blocks`.

    Notes
    -----
    Source: Einziger, Friedman and Manes, TinyLFU: a highly efficient cache admission
    policy, ACM Trans. Storage 13(4), 2017, with its window (W-TinyLFU) and a segmented
    LRU as main cache. The doorkeeper, a filter that saves counters, is not built.
    """

    def __init__(
        self,
        num_blocks: int,
        window: float = 0.01,
        protected: float = 0.8,
        sample: float = 10.0,
    ) -> None:
        for name, value in (("window", window), ("protected", protected)):
            if not 0 <= value <= 1:
                raise CacheError(f"{name} must be a share, 0 to 1, got {value}")
        if not sample >= 1:
            raise CacheError(f"sample must be at least 1, got {sample}")
        self._window_share = window
        self._protected_share = protected
        self._sketch = CountMinSketch(num_blocks, int(sample * num_blocks))
        self._window = RecencyList()
        self._probation = RecencyList()
        self._protected = RecencyList()
        self._content: dict[int, int] = {}
        self._num_vacant: int | None = None
        """Blocks that may enter the main cache untested; None before any eviction."""

    def cached(self, block_id: int, content: int, depth: int) -> None:
        """See `CachePolicy.cached`."""
        self._content[block_id] = content
        self._sketch.add(content)
        self._window.pin(block_id)

    def hit(self, block_id: int) -> None:
        """See `CachePolicy.hit`."""
        self._sketch.add(self._content[block_id])
        if block_id in self._window:
            self._window.pin(block_id)
            return
        self._probation.remove(block_id)
        self._protected.pin(block_id)
        self._unprotect()

    def released(self, block_id: int) -> None:
        """See `CachePolicy.released`."""
        for part in (self._window, self._protected, self._probation):
            if block_id in part:
                part.append(block_id)
                return

    def evict(self, incoming: int | None) -> int:
        """See `CachePolicy.evict`."""
        del incoming
        most = max(int(len(self._content) * self._window_share), 1)
        if self._num_vacant is None:
            self._num_vacant = len(self._content) - most
        window, probation = self._window, self._probation
        while self._num_vacant > 0 and window.num_evictable > most:
            probation.append(window.popleft())
            self._num_vacant -= 1
        block_id = self._rarer() if window.num_evictable else self._displaced()
        for part in (window, probation, self._protected):
            part.remove(block_id)
        del self._content[block_id]
        return block_id

    @property
    def num_evictable(self) -> int:
        """See `CachePolicy.num_evictable`."""
        parts = (self._window, self._probation, self._protected)
        return sum(part.num_evictable for part in parts)

    def check(self) -> None:
        """Prove that each block belongs to one part."""
        parts = (self._window, self._probation, self._protected)
        for part in parts:
            part.check()
        require(
            all(sum(i in part for part in parts) == 1 for i in self._content)
            and sum(map(len, parts)) == len(self._content),
            "tiny_lfu: window, probation and protected do not share the blocks",
        )

    def _rarer(self) -> int:
        """Return the loser of the test; a new block that wins enters the main cache."""
        window = self._window
        candidate, victim = window.first, self._main_victim()
        if victim is None:
            return candidate
        count, content = self._sketch.count, self._content
        if count(content[candidate]) <= count(content[victim]):
            return candidate
        window.remove(candidate)
        self._probation.append(candidate)
        return victim

    def _displaced(self) -> int:
        """Return the block that the main cache loses to blocks in use."""
        victim = self._main_victim()
        if victim is None:
            raise CacheError("the policy holds no block that could be evicted")
        self._num_vacant = (self._num_vacant or 0) + 1
        return victim

    def _main_victim(self) -> int | None:
        """Return the main cache's next victim, or None if all there is in use."""
        for part in (self._probation, self._protected):
            if part.num_evictable:
                return part.first
        return None

    def _unprotect(self) -> None:
        """Put the least recent protected blocks on probation if there are too many."""
        protected, probation = self._protected, self._probation
        most = int((len(protected) + len(probation)) * self._protected_share)
        while len(protected) > most and protected.num_evictable:
            probation.append(protected.popleft())
