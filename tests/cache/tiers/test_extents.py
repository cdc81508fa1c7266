"""The index of a tier's extents: each chunk is found, however they were cut."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cache.tiers import CPUTier, LookupResult, RequestAccess
from cache.tiers.extents import Extent, ExtentIndex, Part
from cache.tiers.places import Keys, Spans, as_ints, gaps_of

# Runs by number, each of a length that a prompt may end before.
prompts = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=12
)


def keys_of(branch: int, length: int) -> Keys:
    """Return chunks of runs that chain: what is before the branch all prompts share."""
    runs, starts = [], [0]
    for number in range(100):
        if starts[-1] >= length:
            break
        before = runs[-1] if runs else 1
        parts = number >= branch
        runs.append(10**6 * hash((before, branch if parts else 0)))
        starts.append(min(starts[-1] + 1 + (7 * number + parts) % 9, length))
    return Keys(runs, starts)


@given(prompts, st.integers(0, 999))
def test_parts_are_those_of_a_dictionary(prompts, seed) -> None:
    draw = Random(seed)
    index = ExtentIndex()
    known: dict[int, int] = {}
    for number, (branch, length) in enumerate(prompts):
        keys = keys_of(branch, length)
        numbers = keys.numbers(0, length)
        first = draw.randrange(length)
        stop = draw.randint(first + 1, length)
        assert keys.numbers(first, stop) == numbers[first:stop]
        found, spans = {}, []
        for part in index.parts(keys, first, stop):
            spans.append(part.span)
            at = part.first - part.extent.first
            ids = part.extent.ids[at : part.stop - part.extent.first].tolist()
            found |= dict(zip(range(*part.span), ids, strict=True))
        assert found == {
            at: known[numbers[at]] for at in range(first, stop) if numbers[at] in known
        }
        for start, end in gaps_of(spans, first, stop):
            ids = [100 * number + at for at in range(start, end)]
            index.add(Extent(keys, start, end, as_ints(ids)))
            known |= zip(numbers[start:end], ids, strict=True)
        for extent in index.extents():
            if draw.random() < 0.3:
                at = draw.randint(extent.first, extent.stop - 1)
                part = Part(0, extent, at, draw.randint(at + 1, extent.stop))
                cut = index.cut(part)
                if draw.random() < 0.5:
                    gone = index.take_out(cut, draw.randrange(cut.first, cut.stop))
                    for key in gone.numbers():
                        del known[key]
        index.check()
    for branch, length in prompts:
        keys = keys_of(branch, length)
        for run, start, end in zip(
            keys.runs, keys.starts, keys.starts[1:], strict=False
        ):
            for at in range(end - start):
                there = index.find(run, at)
                place = None if there is None else _place(*there)
                assert place == known.get(run + at)


def _place(extent: Extent, at: int) -> int:
    return int(extent.ids[at - extent.first])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_spans_are_those_of_a_set(spans: list[tuple[int, int]]) -> None:
    ours, seen = Spans(), set()
    for first, stop in spans:
        new = [at for span in ours.add(first, stop) for at in range(*span)]
        assert new == [at for at in range(first, stop) if at not in seen]
        seen |= {*range(first, stop)}
        assert {at for span in ours for at in range(*span)} == seen
        assert all(a[1] < b[0] for a, b in pairwise(ours.spans))


def test_a_tier_forgets_no_chunk_whose_request_has_ended() -> None:
    tier = CPUTier(64)
    for number in range(50):
        access = RequestAccess()
        prepared = tier.prepare_store(Keys.of([10**6 * number]), access)
        assert prepared is not None
        tier.complete_store(prepared.hold)
        tier.finish(access)
        tier.check()
    found = [tier.lookup(10**6 * number) for number in range(50)]
    assert set(found) == {LookupResult.HIT}
