"""Rules that all policies share, and promises of their parts."""

from __future__ import annotations

import numpy as np
import pytest

from cache.errors import CacheError, InvariantError, PolicyError
from cache.v1.policies import ARC, FIFO, LFU, LRU, S3FIFO, CachePolicy, TinyLFU
from cache.v1.policies.count_min import MOST_COUNTED, CountMinSketch
from cache.v1.policies.places import PlaceQueue
from cache.v1.policy_pool import PolicyBlockPool

ALL = [LRU(), FIFO(), LFU(), S3FIFO(10), ARC(10), TinyLFU(10)]


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
def test_blocks_in_use_are_passed_over(policy: CachePolicy) -> None:
    for block_id in range(1, 9):
        policy.cached(block_id, 100 + block_id, 0)
    for block_id in range(1, 9):
        policy.released(block_id)
    for block_id in (1, 2, 5):
        policy.hit(block_id)
    assert policy.num_evictable == 5
    evicted = [policy.evict(None) for _ in range(5)]
    assert sorted(evicted) == [3, 4, 6, 7, 8]
    policy.check()
    policy.released(2)
    assert policy.num_evictable == 1
    assert policy.evict(None) == 2
    policy.check()


def test_fifo_keeps_the_place_of_a_block_in_use() -> None:
    fifo = FIFO()
    for block_id in (1, 2, 3):
        fifo.cached(block_id, 100 + block_id, 0)
        fifo.released(block_id)
    fifo.hit(1)
    assert fifo.evict(None) == 2
    fifo.released(1)
    assert fifo.evict(None) == 1  # ahead of 3, as it came before


def test_arc_learns_from_a_ghost_before_it_chooses() -> None:
    arc = ARC(2)
    for block_id, content in ((1, 11), (2, 12)):
        arc.cached(block_id, content, 0)
        arc.released(block_id)
    arc.hit(2)
    arc.released(2)  # T1: 11, T2: 12
    assert arc.evict(13) == 1  # 11 becomes a ghost of T1
    arc.cached(1, 13, 0)
    arc.released(1)
    # 11 comes back: T1 should be longer, so T2 gives, and 11 enters T2.
    assert arc.evict(11) == 2
    arc.cached(2, 11, 0)
    arc.released(2)
    arc.check()


def test_s3_fifo_lets_a_ghost_into_the_main_queue() -> None:
    policy = S3FIFO(10, small=0.2)
    for block_id in range(1, 11):
        policy.cached(block_id, 100 + block_id, 0)
        policy.released(block_id)
    assert policy.evict(200) == 1
    policy.cached(1, 200, 0)
    policy.released(1)
    assert policy.evict(101) == 2  # 101 was evicted just now
    policy.cached(2, 101, 0)
    policy.released(2)
    policy.check()
    # It came last, and is the last to go: the small queue's new 200 goes before.
    assert 1 in [policy.evict(None) for _ in range(9)]
    assert policy.evict(None) == 2


def test_counts_are_never_too_low_and_grow_old() -> None:
    rng = np.random.default_rng(0)
    sketch = CountMinSketch(64, 10**9)
    keys = [hash((int(i), 7)) for i in rng.integers(0, 200, 3000)]
    true: dict[int, int] = {}
    for key in keys:
        sketch.add(key)
        true[key] = true.get(key, 0) + 1
        assert sketch.count(key) >= min(true[key], MOST_COUNTED)
    young = CountMinSketch(1024, 10)
    for _ in range(9):
        young.add(5)
    assert young.count(5) == 9
    young.add(6)
    assert (young.count(5), young.count(6), young.count(-7)) == (4, 0, 0)


def test_queues_refuse_misuse_and_find_their_faults() -> None:
    queue = PlaceQueue()
    with pytest.raises(CacheError, match="no block of the queue can be evicted"):
        queue.popleft()
    queue.append(4)
    with pytest.raises(CacheError, match="block 4 stands in the queue already"):
        queue.append(4)
    queue.check()
    queue.pin(4)
    queue.unpin(4)
    queue._heap.clear()
    with pytest.raises(InvariantError, match="back from use cannot be reached"):
        queue.check()


@pytest.mark.parametrize("chosen", [0, 2, 77, None])
def test_a_pool_refuses_what_is_not_evictable(chosen: int | None) -> None:
    class Wrong(LFU):
        def evict(self, incoming: int | None) -> int:
            return chosen  # type: ignore[return-value]

    pool = PolicyBlockPool(4, Wrong(), unhashed_first=True)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [11, 12, 13])
    pool.free_blocks([block for block in blocks if block.block_id != 2])
    with pytest.raises(PolicyError, match=f"Wrong evicts block {chosen}, which is no"):
        pool.get_new_blocks(1)


def test_a_sketch_uses_all_of_its_counters() -> None:
    sketch = CountMinSketch(32, 10**9)
    for content in range(2_000):
        sketch.add(content * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    assert all(all(row) for row in sketch._rows)
