"""The CPU tier: chunks of KV blocks in host memory, stored and loaded by jobs."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from cache.errors import CacheConfigError, CacheError, require
from cache.tiers.arc import ARCTierPolicy
from cache.tiers.lru import LRUTierPolicy
from cache.tiers.offers import OfferCounts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.policy import TierPolicy

CHUNK_ALIGNMENT_BYTES = 4096
"""A chunk takes whole pages of host memory."""

_WRITING = -1
"""Readers of a chunk that is not there yet."""

TIER_POLICIES: Mapping[str, type[TierPolicy]] = {
    "lru": LRUTierPolicy,
    "arc": ARCTierPolicy,
}
"""Policies by the name that ``eviction_policy`` takes."""


class LookupResult(Enum):
    """Whether a chunk of KV blocks can be loaded from the tier."""

    MISS = "miss"
    """It is not there."""
    HIT_PENDING = "hit_pending"
    """It is being written: to be asked again."""
    HIT = "hit"
    """It can be loaded."""


class PreparedStore(NamedTuple):
    """The chunks of an offered store that the tier accepts."""

    keys: list[int]
    """Keys of the chunks to write, in the order in which they were offered."""
    chunk_ids: list[int]
    """The place in the tier of each key."""
    evicted_ids: list[int]
    """Places of the chunks that were evicted for them, in order of eviction."""


class Chunk:
    """A place of the tier, and how many transfers read it; -1 while it is written."""

    __slots__ = ("chunk_id", "num_readers")

    def __init__(self, chunk_id: int) -> None:
        self.chunk_id = chunk_id
        self.num_readers = _WRITING


class CPUTier:
    """Chunks by their key, in so many places of host memory.

    ::

        prepare_store --> written --complete_store--> evictable --evicted--> missing
                                                      |       ^
                                         prepare_load v       | complete_load
                                                        read

    A key stands for the tokens of a chunk and all before it. A request comes with its
    `RequestAccess`, a new one for each, and is ended by `finish`.

    Parameters
    ----------
    num_chunks
        Places.
    eviction_policy
        A name out of `TIER_POLICIES`.
    store_threshold
        A chunk is stored from so many offers on; below 2 from the first.
    max_tracker_size
        Keys whose offers are counted at a time.

    Attributes
    ----------
    num_evictable_chunks, num_writing_chunks
        Chunks that may go, and chunks that are not there yet.
    num_stores_skipped
        Chunks of lots that were offered too seldom so far.
    num_evictions
        Chunks that made room so far.

    Raises
    ------
    CacheConfigError
        If there is no such policy, or no place.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/manager.py`` (`CPUOffloadingManager`).
    """

    def __init__(
        self,
        num_chunks: int,
        *,
        eviction_policy: str = "lru",
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
    ) -> None:
        if num_chunks < 1:
            raise CacheConfigError(
                f"a CPU tier needs room for one chunk at least, got {num_chunks}; "
                f"give it more memory, or make chunks smaller"
            )
        if eviction_policy not in TIER_POLICIES:
            raise CacheConfigError(
                f"eviction_policy of a tier must be one of "
                f"{', '.join(TIER_POLICIES)}, got {eviction_policy!r}"
            )
        self.num_chunks = num_chunks
        self.policy = TIER_POLICIES[eviction_policy](num_chunks)
        self._chunks: dict[int, Chunk] = {}
        self._num_begun = 0  # places that were ever used: 0, 1, ...
        self._free_ids: list[int] = []
        self._threshold = store_threshold
        self._offers = OfferCounts(max_tracker_size) if store_threshold >= 2 else None
        self.num_evictable_chunks = 0
        self.num_writing_chunks = 0
        self.num_stores_skipped = 0
        self.num_evictions = 0

    @property
    def num_used_chunks(self) -> int:
        """Places that hold a chunk, one that is being written included."""
        return len(self._chunks)

    @property
    def num_reading_chunks(self) -> int:
        """Places that are being read."""
        return len(self._chunks) - self.num_evictable_chunks - self.num_writing_chunks

    @property
    def num_free_chunks(self) -> int:
        """Places that hold nothing."""
        return self.num_chunks - len(self._chunks)

    # -- looking up -----------------------------------------------------------

    def lookup(self, key: int) -> LookupResult:
        """Say whether a chunk is there. Changes nothing."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return LookupResult.MISS
        is_there = chunk.num_readers != _WRITING
        return LookupResult.HIT if is_there else LookupResult.HIT_PENDING

    def longest_prefix(self, keys: Iterable[int]) -> tuple[int, bool]:
        """Return how many leading keys are there, and whether none is being written."""
        chunks, num_found, all_there = self._chunks, 0, True
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None:
                break
            num_found += 1
            all_there &= chunk.num_readers != _WRITING
        return num_found, all_there

    # -- loading --------------------------------------------------------------

    def prepare_load(
        self, keys: Sequence[int], access: RequestAccess, first: int = 0
    ) -> list[int]:
        """Hold chunks for a job that reads them; return their places.

        Parameters
        ----------
        keys
            Successive chunks of a request.
        access
            Of the request.
        first
            Place of the first of them in the request.

        Raises
        ------
        CacheError
            If one is not there, or the request has ended; nothing changes.
        """
        for key in keys:
            if self.lookup(key) is not LookupResult.HIT:
                raise CacheError(
                    f"chunk {key} cannot be loaded: it is not there; look it up first"
                )
        _refuse_ended(access)
        chunks = [self._chunks[key] for key in keys]
        for key, chunk in zip(keys, chunks, strict=True):
            if not chunk.num_readers:
                self.policy.pin(key)
                self.num_evictable_chunks -= 1
            chunk.num_readers += 1
        positions = {key: first + index for index, key in enumerate(keys)}
        self._note(positions, access, reused=keys)
        return [chunk.chunk_id for chunk in chunks]

    def complete_load(self, keys: Iterable[int]) -> None:
        """Let go of chunks that a job has read, whether or not it succeeded.

        Raises
        ------
        CacheError
            If nothing reads one of them.
        """
        for key, chunk in self._held(keys, is_load=True):
            chunk.num_readers -= 1
            if not chunk.num_readers:
                self.num_evictable_chunks += 1
                self.policy.mark_evictable(key)

    # -- storing --------------------------------------------------------------

    def prepare_store(
        self, keys: Sequence[int], access: RequestAccess, first: int = 0
    ) -> PreparedStore | None:
        """Offer a lot; return what is to be written, None if there is no room for it.

        A lot is taken as a whole or not at all. What it says of the request's use of
        chunks is noted either way.

        Parameters
        ----------
        keys, access, first
            See `prepare_load`.

        Raises
        ------
        CacheError
            If the request has ended; nothing changes.
        """
        _refuse_ended(access)
        missing, present = self._sorted_out(keys)
        missed = access.missed
        if new := [key for key in missing if key not in missed]:
            self.policy.store_missed(new)
            missed.update(new)
        shown = {*missing, *present}
        positions = {k: first + i for i, k in enumerate(keys) if k in shown}
        self._note(positions, access, reused=present)
        if not missing:
            return PreparedStore([], [], [])
        evicted_ids = self._make_room(len(missing) - self.num_free_chunks, set(keys))
        if evicted_ids is None:
            return None
        chunk_ids = []
        for key in missing:
            chunk = self._chunks[key] = Chunk(self._take_place())
            chunk_ids.append(chunk.chunk_id)
            self.policy.inserted(key, access)
        self.num_writing_chunks += len(missing)
        access.inserted.update(missing)
        return PreparedStore(missing, chunk_ids, evicted_ids)

    def _sorted_out(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the keys to store, and those that are there."""
        missing: list[int] = []
        present: list[int] = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                missing.append(key)
            elif chunk.num_readers != _WRITING:
                present.append(key)
        offers = self._offers
        if offers is not None:
            offers.add(keys)
            often = [key for key in missing if offers[key] >= self._threshold]
            self.num_stores_skipped += len(missing) - len(often)
            missing = often
        return missing, present

    def _make_room(self, num_needed: int, protected: set[int]) -> list[int] | None:
        """Evict so many chunks; return their places, None if they cannot be had."""
        if num_needed <= 0:
            return []
        if num_needed > self.num_evictable_chunks:
            return None
        evicted = self.policy.evict(num_needed, protected)
        if evicted is None:
            return None
        ids = [self._chunks.pop(key).chunk_id for key in evicted]
        self._free_ids += ids
        self.num_evictable_chunks -= len(ids)
        self.num_evictions += len(ids)
        return ids

    def _take_place(self) -> int:
        """Return a place that was never used, or else the one that was left last."""
        if self._num_begun < self.num_chunks:
            self._num_begun += 1
            return self._num_begun - 1
        return self._free_ids.pop()

    def complete_store(self, keys: Iterable[int]) -> None:
        """Let chunks be found that a job has written.

        Raises
        ------
        CacheError
            If one of them is not being written.
        """
        for key, chunk in self._held(keys, is_load=False):
            chunk.num_readers = 0
            self.num_writing_chunks -= 1
            self.num_evictable_chunks += 1
            self.policy.mark_evictable(key)

    def _held(
        self, keys: Iterable[int], *, is_load: bool
    ) -> Iterable[tuple[int, Chunk]]:
        """Return chunks that a job holds; refuse them all if one is not held."""
        held = []
        for key in keys:
            chunk = self._chunks.get(key)
            num_readers = 0 if chunk is None else chunk.num_readers
            is_held = num_readers > 0 if is_load else num_readers == _WRITING
            if chunk is None or not is_held:
                job, how = ("load", "read") if is_load else ("store", "written")
                raise CacheError(
                    f"chunk {key} is not being {how}; complete each {job} once"
                )
            held.append((key, chunk))
        return held

    # -- requests -------------------------------------------------------------

    def _note(
        self, positions: dict[int, int], access: RequestAccess, reused: Sequence[int]
    ) -> None:
        """Note what a request shows, each key once."""
        known, inserted = access.positions, access.inserted
        new = [key for key in positions if key not in known]
        if new:
            known.update((key, positions[key]) for key in new)
            self.policy.accessed(new, access)
        # What it has stored itself is no use of what others left.
        access.reused.update(key for key in reused if key not in inserted)

    def finish(self, access: RequestAccess) -> None:
        """Settle what a request that ends has shown; once."""
        if not access.is_finished:
            access.is_finished = True
            self.policy.finished(access)

    # -- proof ----------------------------------------------------------------

    def check(self) -> None:
        """Prove invariant 2 for the tier, and its policy's own, in O(n).

        Free, evictable, read and written places are all places, each counted once.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        chunks = self._chunks
        places = [chunk.chunk_id for chunk in chunks.values()]
        require(
            sorted(places + self._free_ids) == list(range(self._num_begun)),
            f"tier: {len(places)} places are used and {len(self._free_ids)} were left, "
            f"of {self._num_begun} that were ever used",
        )
        require(
            self._num_begun <= self.num_chunks,
            f"tier: {self._num_begun} places are used, there are {self.num_chunks}",
        )
        readers = [chunk.num_readers for chunk in chunks.values()]
        require(
            (readers.count(0), readers.count(_WRITING))
            == (self.num_evictable_chunks, self.num_writing_chunks),
            f"tier: {readers.count(0)} chunks are evictable and "
            f"{readers.count(_WRITING)} written, {self.num_evictable_chunks} and "
            f"{self.num_writing_chunks} counted",
        )
        self.policy.check({key: not chunk.num_readers for key, chunk in chunks.items()})
        if self._offers is not None:
            self._offers.check()


def _refuse_ended(access: RequestAccess) -> None:
    if access.is_finished:
        raise CacheError("the request has ended; a tier sees it no more")


def num_chunks_of(num_bytes: int, block_bytes: int, blocks_per_chunk: int) -> int:
    """Return how many chunks so much host memory holds.

    Parameters
    ----------
    num_bytes
        Of all workers together.
    block_bytes
        KV bytes of a block, over all workers that keep a copy of their own.
    blocks_per_chunk
        Blocks of a chunk.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/spec.py``.
    """
    pages = -(-block_bytes * blocks_per_chunk // CHUNK_ALIGNMENT_BYTES)
    return num_bytes // (pages * CHUNK_ALIGNMENT_BYTES)
