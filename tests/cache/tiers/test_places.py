"""The index of a tier's chunks: cells stay while they are held, and pages come back."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import KEY_ALIGNMENT
from cache.tiers import CPUTier, LookupResult, RequestAccess
from cache.tiers.places import ChunkIndex, as_ints

prompts = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=3),
    min_size=1,
    max_size=12,
)


def keys_of(runs: list[tuple[int, int]]) -> list[int]:
    """Return keys that count up, from a place of each run on, each of them once."""
    keys = [1000 * run + j for run, length in runs for j in range(length)]
    return list(dict.fromkeys(keys))


@given(prompts, st.integers(0, 999))
def test_cells_are_those_of_a_dictionary(prompts, seed) -> None:
    draw = Random(seed)
    index = ChunkIndex()
    known: dict[int, int] = {}
    held: list[tuple[list[int], int]] = []
    for number, runs in enumerate(prompts):
        keys = keys_of(runs)
        cells, pages = index.hold(as_ints(keys))
        assert index.places[cells].tolist() == [known.get(key, -1) for key in keys]
        held.append((keys, pages))
        for place, (key, cell) in enumerate(zip(keys, cells.tolist(), strict=True)):
            if draw.random() < 0.5:
                index.places[cell] = known[key] = 100 * number + place
            elif draw.random() < 0.7:
                index.places[cell] = -1
                known.pop(key, None)
        if draw.random() < 0.6:
            index.release(held.pop(draw.randrange(len(held)))[1])
        index.check()
    for runs in prompts:
        for key in keys_of(runs):
            assert index.find(key) == known.get(key, -1)


def test_pages_of_requests_that_ended_are_used_again() -> None:
    index = ChunkIndex()
    for start in range(0, 400 * KEY_ALIGNMENT, 4 * KEY_ALIGNMENT):
        _, pages = index.hold(np.arange(start, start + 4 * KEY_ALIGNMENT))
        index.release(pages)
        index.check()
    assert len(index.places) <= 16 * KEY_ALIGNMENT


def test_a_tier_forgets_no_chunk_whose_request_has_ended() -> None:
    tier = CPUTier(64)
    for number in range(50):
        access = RequestAccess()
        prepared = tier.prepare_store([10**6 * number], access)
        assert prepared is not None
        tier.complete_store(prepared.chunk_ids)
        tier.finish(access)
        tier.check()
    found = [tier.lookup(10**6 * number) for number in range(50)]
    assert set(found) == {LookupResult.HIT}
