"""The CPU tier: chunks of KV blocks in host memory, stored and loaded by jobs."""

from __future__ import annotations

from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from cache.errors import CacheConfigError, CacheError, require
from cache.tiers.arc import ARCTierPolicy
from cache.tiers.lru import LRUTierPolicy
from cache.tiers.offers import OfferCounts
from cache.tiers.sessions import KeepTTL, NextUse, PinShared, SessionEnd

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.policy import TierPolicy

CHUNK_ALIGNMENT_BYTES = 4096
"""A chunk takes whole pages of host memory."""

TIER_POLICIES: Mapping[str, type[TierPolicy]] = {
    "lru": LRUTierPolicy,
    "arc": ARCTierPolicy,
    "pin_shared": PinShared,
    "session_end": SessionEnd,
    "next_use": NextUse,
    "keep_ttl": KeepTTL,
}
"""Policies by the name that ``eviction_policy`` takes: vLLM's two, and ours."""


class LookupResult(Enum):
    """Whether a chunk of KV blocks can be loaded from the tier."""

    MISS = "miss"
    """It is not there."""
    HIT_PENDING = "hit_pending"
    """It is being written: to be asked again."""
    HIT = "hit"
    """It can be loaded."""
    RETRY = "retry"
    """It is not known yet, of a tier behind the host: to be asked again."""


class PreparedStore(NamedTuple):
    """The chunks of an offered store that the tier accepts."""

    keys: list[int]
    """Keys of the chunks to write, in the order in which they were offered."""
    chunk_ids: list[int]
    """The place in the tier of each key."""
    evicted_ids: list[int]
    """Places of the chunks that were evicted for them, in order of eviction."""


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
        self._chunk_ids: dict[int, int] = {}
        self._writing: set[int] = set()
        self._readers: dict[int, int] = {}  # of chunks that are read
        self._num_begun = 0  # places that were ever used: 0, 1, ...
        self._free_ids: list[int] = []
        self._threshold = store_threshold
        self._offers = OfferCounts(max_tracker_size) if store_threshold >= 2 else None
        self.num_stores_skipped = 0
        self.num_evictions = 0

    @property
    def num_used_chunks(self) -> int:
        """Places that hold a chunk, one that is being written included."""
        return len(self._chunk_ids)

    @property
    def num_writing_chunks(self) -> int:
        """Places of chunks that are not there yet."""
        return len(self._writing)

    @property
    def num_reading_chunks(self) -> int:
        """Places that are being read."""
        return len(self._readers)

    @property
    def num_evictable_chunks(self) -> int:
        """Places of chunks that may go."""
        return len(self._chunk_ids) - len(self._writing) - len(self._readers)

    @property
    def num_free_chunks(self) -> int:
        """Places that hold nothing."""
        return self.num_chunks - len(self._chunk_ids)

    # -- looking up -----------------------------------------------------------

    def lookup(self, key: int) -> LookupResult:
        """Say whether a chunk is there. Changes nothing."""
        if key not in self._chunk_ids:
            return LookupResult.MISS
        is_there = key not in self._writing
        return LookupResult.HIT if is_there else LookupResult.HIT_PENDING

    def longest_prefix(self, keys: Iterable[int]) -> tuple[int, bool]:
        """Return how many leading keys are there, and whether none is being written."""
        found = list(takewhile(self._chunk_ids.__contains__, keys))
        return len(found), self._writing.isdisjoint(found)

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
        self.hold(keys)
        if new := access.show(keys, first):
            self.policy.accessed(new, access)
        self.policy.reused(keys, access)
        return [self._chunk_ids[key] for key in keys]

    def hold(self, keys: Iterable[int]) -> None:
        """Hold chunks that are there for a job that copies them to another tier.

        It is no use that a request makes of them; `complete_load` lets go of them.
        """
        readers = self._readers
        for key in keys:
            readers[key] = readers.get(key, 0) + 1

    def complete_load(self, keys: Iterable[int]) -> None:
        """Let go of chunks that a job has read, whether or not it succeeded.

        Raises
        ------
        CacheError
            If nothing reads one of them.
        """
        readers, read = self._readers, list(keys)
        if not readers.keys() >= set(read):
            raise self._not_held(read, readers, "load", "read")
        for key in read:
            readers[key] -= 1
            if not readers[key]:
                del readers[key]

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
        if missing:
            self.policy.store_missed(missing, access)
        shown = None
        if len(missing) + len(present) < len(keys):
            shown = {*missing, *present}
        new = access.show(keys, first, shown)
        if new:
            there = set(present).intersection(new) if present else ()
            self.policy.accessed([k for k in present if k in there], access)
        if present:
            self.policy.reused(present, access)
        if not missing:
            return PreparedStore([], [], [])
        num_needed = len(missing) - self.num_free_chunks
        num_own = sum([key not in self._readers for key in present])
        if num_needed > self.num_evictable_chunks - num_own:
            return None
        evicted_ids: list[int] = []
        if num_needed > 0:
            evicted_ids = self._make_room(num_needed, keys)
            if not evicted_ids:
                return None
        chunk_ids = self._take_places(len(missing))
        self._chunk_ids.update(zip(missing, chunk_ids, strict=True))
        self._writing.update(missing)
        self.policy.inserted(missing, access)
        return PreparedStore(missing, chunk_ids, evicted_ids)

    def _sorted_out(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the keys to store, and those that are there."""
        chunk_ids, writing = self._chunk_ids, self._writing
        missing: list[int] = list(keys)
        present: list[int] = []
        if not chunk_ids.keys().isdisjoint(keys):
            missing = [key for key in keys if key not in chunk_ids]
            present = [k for k in keys if k in chunk_ids and k not in writing]
        offers = self._offers
        if offers is not None:
            offers.add(keys)
            often = [key for key in missing if offers[key] >= self._threshold]
            self.num_stores_skipped += len(missing) - len(often)
            missing = often
        return missing, present

    def _make_room(self, num_chunks: int, lot: Sequence[int]) -> list[int]:
        """Evict so many chunks, none of a lot; return their places."""
        held = self._writing, self._readers.keys(), set(lot)
        ids = [*map(self._chunk_ids.pop, self.policy.evict(num_chunks, held))]
        self._free_ids += ids
        self.num_evictions += len(ids)
        return ids

    def _take_places(self, number: int) -> list[int]:
        """Return places that were never used, then those that were left last."""
        num_fresh = min(number, self.num_chunks - self._num_begun)
        ids = list(range(self._num_begun, self._num_begun + num_fresh))
        self._num_begun += num_fresh
        if num_fresh < number:
            first = len(self._free_ids) - number + num_fresh
            ids += reversed(self._free_ids[first:])
            del self._free_ids[first:]
        return ids

    def complete_store(self, keys: Iterable[int]) -> None:
        """Let chunks be found that a job has written.

        Raises
        ------
        CacheError
            If one of them is not being written.
        """
        written = list(keys)
        if not self._writing.issuperset(written):
            raise self._not_held(written, self._writing, "store", "written")
        self._writing.difference_update(written)

    def _not_held(
        self, keys: Iterable[int], held: Container[int], job: str, how: str
    ) -> CacheError:
        key = next(key for key in keys if key not in held)
        return CacheError(f"chunk {key} is not being {how}; complete each {job} once")

    # -- requests -------------------------------------------------------------

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
        places = [*self._chunk_ids.values()]
        require(
            sorted(places + self._free_ids) == list(range(self._num_begun)),
            f"tier: {len(places)} places are used and {len(self._free_ids)} were left, "
            f"of {self._num_begun} that were ever used",
        )
        require(
            self._num_begun <= self.num_chunks,
            f"tier: {self._num_begun} places are used, there are {self.num_chunks}",
        )
        held = self._writing | self._readers.keys()
        require(
            held <= self._chunk_ids.keys()
            and len(held) == len(self._writing) + len(self._readers)
            and all(number > 0 for number in self._readers.values()),
            "tier: a chunk is read that is being written, or held and not there",
        )
        self.policy.check(self._chunk_ids.keys())
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
    return num_bytes // chunk_bytes_of(block_bytes, blocks_per_chunk)


def chunk_bytes_of(block_bytes: int, blocks_per_chunk: int) -> int:
    """Return what a chunk takes; see `num_chunks_of`."""
    pages = -(-block_bytes * blocks_per_chunk // CHUNK_ALIGNMENT_BYTES)
    return pages * CHUNK_ALIGNMENT_BYTES
