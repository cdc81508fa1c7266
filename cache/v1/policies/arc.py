"""ARC: recency and frequency, the split between them learnt from what was missed."""

from __future__ import annotations

from cache.errors import require
from cache.v1.policies.base import CachePolicy
from cache.v1.policies.places import GhostQueue, RecencyList


class ARC(CachePolicy):
    """Content seen once and content seen again in two lists, each with its ghosts.

    T1 holds blocks that were computed and not found since, T2 those that were found,
    or came back while they were ghosts; B1 and B2 remember what was evicted from each.
    Content that comes back from B1 asks for a longer T1, from B2 for a shorter one.

    A block in use belongs to its list and counts in its length, but has no place in it:
    it comes in as the most recent one when it is released. If all blocks of the list
    that should give are in use, the other one gives.

    Parameters
    ----------
    num_blocks
        Size of the pool: c of the paper.

    Notes
    -----
    Source: Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST
    2003, figure 4, with a target that need not be whole. There the lists are as long as
    the cache whenever something is evicted. Here blocks without content take room,
    too, so the bounds (|T1| + |B1| <= c, all four <= 2c) are kept by trimming ghosts.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._target = 0.0
        """Length that T1 should have: p of the paper."""
        self._t1, self._t2 = RecencyList(), RecencyList()
        self._b1, self._b2 = GhostQueue(), GhostQueue()
        self._content: dict[int, int] = {}
        self._returning: set[int] = set()

    def cached(self, block_id: int, content: int, depth: int) -> None:
        """See `CachePolicy.cached`."""
        self._content[block_id] = content
        if content in self._returning:
            self._returning.remove(content)
            self._t2.pin(block_id)
        elif self._meet_ghost(content) is not None:
            self._t2.pin(block_id)
        else:
            self._t1.pin(block_id)
        self._trim()

    def hit(self, block_id: int) -> None:
        """See `CachePolicy.hit`."""
        self._t1.remove(block_id)
        self._t2.pin(block_id)

    def released(self, block_id: int) -> None:
        """See `CachePolicy.released`."""
        (self._t1 if block_id in self._t1 else self._t2).append(block_id)

    def evict(self, incoming: int | None) -> int:
        """See `CachePolicy.evict`."""
        met = None if incoming is None else self._meet_ghost(incoming)
        if incoming is not None and met is not None:
            self._returning.add(incoming)
            block_id = self._replace(t1_on_tie=met is self._b2)
        else:
            block_id = self._make_room()
        self._trim()
        return block_id

    @property
    def num_evictable(self) -> int:
        """See `CachePolicy.num_evictable`."""
        return self._t1.num_evictable + self._t2.num_evictable

    def check(self) -> None:
        """Prove the lists and the paper's bounds on them."""
        self._t1.check()
        self._t2.check()
        in_t1 = [block_id in self._t1 for block_id in self._content]
        in_t2 = [block_id in self._t2 for block_id in self._content]
        require(
            all(a != b for a, b in zip(in_t1, in_t2, strict=True))
            and len(self._content) == len(self._t1) + len(self._t2),
            "arc: T1 and T2 do not share the blocks between them",
        )
        require(
            self._returning.isdisjoint(self._content.values()),
            "arc: content that has returned is still awaited",
        )
        most = self._num_blocks
        require(
            len(self._t1) + len(self._b1) <= most
            and self._num_known <= 2 * most
            and 0 <= self._target <= most,
            f"arc: |T1| {len(self._t1)}, |T2| {len(self._t2)}, |B1| {len(self._b1)}, "
            f"|B2| {len(self._b2)}, p {self._target} break a bound of c {most}",
        )

    @property
    def _num_known(self) -> int:
        return len(self._t1) + len(self._t2) + len(self._b1) + len(self._b2)

    def _meet_ghost(self, content: int) -> GhostQueue | None:
        """Learn from content that comes back; return where it was, no more a ghost."""
        b1, b2 = self._b1, self._b2
        if content in b1:
            step = max(len(b2) / len(b1), 1.0)
            self._target = min(self._target + step, float(self._num_blocks))
            b1.remove(content)
            return b1
        if content in b2:
            step = max(len(b1) / len(b2), 1.0)
            self._target = max(self._target - step, 0.0)
            b2.remove(content)
            return b2
        return None

    def _make_room(self) -> int:
        """Give up a block for content that is new: case IV of the paper."""
        t1, b1, most = self._t1, self._b1, self._num_blocks
        if len(t1) + len(b1) >= most:
            if not b1 and t1.num_evictable:
                return self._let_go(t1.popleft())
            while b1 and len(t1) + len(b1) >= most:
                b1.popleft()
        elif self._num_known >= 2 * most and self._b2:
            self._b2.popleft()
        return self._replace(t1_on_tie=False)

    def _replace(self, *, t1_on_tie: bool) -> int:
        """Evict from T1 if it is longer than its target, else from T2."""
        t1, t2, target = self._t1, self._t2, self._target
        wants_t1 = len(t1) > target or (t1_on_tie and len(t1) == target)
        if t1.num_evictable and (wants_t1 or not t2.num_evictable):
            block_id = t1.popleft()
            self._b1.append(self._content[block_id])
        else:
            block_id = t2.popleft()
            self._b2.append(self._content[block_id])
        return self._let_go(block_id)

    def _let_go(self, block_id: int) -> int:
        del self._content[block_id]
        return block_id

    def _trim(self) -> None:
        """Forget ghosts beyond the bounds."""
        most = self._num_blocks
        while self._b1 and len(self._t1) + len(self._b1) > most:
            self._b1.popleft()
        while self._num_known > 2 * most:
            (self._b2 or self._b1).popleft()
