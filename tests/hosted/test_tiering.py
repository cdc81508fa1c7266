"""The installed vLLM's tiers behind the host beside ours, call by call."""

from __future__ import annotations

import time
from importlib import import_module
from random import Random
from typing import Any

import pytest

from cache.tiers import (
    CPUTier,
    FileSystemTier,
    PoolTier,
    RequestAccess,
    TierHierarchy,
)
from cache.tiers.places import Keys
from tests.hosted.test_conform import minor, pytestmark, why_missing

__all__ = ["pytestmark"]

NUM_SEQUENCES, NUM_CALLS = 40, 100
_ROOT = "vllm.v1.kv_offload"


class _Region:
    """Stands for the memory that tiers would copy from and to."""

    def __init__(self, num_chunks: int) -> None:
        self._memory = bytearray(num_chunks * 8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._memory).cast("B", (len(self._memory) // 8, 8))

    def cleanup(self) -> None:
        pass


def _played_tier(*, is_asynchronous: bool) -> Any:
    """Return a tier of theirs whose jobs end when they are told to."""
    base = import_module(f"{_ROOT}.tiering.base")
    results = import_module(f"{_ROOT}.base").LookupResult
    lookups = import_module(f"{_ROOT}.tiering.async_lookup")

    class Lookups(lookups.AsyncLookupManager):  # type: ignore[misc, name-defined]
        def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
            return [key in tier.there for key in keys]

    class Tier(base.SecondaryTierManager):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            region = _Region(1)
            super().__init__(None, region.create_kv_memoryview(), "played")
            self.there: set[bytes] = set()
            self.open: list[Any] = []
            self.ended: list[Any] = []
            self.asked = Lookups("played") if is_asynchronous else None

        def on_new_request(self, req_context: Any) -> Any:
            return import_module(f"{_ROOT}.base").RequestOffloadingContext()

        def lookup(self, key: bytes, req_context: Any) -> Any:
            if self.asked is None:
                return results.HIT if key in self.there else results.MISS
            found = self.asked.lookup(key, req_context)
            if found is None:
                return results.RETRY
            return results.HIT if found else results.MISS

        def submit_store(self, job: Any) -> None:
            if self.there.issuperset(job.keys):
                self.ended.append(job)
            else:
                self.open.append(job)

        def submit_load(self, job: Any) -> None:
            self.open.append(job)

        def end(self, keys: list[bytes], *, is_load: bool) -> None:
            job = next(
                job
                for job in self.open
                if job.is_promotion == is_load and set(job.keys) >= set(keys)
            )
            self.open.remove(job)
            self.ended.append(job)
            self.there.update(job.keys)

        def get_finished_jobs(self) -> list[Any]:
            ended, self.ended = self.ended, []
            return [base.JobResult(job_id=job.job_id, success=True) for job in ended]

        def on_request_finished(self, req_context: Any) -> None:
            if self.asked is not None:
                self.asked.cleanup(req_context.req_id)

        def on_schedule_end(self, context: Any) -> None:
            if self.asked is None:
                return
            states = self.asked._lookup_state
            is_asked = any(
                key in states and states[key].generation == generation
                for key, _, generation in self.asked._lookup_batch
            )
            self.asked.flush()
            while is_asked and self.asked._pending_results.empty():
                time.sleep(1e-5)

        def drain_jobs(self) -> None:
            pass

    tier = Tier()
    return tier


class _Beside:
    """Both hierarchies, and requests that use them."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.base = import_module(f"{_ROOT}.base")
        manager = import_module(f"{_ROOT}.tiering.manager")
        num_chunks, rate = draw.randint(8, 30), draw.choice((1.0, 4.0, 1e9))
        self.host = CPUTier(num_chunks)
        more: dict[str, Any] = {
            "capacity_bytes": 1e6,
            "read_bytes_per_s": rate,
            "write_bytes_per_s": rate,
            "latency_s": 0.1,
        }
        tiers: dict[str, Any] = {}
        for name in draw.choice((("fs",), ("pool",), ("pool", "fs"), ("fs", "pool"))):
            kind = FileSystemTier if name == "fs" else PoolTier
            tiers[name] = kind(1, **more)
        self.ours = TierHierarchy(self.host, tiers)
        self.ours.on_end = self.end_theirs
        self.played = {
            name: _played_tier(is_asynchronous=name == "fs") for name in tiers
        }
        primary = manager.CPUPrimaryTierOffloadingManager(
            num_chunks, _Region(num_chunks)
        )
        self.theirs = manager.TieringOffloadingManager(
            primary, list(self.played.values())
        )
        self.living: list[Any] = []
        self.num_requests = 0
        self.stores: list[Any] = []
        self.loads: list[Any] = []
        self.num_promoted = 0

    def key(self, key: int) -> Any:
        return self.base.make_offload_key(key.to_bytes(8, "big"), 0)

    def end_theirs(self, moved: Any) -> None:
        keys = [self.key(key) for key in moved.job.keys]
        self.played[moved.tier].end(keys, is_load=moved.job.is_load)

    # -- requests -------------------------------------------------------------

    def arrive(self) -> None:
        number, draw = self.num_requests, self.draw
        self.num_requests += 1
        text, length = draw.randrange(8), draw.randint(1, 6)
        keys = [1, 2, *range(10 * text + 3, 10 * text + 3 + length)]
        context = self.base.ReqContext(req_id=str(number))
        for place, key in enumerate(keys):
            context.set_offload_key_position(self.key(key), place + 1)
        self.theirs.on_new_request(context)
        self.living.append([RequestAccess(number), context, keys, 0])

    def look_up(self, request: Any) -> bool:
        """Look a request up in both; False where ours has a rule of its own."""
        access, context, keys, _ = request
        found = self.ours.longest_prefix(Keys.of(keys), access)
        if self.ours.num_lost_chunks:
            return False
        results, number, is_ready = self.base.LookupResult, 0, True
        for key in keys:
            result = self.theirs.lookup(self.key(key), context)
            if result is results.MISS:
                break
            number += 1
            is_ready &= result is results.HIT
        assert found == (number, is_ready)
        if number and is_ready and self.draw.random() < 0.7:
            part = keys[:number]
            spec = self.theirs.prepare_load([self.key(key) for key in part], context)
            hold = self.host.prepare_load(Keys.of(part), access)
            ids = [int(each) for each in spec.block_ids]
            assert hold.chunk_ids.tolist() == ids
            self.num_promoted += sum(self.ours.loaded(part, access).values())
            self.loads.append((part, hold, context))
        return True

    def store(self, request: Any) -> None:
        access, context, keys, _ = request
        theirs = self.theirs.prepare_store([self.key(key) for key in keys], context)
        ours = self.host.prepare_store(Keys.of(keys), access)
        assert (ours is None) == (theirs is None)
        if ours is None:
            return
        assert [self.key(key) for key in ours.hold.numbers()] == list(
            theirs.keys_to_store
        )
        assert ours.chunk_ids.tolist() == [
            int(each) for each in theirs.store_spec.block_ids
        ]
        if ours.spans:
            request[3] += 1
            stored = ours.hold.numbers(), ours.hold, request
            self.stores.append(stored)

    def leave(self, request: Any) -> None:
        access, context, _, num_stores = request
        self.living.remove(request)
        self.host.finish(access)
        self.theirs.on_request_finished(context)
        if not num_stores:
            self.ours.finish(access)

    def end_copies(self) -> None:
        for part in [each for each in self.loads if self.draw.random() < 0.6]:
            self.loads.remove(part)
            keys, hold, context = part
            self.host.complete_load(hold)
            self.theirs.complete_load([self.key(key) for key in keys], context)
        for stored in [each for each in self.stores if self.draw.random() < 0.6]:
            self.stores.remove(stored)
            keys, hold, request = stored
            self.host.complete_store(hold)
            self.ours.stored(hold, request[0])
            self.theirs.complete_store([self.key(key) for key in keys], request[1])
            request[3] -= 1
            if request[0].is_finished and not request[3]:
                self.ours.finish(request[0])

    def call(self) -> bool:
        """Go through a call of a scheduler; False where it cannot go on."""
        draw = self.draw
        self.ours.follow(self.ours.now_s + draw.choice((0.1, 1.0, 5.0)))
        if draw.random() < 0.5:
            self.arrive()
        for request in list(self.living):
            if draw.random() < 0.4 and not self.look_up(request):
                return False
        for request in list(self.living):
            if draw.random() < 0.4:
                self.store(request)
            if draw.random() < 0.2:
                self.leave(request)
        self.ours.end_call()
        self.theirs.on_schedule_end(self.base.ScheduleEndContext([], []))
        self.end_copies()
        self.host.check()
        self.ours.check()
        self.compare()
        return True

    def compare(self) -> None:
        manager = self.theirs.primary_tier
        assert self.host.num_writing_chunks == manager._num_write_pending_chunks
        assert self.host.num_free_chunks == manager._get_num_free_chunks()
        for name, tier in self.ours.tiers.items():
            there = {self.key(key) for key in tier._used_s}
            assert there == self.played[name].there


@pytest.mark.skipif(
    bool(why_missing()) or minor() != "0.33", reason="tiers are known of 0.33 only"
)
def test_random_calls_go_as_in_the_real_manager() -> None:
    num_calls = num_promoted = 0
    for seed in range(NUM_SEQUENCES):
        beside = _Beside(Random(f"tiering {seed}"))
        try:
            for _ in range(NUM_CALLS):
                if not beside.call():
                    break
                num_calls += 1
            num_promoted += beside.num_promoted
        finally:
            for tier in beside.played.values():
                if tier.asked is not None:
                    tier.asked.shutdown()
    assert num_calls > 30 * NUM_SEQUENCES
    assert num_promoted > 0
