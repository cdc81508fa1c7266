"""The CPU tier: chunks of KV blocks in host memory, stored and loaded by jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cache.errors import CacheConfigError, CacheError, require
from cache.tiers.arc import ARCTierPolicy
from cache.tiers.extents import Chunks, Extent, Hold, Part
from cache.tiers.lookups import ChunkLookups, end_of
from cache.tiers.lru import LRUTierPolicy
from cache.tiers.offers import OfferCounts
from cache.tiers.places import NO_INTS, Lot, column_of, gaps_of
from cache.tiers.sessions import KeepTTL, NextUse, PinShared, SessionEnd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.places import Ints, Keys, Span
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


class PreparedStore(NamedTuple):
    """The chunks of an offered store that the tier accepts."""

    lots: list[Lot]
    """The chunks to write, in the order in which they were offered."""
    hold: Hold
    """These chunks, to be handed to `CPUTier.complete_store`."""
    evicted_ids: Ints
    """Places of the chunks that were evicted for them, in order of eviction."""

    @property
    def spans(self) -> list[Span]:
        """Positions of the chunks to write."""
        return [lot.span for lot in self.lots]

    @property
    def chunk_ids(self) -> Ints:
        """The place in the tier of each chunk to write."""
        return self.hold.chunk_ids


class CPUTier(ChunkLookups):
    """Chunks by their key, in so many places of host memory.

    ::

        prepare_store --> written --complete_store--> evictable --evicted--> missing
                                                      |       ^
                                         prepare_load v       | complete_load
                                                        read

    A chunk stands for its tokens and all before it. A request comes with its
    `RequestAccess`, a new one for each, and is ended by `finish`. What was stored
    together is kept together (`cache.tiers.extents`): a lot takes a few operations,
    however many chunks it has.

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
        super().__init__()
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

    # -- loading --------------------------------------------------------------

    def prepare_load(
        self, keys: Keys, access: RequestAccess, first: int = 0, stop: int | None = None
    ) -> Hold:
        """Do as `load`, with chunks from one position on and before another one."""
        return self.load([Lot(keys, first, end_of(keys, stop))], access)

    def load(self, lots: Sequence[Lot], access: RequestAccess) -> Hold:
        """Hold chunks for a job that reads them.

        Parameters
        ----------
        lots
            Of the prompt of a request.
        access
            Of the request.

        Raises
        ------
        CacheError
            If one is not there, or the request has ended; nothing changes.
        """
        _refuse_ended(access)
        found = [self._index.parts(*lot) for lot in lots]
        for lot, parts in zip(lots, found, strict=True):
            _require_all(lot, parts)
        chunks: list[Chunks] = []
        seen: list[Chunks] = []
        is_new = False
        for lot, parts in zip(lots, found, strict=True):
            new = access.show(lot)
            is_new |= bool(new)
            own, own_seen = self._cut(parts, new)
            chunks += own
            seen += own_seen if new else ()
        read = [extent for extent, _ in chunks]
        hold = Hold(read, column_of([extent.ids for extent in read]))
        self._begin_reading(hold)
        if is_new:
            self.policy.accessed(seen, access)
        self.policy.reused(chunks, access)
        return hold

    def _begin_reading(self, hold: Hold) -> None:
        for extent in hold.extents:
            if not extent.holds:
                self._num_reading += len(extent)
            extent.holds.append(hold)

    def hold(self, hold: Hold) -> Hold:
        """Hold chunks that are there for a job that copies them to another tier.

        It is no use that a request makes of them; `complete_load` lets go of them.
        """
        copied = Hold([*hold.extents], hold.chunk_ids)
        self._begin_reading(copied)
        return copied

    def holds(self, hold: Hold, *, is_written: bool) -> bool:
        """Whether all chunks of a job are written, or all are read."""
        return all(
            hold in each.holds and each.is_written is is_written
            for each in hold.extents
        )

    def complete_load(self, hold: Hold) -> None:
        """Let go of the chunks of a job that has read, whether or not it succeeded.

        Raises
        ------
        CacheError
            If it does not read them.
        """
        if not self.holds(hold, is_written=False):
            raise CacheError("chunks are not being read; complete each load once")
        for extent in hold.extents:
            extent.holds.remove(hold)
            if not extent.holds:
                self._num_reading -= len(extent)

    # -- storing --------------------------------------------------------------

    def prepare_store(
        self, keys: Keys, access: RequestAccess, first: int = 0, stop: int | None = None
    ) -> PreparedStore | None:
        """Do as `offer`, with chunks from one position on and before another one."""
        return self.offer([Lot(keys, first, end_of(keys, stop))], access)

    def offer(self, lots: Sequence[Lot], access: RequestAccess) -> PreparedStore | None:
        """Offer lots; return what is to be written, None if there is no room for it.

        They are taken as a whole or not at all. What they say of the request's use of
        chunks is noted either way.

        Parameters
        ----------
        lots, access
            See `load`.

        Raises
        ------
        CacheError
            If the request has ended; nothing changes.
        """
        _refuse_ended(access)
        found = [self._index.parts(*lot) for lot in lots]
        missing = [
            Lot(lot.keys, *gap)
            for lot, parts in zip(lots, found, strict=True)
            for gap in gaps_of([each.span for each in parts], *lot.span)
        ]
        if self._offers is not None:
            missing = self._often_offered(lots, missing)
        present: list[Chunks] = []
        seen: list[Chunks] = []
        is_new = False
        for lot, parts in zip(lots, found, strict=True):
            ready = [each for each in parts if not each.extent.is_written]
            noted = [lot.span]
            if len(ready) < len(parts) or self._offers is not None:
                own = [each.span for each in missing if _is_in(each, lot)]
                noted = sorted([*own, *[each.span for each in ready]])
            new = [span for each in noted for span in access.show(Lot(lot.keys, *each))]
            is_new |= bool(new)
            own_present, own_seen = self._cut(ready, new)
            present += own_present
            seen += own_seen if new else ()
        num_missing = sum([lot.num_chunks for lot in missing])
        if num_missing:
            self.policy.store_missed(missing, access)
        if is_new:
            self.policy.accessed(seen, access)
        if present:
            self.policy.reused(present, access)
        hold = Hold([], NO_INTS)
        if not num_missing:
            return PreparedStore([], hold, NO_INTS)
        evicted_ids = NO_INTS
        num_needed = num_missing - self.num_free_chunks
        if num_needed > 0:
            evicted_ids = self._make_room(num_needed, present)
            if not len(evicted_ids):
                return None
        hold.chunk_ids = ids = self._take_places(num_missing)
        stored: list[Chunks] = []
        for lot in missing:
            extent = Extent(*lot, ids[: lot.num_chunks])
            ids = ids[lot.num_chunks :]
            extent.is_written = True
            extent.holds.append(hold)
            hold.extents.append(extent)
            self._index.add(extent)
            stored.append(Chunks(extent, lot.first))
        self._num_used += num_missing
        self._num_writing += num_missing
        self.policy.inserted(stored, access)
        return PreparedStore(missing, hold, evicted_ids)

    def _cut(
        self, parts: Sequence[Part], new: Sequence[Span]
    ) -> tuple[list[Chunks], list[Chunks]]:
        """Return parts of extents as extents of their own, and the new ones of them.

        They stand by position; none is new in part only.
        """
        present: list[Chunks] = []
        if not parts:
            return present, present
        bounds = [bound for span in new for bound in span]
        for part in reversed(parts):
            position, stop = part.span
            inner = {bound for bound in bounds if position < bound < stop}
            for start in sorted(inner, reverse=True):
                cut = part.between(start, stop)
                present.append(Chunks(self._index.cut(cut), start))
                stop = start
            cut = part.between(position, stop)
            present.append(Chunks(self._index.cut(cut), position))
        present.reverse()
        if len(new) == 1:
            first, stop = new[0]
            if first <= present[0].position and present[-1].span[1] <= stop:
                return present, present  # mostly
        seen = [
            each
            for each in present
            if any(first <= each.position < stop for first, stop in new)
        ]
        return present, seen

    def _often_offered(self, lots: Sequence[Lot], missing: Sequence[Lot]) -> list[Lot]:
        """Count the offers of lots; say of what is missing there were enough."""
        assert self._offers is not None
        self._offers.add([number for lot in lots for number in lot.numbers()])
        often: list[Lot] = []
        for lot in missing:
            for at, number in enumerate(lot.numbers(), lot.first):
                if self._offers[number] < self._threshold:
                    self.num_stores_skipped += 1
                elif often and often[-1].keys is lot.keys and often[-1].stop == at:
                    often[-1] = Lot(lot.keys, often[-1].first, at + 1)
                else:
                    often.append(Lot(lot.keys, at, at + 1))
        return often

    def _make_room(self, num_chunks: int, lot: list[Chunks]) -> Ints:
        """Evict so many chunks, none of a lot; return their places, if it can be."""
        hold = Hold([], NO_INTS)
        num_evictable = self.num_evictable_chunks
        for extent, _ in lot:
            if not extent.holds:
                num_evictable -= len(extent)
            extent.holds.append(hold)
        ids = NO_INTS
        if num_chunks <= num_evictable:
            ids = self.policy.evict(num_chunks, self._index)
        for extent, _ in lot:
            extent.holds.remove(hold)
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
        self._free_ids = free[:num_left]
        if not num_fresh:
            return left
        self._num_begun += num_fresh
        return np.concatenate([np.arange(begun, self._num_begun), left])

    def complete_store(self, hold: Hold) -> None:
        """Let chunks be found that a job has written.

        Raises
        ------
        CacheError
            If it does not write them.
        """
        if not self.holds(hold, is_written=True):
            raise CacheError("chunks are not being written; complete each store once")
        for extent in hold.extents:
            extent.is_written = False
            extent.holds.remove(hold)
        self._num_writing -= len(hold.chunk_ids)

    # -- requests -------------------------------------------------------------

    def finish(self, access: RequestAccess) -> None:
        """Settle the chunks that a request which ends has shown; once."""
        if not access.is_finished:
            access.is_finished = True
            if not self.policy.settles(access):
                shown: list[Chunks] = []
                for lot in access.lots:
                    shown += self._cut(self._index.parts(*lot), ())[0]
                self.policy.finished(shown, access)
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
        extents = self._index.extents()
        ids = column_of([self._free_ids, *[each.ids for each in extents]])
        require(
            np.array_equal(np.sort(ids), np.arange(self._num_begun))
            and len(ids) - len(self._free_ids) == self._num_used,
            f"tier: of {self._num_begun} places that were ever used {self._num_used} "
            f"are used and {len(self._free_ids)} were left, or one stands twice",
        )
        require(
            self._num_begun <= self.num_chunks,
            f"tier: {self._num_begun} places are used, there are {self.num_chunks}",
        )
        num_written = sum(len(each) for each in extents if each.is_written)
        num_held = sum(len(each) for each in extents if each.holds)
        require(
            num_written == self._num_writing
            and num_held - num_written == self._num_reading
            and all(len(each.holds) == 1 for each in extents if each.is_written)
            and all(each in hold.extents for each in extents for hold in each.holds),
            "tier: a chunk is read that is being written, or held by no job",
        )
        self.policy.check(extents)
        if self._offers is not None:
            self._offers.check()


def _refuse_ended(access: RequestAccess) -> None:
    if access.is_finished:
        raise CacheError("the request has ended; a tier sees it no more")


def _require_all(lot: Lot, parts: Sequence[Part]) -> None:
    """Refuse to load what is not there."""
    at = lot.first
    for part in parts:
        if part.position > at or part.extent.is_written:
            break
        at += part.stop - part.first
    if at < lot.stop:
        raise CacheError(
            f"chunk {at} of a prompt cannot be loaded: it is not there; look it up "
            f"first"
        )


def _is_in(part: Lot, lot: Lot) -> bool:
    return part.keys is lot.keys and lot.first <= part.first < lot.stop
