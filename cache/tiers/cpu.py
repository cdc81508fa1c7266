"""The CPU tier: chunks of KV blocks in host memory, stored and loaded by jobs."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cache.errors import CacheConfigError, CacheError, require
from cache.tiers.arc import ARCTierPolicy
from cache.tiers.lru import LRUTierPolicy
from cache.tiers.offers import OfferCounts
from cache.tiers.places import (
    NO_INTS,
    ChunkIndex,
    Chunks,
    as_ints,
    is_all,
    is_any,
    longer,
)
from cache.tiers.sessions import KeepTTL, NextUse, PinShared, SessionEnd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.places import Ints, Mask
    from cache.tiers.policy import TierPolicy

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

    keys: Ints
    """Keys of the chunks to write, in the order in which they were offered."""
    chunk_ids: Ints
    """The place in the tier of each key."""
    evicted_ids: Ints
    """Places of the chunks that were evicted for them, in order of eviction."""


class CPUTier:
    """Chunks by their key, in so many places of host memory.

    ::

        prepare_store --> written --complete_store--> evictable --evicted--> missing
                                                      |       ^
                                         prepare_load v       | complete_load
                                                        read

    A key stands for the tokens of a chunk and all before it. A request comes with its
    `RequestAccess`, a new one for each, and is ended by `finish`. Lots are handled as
    columns: a few operations each, however many chunks they have.

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
        self._index = ChunkIndex(num_chunks)
        # By place: its cell there, and its readers, or -1 while it is written.
        self._cells = NO_INTS
        self._num_holds = NO_INTS
        self._num_used = self._num_writing = self._num_reading = 0
        self._num_begun = 0  # places that were ever used: 0, 1, ...
        self._free_ids: Ints = NO_INTS  # of these, the one left last at the end
        self._threshold = store_threshold
        self._offers = OfferCounts(max_tracker_size) if store_threshold >= 2 else None
        self.num_stores_skipped = 0
        self.num_evictions = 0

    @property
    def num_used_chunks(self) -> int:
        """Places that hold a chunk, one that is being written included."""
        return self._num_used

    @property
    def num_writing_chunks(self) -> int:
        """Places of chunks that are not there yet."""
        return self._num_writing

    @property
    def num_reading_chunks(self) -> int:
        """Places that are being read."""
        return self._num_reading

    @property
    def num_evictable_chunks(self) -> int:
        """Places of chunks that may go."""
        return self._num_used - self._num_writing - self._num_reading

    @property
    def num_free_chunks(self) -> int:
        """Places that hold nothing."""
        return self.num_chunks - self._num_used

    # -- looking up -----------------------------------------------------------

    def lookup(self, key: int) -> LookupResult:
        """Say whether a chunk is there. Changes nothing."""
        place = self._index.find(key)
        if place < 0:
            return LookupResult.MISS
        is_there = self._num_holds[place] >= 0
        return LookupResult.HIT if is_there else LookupResult.HIT_PENDING

    def longest_prefix(
        self, keys: Sequence[int] | Ints, access: RequestAccess, first: int = 0
    ) -> tuple[int, bool]:
        """Return how many leading keys are there, and whether none is being written.

        Parameters
        ----------
        keys, access, first
            See `prepare_load`; it counts as no use that the request makes of them.
        """
        ids = self._places_of(as_ints(keys), access, first)
        is_missing = ids < 0
        if is_any(is_missing):
            ids = ids[: int(is_missing.argmax())]
        return len(ids), not is_any(self._num_holds[ids] < 0)

    def meet(self, keys: Sequence[int] | Ints, access: RequestAccess) -> None:
        """Look up where the leading keys of a request belong, all at once.

        Calls that name some of them do that for these, if none has done it before.
        """
        if not access.num_known:
            access.know(as_ints(keys), 0, self._index)

    def _places_of(self, keys: Ints, access: RequestAccess, first: int) -> Ints:
        """Return the place of each key of a request, -1 for those that are missing."""
        cells = access.know(keys, first, self._index)  # the table may grow
        return self._index.places[cells]

    # -- loading --------------------------------------------------------------

    def prepare_load(
        self, keys: Sequence[int] | Ints, access: RequestAccess, first: int = 0
    ) -> Ints:
        """Hold chunks for a job that reads them; return their places.

        Parameters
        ----------
        keys
            Successive chunks of a request.
        access
            Of the request.
        first
            Position of the first of them in the request.

        Raises
        ------
        CacheError
            If one is not there, or the request has ended; nothing changes.
        """
        _refuse_ended(access)
        keys = as_ints(keys)
        stop = first + len(keys)
        ids = self._places_of(keys, access, first)
        is_hit = self._is_present(ids, ids < 0)
        if not is_all(is_hit):
            key = int(keys[~is_hit][0])
            raise CacheError(
                f"chunk {key} cannot be loaded: it is not there; look it up first"
            )
        self.hold(ids)
        chunks = Chunks(keys, ids, np.arange(first, stop))
        new = access.show(first, stop)
        if is_all(new):
            self.policy.accessed(chunks, access)
        elif is_any(new):
            self.policy.accessed(chunks.where(new), access)
        self.policy.reused(chunks, access)
        return ids

    def hold(self, chunk_ids: Sequence[int] | Ints) -> None:
        """Hold chunks that are there for a job that copies them to another tier.

        It is no use that a request makes of them; `complete_load` lets go of them.
        """
        ids = as_ints(chunk_ids)
        num_holds = self._num_holds[ids]
        self._num_reading += len(ids) - int(np.count_nonzero(num_holds))
        self._num_holds[ids] = num_holds + 1

    def holds(self, chunk_ids: Sequence[int] | Ints, *, is_written: bool) -> bool:
        """Whether all these places are written, or all are read."""
        num_holds = self._num_holds[as_ints(chunk_ids)]
        return is_all(num_holds < 0 if is_written else num_holds > 0)

    def complete_load(self, chunk_ids: Sequence[int] | Ints) -> None:
        """Let go of the places of a job that has read, whether or not it succeeded.

        Raises
        ------
        CacheError
            If nothing reads one of them.
        """
        ids = as_ints(chunk_ids)
        num_holds = self._num_holds[ids]
        self._require(num_holds > 0, ids, "load", "read")
        num_holds -= 1
        self._num_holds[ids] = num_holds
        self._num_reading -= len(ids) - int(np.count_nonzero(num_holds))

    def _require(self, is_held: Mask, ids: Ints, job: str, how: str) -> None:
        """Refuse places that are not read, or not written."""
        if not is_all(is_held):
            raise CacheError(
                f"place {ids[~is_held][0]} is not being {how}; complete each {job} once"
            )

    # -- storing --------------------------------------------------------------

    def prepare_store(
        self, keys: Sequence[int] | Ints, access: RequestAccess, first: int = 0
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
        keys = as_ints(keys)
        stop = first + len(keys)
        cells = access.know(keys, first, self._index)
        ids, positions = self._index.places[cells], np.arange(first, stop)
        present = seen = _NOTHING
        if self._offers is None and is_all(ids < 0):
            has_new = access.show_all(first, stop)
        else:
            lot = Chunks(keys, ids, positions)
            parts = self._part(lot, first, cells, access)
            missing, cells, present, seen, has_new = parts
            keys, _, positions = missing
        num_missing = len(keys)
        if num_missing:
            self.policy.store_missed(keys, access)
        if has_new:
            self.policy.accessed(seen, access)
        if len(present.ids):
            self.policy.reused(present, access)
        if not num_missing:
            return PreparedStore(NO_INTS, NO_INTS, NO_INTS)
        num_needed = num_missing - self.num_free_chunks
        num_own = 0
        if len(present.ids):
            num_own = int(np.count_nonzero(self._num_holds[present.ids] == 0))
        evicted_ids = NO_INTS
        if num_needed > 0:
            if num_needed <= self.num_evictable_chunks - num_own:
                evicted_ids = self._make_room(num_needed, present.ids)
            if not len(evicted_ids):
                access.is_whole = False  # of what it has shown this is not there
                return None
        ids = self._take_places(num_missing)
        self._index.places[cells] = ids
        self._cells[ids] = cells
        self._num_holds[ids] = -1
        self._num_used += num_missing
        self._num_writing += num_missing
        self.policy.inserted(Chunks(keys, ids, positions), access)
        return PreparedStore(keys, ids, evicted_ids)

    def _part(
        self, lot: Chunks, first: int, cells: Ints, access: RequestAccess
    ) -> tuple[Chunks, Ints, Chunks, Chunks, bool]:
        """Note that a request shows a lot; part what is missing from what is there.

        It returns what is to be stored, and its cells; what can be read; what of that
        the request shows for the first time; and whether it shows anything new.
        """
        stop, is_missing = first + len(lot.ids), lot.ids < 0
        if self._offers is None:
            num = int(is_missing.argmax())
            present, missing = lot.cut(num)
            has_rest = is_missing[num] and is_all(is_missing[num:])
            if has_rest and is_all(self._num_holds[present.ids] >= 0):  # mostly
                new = access.show(first, first + num)
                seen = present if is_all(new) else present.where(new)
                has_new = access.show_all(first + num, stop) or is_any(new)
                return missing, cells[num:], present, seen, has_new
        is_present = self._is_present(lot.ids, is_missing)
        if self._offers is not None:
            is_missing &= self._is_often_offered(lot.keys, is_missing)
        new = access.show(first, stop, is_missing | is_present)
        present, seen = lot.where(is_present), lot.where(is_present & new)
        return lot.where(is_missing), cells[is_missing], present, seen, is_any(new)

    def _is_present(self, ids: Ints, is_missing: Mask) -> Mask:
        """Say which of a lot can be read."""
        if is_all(is_missing):
            return ~is_missing
        is_read: Mask = self._num_holds[ids] >= 0
        return is_read & ~is_missing

    def _is_often_offered(self, keys: Ints, is_missing: Mask) -> Mask:
        """Count the offers of a lot; say of which keys there were enough."""
        assert self._offers is not None
        offered = keys.tolist()
        self._offers.add(offered)
        is_often = np.array([self._offers[k] >= self._threshold for k in offered])
        self.num_stores_skipped += int(np.count_nonzero(is_missing & ~is_often))
        return is_often

    def _make_room(self, num_chunks: int, lot: Ints) -> Ints:
        """Evict so many chunks, none of a lot; return their places."""
        if len(lot):
            self._num_holds[lot] += 1
        ids = self.policy.evict(num_chunks, self._num_holds)
        if len(lot):
            self._num_holds[lot] -= 1
        self._index.places[self._cells[ids]] = -1
        free = self._free_ids
        self._free_ids = np.concatenate([free, ids]) if len(free) else ids
        self._num_used -= len(ids)
        self.num_evictions += len(ids)
        return ids

    def _take_places(self, number: int) -> Ints:
        """Return places that were never used, then those that were left last."""
        begun, free = self._num_begun, self._free_ids
        num_fresh = min(number, self.num_chunks - begun)
        num_left = len(free) - number + num_fresh
        left = free[num_left:][::-1]
        if not num_fresh:
            self._free_ids = free[:num_left]
            return left
        self._num_begun += num_fresh
        self._cells = longer(self._cells, self._num_begun)
        self._num_holds = longer(self._num_holds, self._num_begun)
        self.policy.reach(self._num_begun)
        ids = np.arange(begun, self._num_begun)
        if num_fresh == number:
            return ids
        self._free_ids = free[:num_left]
        return np.concatenate([ids, left])

    def complete_store(self, chunk_ids: Sequence[int] | Ints) -> None:
        """Let chunks be found in places that a job has written.

        Raises
        ------
        CacheError
            If one of them is not being written.
        """
        ids = as_ints(chunk_ids)
        self._require(self._num_holds[ids] < 0, ids, "store", "written")
        self._num_holds[ids] = 0
        self._num_writing -= len(ids)

    # -- requests -------------------------------------------------------------

    def finish(self, access: RequestAccess) -> None:
        """Settle what a request that ends has shown; once."""
        if not access.is_finished:
            access.is_finished = True
            if not self.policy.settles(access, self._index.places):
                at = access.shown()
                ids = self._index.places[access.cells[at]]
                positions = np.arange(at.stop) if isinstance(at, slice) else at
                shown = Chunks(access.keys[at], ids, positions)
                is_there = ids >= 0
                self.policy.finished(
                    shown if is_all(is_there) else shown.where(is_there), access
                )
            for pages in access.pages:
                self._index.release(pages)
            access.forget()

    # -- proof ----------------------------------------------------------------

    def check(self) -> None:
        """Prove invariant 2 for the tier, and its policy's own, in O(n).

        Free, evictable, read and written places are all places, each counted once.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        self._index.check()
        is_used = np.ones(self._num_begun, np.bool_)
        is_used[self._free_ids] = False
        ids = is_used.nonzero()[0]
        require(
            len(ids) == self._num_used
            and self._num_used + len(self._free_ids) == self._num_begun,
            f"tier: {self._num_used} places are used and {len(self._free_ids)} were "
            f"left, of {self._num_begun} that were ever used",
        )
        require(
            self._num_begun <= self.num_chunks,
            f"tier: {self._num_begun} places are used, there are {self.num_chunks}",
        )
        num_holds, places = self._num_holds[: self._num_begun], self._index.places
        require(
            np.array_equal(places[self._cells[ids]], ids)
            and np.count_nonzero(places >= 0) == len(ids),
            "tier: a chunk is not found at its place",
        )
        require(
            np.count_nonzero(num_holds == -1) == self._num_writing
            and np.count_nonzero(num_holds > 0) == self._num_reading
            and not is_any(num_holds[~is_used] != 0)
            and is_all(num_holds >= -1),
            "tier: a chunk is read that is being written, or held and not there",
        )
        self.policy.check(ids)
        if self._offers is not None:
            self._offers.check()


_NOTHING = Chunks(NO_INTS, NO_INTS, NO_INTS)


def _refuse_ended(access: RequestAccess) -> None:
    if access.is_finished:
        raise CacheError("the request has ended; a tier sees it no more")
