"""The CPU tier on small cases, literally: places, recency, ghosts, thresholds."""

from __future__ import annotations

import pytest

from cache.errors import CacheConfigError, CacheError
from cache.tiers import (
    CPUTier,
    LookupResult,
    PreparedStore,
    RequestAccess,
    num_chunks_of,
)
from cache.tiers.places import Keys


def store(
    tier: CPUTier, keys: list[int], access: RequestAccess, first: int = 0
) -> PreparedStore | None:
    """Offer a lot that begins at a position of a request."""
    return tier.prepare_store(Keys.of(keys, first), access, first)


def stored(
    tier: CPUTier, keys: list[int], access: RequestAccess, first: int = 0
) -> None:
    """Offer a lot, and let all that it takes be written."""
    prepared = store(tier, keys, access, first)
    assert prepared is not None
    tier.complete_store(prepared.hold)


def columns(prepared: PreparedStore | None) -> list[list[int]] | None:
    """Return keys, places, and places that were left."""
    if prepared is None:
        return None
    ids, evicted = prepared.chunk_ids.tolist(), prepared.evicted_ids.tolist()
    return [prepared.hold.numbers(), ids, evicted]


def gone(tier: CPUTier, *keys: int) -> list[int]:
    return [key for key in keys if tier.lookup(key) is LookupResult.MISS]


def test_a_chunk_is_found_while_it_is_written_and_loaded_when_it_is_there() -> None:
    tier, access = CPUTier(4), RequestAccess()
    assert tier.lookup(7) is LookupResult.MISS
    first = store(tier, [7], access)
    second = store(tier, [8], access, first=1)
    assert columns(first) == [[7], [0], []]
    assert columns(second) == [[8], [1], []]
    assert tier.lookup(7) is LookupResult.HIT_PENDING
    assert tier.longest_prefix(Keys.of([7, 8, 9])) == (2, False)
    tier.complete_store(first.hold)
    assert tier.lookup(7) is LookupResult.HIT
    assert tier.longest_prefix(Keys.of([7, 9])) == (1, True)
    load = tier.prepare_load(Keys.of([7]), access)
    assert load.chunk_ids.tolist() == [0]
    assert (tier.num_used_chunks, tier.num_evictable_chunks) == (2, 0)
    tier.complete_load(load)
    assert (tier.num_evictable_chunks, tier.num_writing_chunks) == (1, 1)


def test_places_are_fresh_first_and_then_those_left_last() -> None:
    tier, first, second = CPUTier(3), RequestAccess(), RequestAccess()
    stored(tier, [1, 2], first)
    tier.finish(first)
    # One fresh place; the tail of the request makes room for the rest.
    prepared = store(tier, [11, 12], second)
    assert columns(prepared) == [[11, 12], [2, 1], [1]]
    tier.complete_store(prepared.hold)
    tier.finish(second)
    third = store(tier, [21, 22, 23], RequestAccess())
    assert columns(third) == [[21, 22, 23], [2, 1, 0], [0, 1, 2]]


def test_a_lot_without_room_is_refused_as_a_whole() -> None:
    tier, access = CPUTier(3), RequestAccess()
    stored(tier, [1, 2], access)
    assert store(tier, [1, 2, 3, 4], access) is None  # 1 and 2 are of the lot
    assert store(tier, [3, 4, 5, 6], access, first=2) is None
    assert gone(tier, 1, 2, 3, 4) == [3, 4]
    tier.prepare_load(Keys.of([1]), access)
    assert store(tier, [5, 6, 7], RequestAccess()) is None  # 1 is being read
    tier.check()


def test_a_tail_goes_before_its_head_while_the_request_lives() -> None:
    tier, early, late = CPUTier(4), RequestAccess(), RequestAccess()
    stored(tier, [1], early)
    stored(tier, [11], late)
    stored(tier, [2, 3], early, first=1)  # later than 11, but of the earlier request
    prepared = store(tier, [21, 22, 23], RequestAccess())
    assert prepared is not None
    assert gone(tier, 1, 2, 3, 11) == [1, 2, 3]
    assert prepared.evicted_ids.tolist() == [3, 2, 0]


def test_the_end_of_a_request_renews_all_that_it_has_shown() -> None:
    tier, early, late = CPUTier(4), RequestAccess(), RequestAccess()
    stored(tier, [1, 2], early)
    stored(tier, [11, 12], late)
    tier.finish(late)
    tier.finish(early)
    store(tier, [21, 22, 23], RequestAccess())
    assert gone(tier, 1, 2, 11, 12) == [2, 11, 12]


def test_loading_raises_a_chunk_to_its_reader_and_looking_up_does_not() -> None:
    tier, writer, reader = CPUTier(4), RequestAccess(), RequestAccess()
    stored(tier, [1, 2], writer)
    tier.finish(writer)
    other = RequestAccess()
    stored(tier, [11, 12], other)
    tier.lookup(2)
    tier.complete_load(tier.prepare_load(Keys.of([1]), reader))
    store(tier, [21, 22, 23], RequestAccess())
    assert gone(tier, 1, 2, 11, 12) == [2, 11, 12]


def test_ghosts_move_the_target_of_arc() -> None:
    tier = CPUTier(3, eviction_policy="arc")
    first, second = RequestAccess(), RequestAccess()
    stored(tier, [1, 2, 3], first)
    tier.finish(first)
    tier.complete_load(tier.prepare_load(Keys.of([1]), second))
    tier.finish(second)  # 1 has been used again
    assert list(tier.policy.sizes()) == [2, 1, 0, 0, 0]
    stored(tier, [4], RequestAccess())
    assert list(tier.policy.sizes()) == [2, 1, 1, 0, 0]
    assert gone(tier, 1, 2, 3) == [3]
    stored(tier, [3], RequestAccess())  # B1 remembers it
    assert list(tier.policy.sizes()) == [2, 1, 1, 0, 1]
    assert gone(tier, 1, 2, 4) == [2]


def test_what_was_used_again_goes_where_nothing_else_may() -> None:
    tier = CPUTier(2, eviction_policy="arc")
    first, second = RequestAccess(), RequestAccess()
    stored(tier, [1, 2], first)
    tier.finish(first)
    tier.complete_load(tier.prepare_load(Keys.of([1, 2]), second))
    tier.finish(second)
    stored(tier, [3], RequestAccess())
    assert list(tier.policy.sizes()) == [1, 1, 0, 1, 0]
    assert gone(tier, 1, 2) == [2]
    tier.check()


def test_a_chunk_is_stored_from_its_second_offer_on() -> None:
    tier = CPUTier(4, store_threshold=2)
    assert columns(store(tier, [1, 2], RequestAccess())) == [[], [], []]
    assert tier.num_stores_skipped == 2
    prepared = store(tier, [1, 3], RequestAccess())
    assert columns(prepared) == [[1], [0], []]
    assert tier.num_stores_skipped == 3


def test_offers_are_forgotten_but_not_those_of_the_lot_at_hand() -> None:
    tier = CPUTier(4, store_threshold=2, max_tracker_size=2)
    store(tier, [1, 2], RequestAccess())
    store(tier, [2, 3, 4], RequestAccess())  # 3 takes the place of 1; 4 has none
    assert columns(store(tier, [1], RequestAccess())) == [[], [], []]
    assert tier.num_stores_skipped == 2 + 2 + 1


def test_calls_that_do_not_fit_are_refused_and_change_nothing() -> None:
    tier, access = CPUTier(2), RequestAccess()
    stored(tier, [1], RequestAccess())
    read = tier.prepare_load(Keys.of([1]), access)
    tier.complete_load(read)
    written = store(tier, [2], access, first=1).hold
    for call in (
        lambda: tier.prepare_load(Keys.of([1, 2]), access),
        lambda: tier.complete_load(read),
        lambda: tier.complete_load(written),
        lambda: tier.complete_store(read),
    ):
        with pytest.raises(CacheError):
            call()
        tier.check()
        assert tier.lookup(2) is LookupResult.HIT_PENDING
    tier.complete_store(written)
    with pytest.raises(CacheError, match="complete each store once"):
        tier.complete_store(written)
    tier.finish(access)
    with pytest.raises(CacheError, match="the request has ended"):
        store(tier, [2], access)


def test_a_tier_without_room_or_with_an_unknown_policy_is_refused() -> None:
    with pytest.raises(CacheConfigError, match="room for one chunk"):
        CPUTier(0)
    with pytest.raises(CacheConfigError, match="next_use, keep_ttl, got 'fifo'"):
        CPUTier(1, eviction_policy="fifo")


@pytest.mark.parametrize(
    ("block_bytes", "blocks_per_chunk", "num_chunks"),
    [(2 << 20, 1, 512), (2 << 20, 4, 128), (4097, 1, 131072), (1, 1, 262144)],
)
def test_a_chunk_takes_whole_pages(
    block_bytes: int, blocks_per_chunk: int, num_chunks: int
) -> None:
    assert num_chunks_of(1 << 30, block_bytes, blocks_per_chunk) == num_chunks
