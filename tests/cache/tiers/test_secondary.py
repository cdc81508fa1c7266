"""Tiers behind the host: devices, what they keep, and the way through the host."""

from __future__ import annotations

from math import isinf, isnan
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import CacheConfigError, TierError
from cache.tiers import (
    CPUTier,
    FileSystemTier,
    LookupResult,
    PoolTier,
    RequestAccess,
    TierDevice,
    TierHierarchy,
    TierJob,
)
from cache.tiers.places import Keys

if TYPE_CHECKING:
    from cache.tiers.extents import Hold

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
RATES: dict[str, float] = {"read_bytes_per_s": 10.0, "write_bytes_per_s": 5.0}


def load(*keys: int) -> TierJob:
    return TierJob(keys, is_load=True)


def store(*keys: int) -> TierJob:
    return TierJob(keys, is_load=False)


def test_jobs_share_their_direction_of_a_device() -> None:
    device = TierDevice(10, latency_s=0.5, num_readers=2, num_writers=1, **RATES)
    jobs = [load(1), load(2), store(3), load(4)]
    for job in jobs:
        device.submit(job, 1.0)
    device.check()
    # The loads have latency until 1.5, then half of 10 bytes/s each until 3.5; the
    # store has all of 5 bytes/s; the third load begins when a reader is idle.
    assert device.next_change_s() == 1.5
    device.follow(3.0)
    assert isnan(jobs[0].end_s)
    device.follow(10.0)
    assert [job.begin_s for job in jobs] == [1.0, 1.0, 1.0, 3.5]
    assert [job.end_s for job in jobs] == [3.5, 3.5, 3.5, 5.0]
    assert isinf(device.next_change_s())
    assert device.busy_s == 4.0
    assert device.num_bytes == {True: 30, False: 10}


def test_a_thread_without_work_of_its_own_takes_the_others() -> None:
    device = TierDevice(10, num_readers=1, num_writers=1, **RATES)
    jobs = [store(1), store(2), load(3)]
    for job in jobs:
        device.submit(job, 0.0)
    device.follow(100.0)
    assert [job.begin_s for job in jobs] == [0.0, 0.0, 4.0]


def filled(tier: Any, keys: list[int], now_s: float) -> Any:
    assert tier.prepare_store(keys, now_s) == keys
    tier.complete(store(*keys), now_s)
    return tier


def test_a_pool_gives_up_the_tail_of_what_was_used_first() -> None:
    pool = filled(PoolTier(1, capacity_bytes=4, **RATES), [1, 2], 0.0)
    filled(pool, [3, 4], 1.0)
    pool.prepare_load(2, 2.0)
    assert pool.prepare_store([5, 6, 7, 8], 2.0) == [5, 6, 7]  # 2 is being read
    assert [pool.lookup(key, RequestAccess(), 2.0) for key in (1, 2)] == [MISS, HIT]
    assert (pool.num_evictions, pool.num_refused) == (3, 1)
    pool.check()


def test_chunks_live_until_they_were_not_used_for_so_long() -> None:
    pool = filled(PoolTier(1, capacity_bytes=4, ttl_s=5.0, **RATES), [1, 2], 0.0)
    access = RequestAccess()
    pool.prepare_load(1, 4.0)
    pool.complete(load(1), 4.0)
    assert [pool.lookup(key, access, 6.0) for key in (1, 2)] == [HIT, MISS]
    assert pool.lookup(1, access, 9.5) is MISS
    assert pool.num_expired == 2


def test_files_are_asked_for_beside_the_step_and_stay() -> None:
    disk = filled(FileSystemTier(1, capacity_bytes=2, **RATES), [1], 0.0)
    first, second = RequestAccess(), RequestAccess()
    assert [disk.lookup(key, first, 0.0) for key in (1, 2)] == [RETRY, RETRY]
    disk.end_call(0.0)
    assert disk.has_news
    assert [disk.lookup(key, first, 0.0) for key in (1, 2)] == [HIT, MISS]
    filled(disk, [2], 1.0)
    assert disk.lookup(2, second, 1.0) is MISS  # as the first was told, who still asks
    assert disk.prepare_store([3], 1.0) == []
    assert disk.num_refused == 1
    disk.check()
    disk.finish(first)
    disk.finish(second)
    assert disk.lookup(2, second, 1.0) is RETRY


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"capacity_bytes": 7}, "must hold a chunk, which takes 8, got 7"),
        ({"read_bytes_per_s": -1.0}, "read_bytes_per_s of a tier must be 1 or more"),
        ({"write_bytes_per_s": 1e-300}, "bytes_per_s of a tier must be 1 or more"),
        ({"latency_s": -1.0}, "latency_s of a tier must be from 0 to 1e\\+06"),
        ({"latency_s": 1e300}, "latency_s of a tier must be from 0 to 1e\\+06"),
        ({"queue_depth": 0}, "needs one reader at least, got 0"),
        ({"ttl_s": 0.0}, "ttl_s of a tier must be above 0"),
    ],
)
def test_impossible_tiers_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message):
        PoolTier(8, **{"capacity_bytes": 80, **RATES} | keys)


class Undecided(PoolTier):
    """Says RETRY until it is let answer."""

    has_news = True
    answer = RETRY

    def lookup(self, key: int, access: RequestAccess, now_s: float) -> LookupResult:
        return self.answer


def test_a_tier_answers_within_a_minute() -> None:
    tier = Undecided(10, capacity_bytes=80, **RATES)
    tiers, keys = TierHierarchy(CPUTier(2), {"pool": tier}), Keys.of([1])
    access = RequestAccess()

    def ask(now_s: float, answer: LookupResult) -> None:
        tier.answer = answer
        tiers.follow(now_s)
        tiers.longest_prefix(keys, access)
        tiers.end_call()

    for now_s, answer in ((0.0, RETRY), (60.0, RETRY), (61.0, MISS), (120.0, RETRY)):
        ask(now_s, answer)
    ask(180.0, RETRY)
    with pytest.raises(TierError, match="RETRY of a chunk and nothing else for 60 s"):
        ask(180.1, RETRY)


def test_questions_given_up_are_not_held_against_a_tier() -> None:
    disk = FileSystemTier(10, capacity_bytes=80, **RATES)
    tiers = TierHierarchy(CPUTier(2), {"disk": disk})
    for number in range(3):
        tiers.follow(100.0 * number)
        access = RequestAccess(number)
        assert tiers.longest_prefix(Keys.of([number]), access) == (1, False)
        tiers.end_call()
        if number:  # the first stays, and does not ask again
            tiers.finish(access)
    assert len(tiers._unanswered_s) == 1


def test_a_chunk_comes_back_through_the_host() -> None:
    host = CPUTier(2)
    tiers = TierHierarchy(host, {"pool": PoolTier(10, capacity_bytes=80, **RATES)})
    first, second = RequestAccess(), RequestAccess()
    for place, keys in ((0, [1, 2]), (2, [3, 4])):
        prepared = host.prepare_store(Keys.of(keys, place), first, place)
        assert prepared is not None
        host.complete_store(prepared.hold)
        tiers.stored(prepared.hold, first)
        assert host.num_evictable_chunks == 0  # until they have been written
        tiers.follow(tiers.now_s + 10.0)
        tiers.check()
    assert tiers.longest_prefix(Keys.of([1, 2, 3]), second) == (
        2,
        False,
    )  # there is no room
    tiers.end_call()
    assert tiers.num_promoting_chunks == 2
    assert tiers.next_news_s(0.1) > tiers.now_s
    assert tiers.follow(tiers.next_news_s(0.1) + 10.0)
    assert tiers.longest_prefix(Keys.of([1, 2]), second) == (2, True)
    assert tiers.loaded([1, 2], second) == {"pool": 2}


class HierarchyMachine(RuleBasedStateMachine):
    """Requests store, look up, load and end, in random order and time."""

    def __init__(self) -> None:
        super().__init__()
        self.host = CPUTier(3)
        rates = RATES | {"latency_s": 0.1}
        self.tiers = TierHierarchy(
            self.host,
            {
                "pool": PoolTier(1, capacity_bytes=4, ttl_s=6.0, **rates),
                "fs": FileSystemTier(1, capacity_bytes=5, **rates),
            },
        )
        self.requests: list[tuple[RequestAccess, list[int]]] = []
        self.loads: list[Hold] = []

    @rule(prompt=st.sampled_from([[1, 2], [1, 3, 4], [5, 6, 7]]))
    def arrive(self, prompt: list[int]) -> None:
        self.requests.append((RequestAccess(), prompt))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        access, keys = data.draw(st.sampled_from(self.requests))
        prepared = self.host.prepare_store(Keys.of(keys), access)
        if prepared is not None:
            self.host.complete_store(prepared.hold)
            self.tiers.stored(prepared.hold, access)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        access, keys = data.draw(st.sampled_from(self.requests))
        num_found, is_ready = self.tiers.longest_prefix(Keys.of(keys), access)
        if is_ready and num_found:
            found = Keys.of(keys[:num_found])
            self.loads.append(self.host.prepare_load(found, access))
            self.tiers.loaded(keys[:num_found], access)
        self.tiers.end_call()

    @precondition(lambda self: self.loads)
    @rule()
    def end_load(self) -> None:
        self.host.complete_load(self.loads.pop())

    @precondition(lambda self: self.requests)
    @rule()
    def leave(self) -> None:
        access, _ = self.requests.pop()
        self.host.finish(access)
        self.tiers.finish(access)

    @rule(span_s=st.floats(0.0, 3.0))
    def wait(self, span_s: float) -> None:
        self.tiers.follow(self.tiers.now_s + span_s)

    @invariant()
    def is_whole(self) -> None:
        self.host.check()
        self.tiers.check()

    def teardown(self) -> None:
        self.tiers.follow(self.tiers.now_s + 1000.0)
        assert not self.tiers.num_promoting_chunks
        assert not self.tiers.cascading_chunks()


TestHierarchy = HierarchyMachine.TestCase
TestHierarchy.settings = settings(max_examples=40, stateful_step_count=30)


def test_clients_of_a_device_have_links_and_threads_of_their_own() -> None:
    device = TierDevice(12, client_bytes_per_s=2.0, **RATES)
    jobs = [
        TierJob([n], is_load=True, client=client)
        for n, client in enumerate((0, 0, 1, 2, 3))
    ]
    for job in jobs:
        device.submit(job, 0.0)
        device.check()
    # The two of the first share its link; others have all of theirs, and none a fifth.
    device.follow(100.0)
    assert [job.end_s for job in jobs] == pytest.approx([12.0, 12.0, 6.0, 6.0, 6.0])


def test_who_leaves_a_pool_leaves_nothing_half_written() -> None:
    pool = PoolTier(1, capacity_bytes=4, latency_s=1.0, **RATES)
    hierarchies = [TierHierarchy(CPUTier(4), {"pool": pool}) for _ in range(2)]
    places = []
    for each, keys in zip(hierarchies, ([1, 2], [2, 3]), strict=True):
        access = RequestAccess()
        prepared = each.host.prepare_store(Keys.of(keys), access)
        assert prepared is not None
        each.host.complete_store(prepared.hold)
        each.stored(prepared.hold, access)
        places.append(prepared.hold)
        each.check()
    assert pool.num_used_chunks == 3  # one is written once
    hierarchies[0].leave(0.5)
    hierarchies[0].check()
    assert hierarchies[0].host.num_reading_chunks == 0
    hierarchies[0].stored(places[0], RequestAccess())
    assert hierarchies[1].follow(10.0) is False
    assert pool.num_used_chunks == 1
    assert pool.lookup(3, RequestAccess(), 10.0) is HIT
    assert pool.lookup(2, RequestAccess(), 10.0) is MISS  # as the first one wrote it
    for each in (pool, *hierarchies):
        each.check()
