"""A cache of single objects, as policies are tested elsewhere: one access at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cache.v1.policies import CachePolicy


class SerialCache:
    """Serves a reference string: each object is held for its own access only."""

    def __init__(self, policy: CachePolicy, num_blocks: int) -> None:
        self.policy = policy
        self.free = list(range(num_blocks, 0, -1))
        self.block_of: dict[int, int] = {}
        self.content_of: dict[int, int] = {}

    def access(self, content: int) -> bool:
        """Serve an access; return whether it was a hit."""
        block_id = self.block_of.get(content)
        if block_id is not None:
            self.policy.hit(block_id)
            self.policy.released(block_id)
            return True
        if self.free:
            block_id = self.free.pop()
        else:
            block_id = self.policy.evict(content)
            del self.block_of[self.content_of[block_id]]
        self.block_of[content] = block_id
        self.content_of[block_id] = content
        self.policy.cached(block_id, content, 0)
        self.policy.released(block_id)
        return False


def hits(policy: CachePolicy, num_blocks: int, contents: list[int]) -> list[bool]:
    cache = SerialCache(policy, num_blocks)
    return [cache.access(content) for content in contents]


def zipf(seed: int, num: int, num_objects: int, alpha: float) -> list[int]:
    """Independent references with popularity ~ rank^-alpha."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_objects + 1) ** -alpha
    names = rng.permutation(num_objects) + 1
    return names[rng.choice(num_objects, num, p=weights / weights.sum())].tolist()


def with_scans(seed: int, num: int, num_objects: int, alpha: float) -> list[int]:
    """The same, with runs of objects that are never seen again."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    next_name = 10 * num_objects
    for start in range(0, num, 500):
        out += zipf(seed + start, 400, num_objects, alpha)
        length = int(rng.integers(50, 150))
        out += range(next_name, next_name + length)
        next_name += length
    return out[:num]


def loops(seed: int, num: int, num_objects: int) -> list[int]:
    """Loops over ranges of some lengths, with popular objects between."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    while len(out) < num:
        first, length = int(rng.integers(num_objects)), int(rng.integers(5, 60))
        out += [first + i for i in range(length)] * int(rng.integers(1, 4))
        out += rng.integers(0, 20, 30).tolist()
    return [1 + content for content in out[:num]]
