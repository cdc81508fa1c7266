"""Random configurations: the clock and the oracle are equal, to the last bit."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import pytest

from sim.costs.roofline.cascade_rule import CascadeRule
from tests.identity.compare import (
    ONLY_THE_END,
    Comparison,
    assert_equal_paths,
    of_groups,
    of_one_engine,
    one_by_one,
)
from tests.identity.random_configs import Case, draw_case, draw_plain_case
from tests.identity.random_fleets import draw_fleet_case, draw_pair_case
from tests.identity.random_groups import draw_group_case
from tests.identity.random_prefixes import draw_prefix_case
from tests.identity.random_tiers import draw_group_tier_case, draw_tier_case
from tests.identity.regimes import regimes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_CASES = 200
GROUP = 20
NUM_QUICK_CASES = 20
GROUPS = [
    pytest.param(
        range(first, first + GROUP),
        id=f"{first}-{first + GROUP - 1}",
        marks=[pytest.mark.slow] if first >= NUM_QUICK_CASES else [],
    )
    for first in range(0, NUM_CASES, GROUP)
]
REGIMES = (
    "preemptions",
    "hits",
    "evictions",
    "shared blocks",
    "blocked heads",
    "partial prefills",
    "five quiet steps",
    "arrival at a step's end",
    "idle engine",
)


def checked(seed: int) -> Comparison:
    case = draw_case(seed)
    compared = assert_equal_paths(*case)
    chosen = compared.chosen
    assert chosen.error or (chosen.path == "fast") == (not chosen.path_reason), seed
    return compared


@cache
def regimes_of_seed(seed: int) -> frozenset[str]:
    return frozenset(regimes_of(checked(seed)))


@pytest.mark.parametrize("seeds", GROUPS)
def test_both_paths_are_equal(seeds: range) -> None:
    for seed in seeds:
        regimes_of_seed(seed)


@pytest.mark.parametrize("seeds", GROUPS)
def test_where_blocks_are_counted_both_paths_are_equal(seeds: range) -> None:
    compared = [assert_equal_paths(*draw_plain_case(seed)) for seed in seeds]
    assert all(
        each.is_counted or each.chosen.error or each.chosen.path_reason
        for each in compared
    )
    assert sum(each.is_counted for each in compared) > 0.75 * len(seeds)
    assert sum("preemptions" in regimes_of(each) for each in compared) > 5


@pytest.mark.parametrize("seed", [2202, 6124])
def test_steps_ahead_of_a_prompt_beyond_the_length_of_the_model(seed: int) -> None:
    """It is let in without the admission check, and has blocks up to that length."""
    engine = draw_case(seed).config.engine
    assert engine.async_scheduling
    assert not engine.admission_check
    assert not checked(seed).reference.error


@pytest.mark.slow  # runs all cases once more in a process of its own
def test_the_cases_reach_every_regime() -> None:
    counts = Counter(
        name for seed in range(NUM_CASES) for name in regimes_of_seed(seed)
    )
    assert counts["error"] <= 0.05 * NUM_CASES
    for name in REGIMES:
        assert counts[name] >= 0.1 * NUM_CASES, (name, counts)
    for name in ("rejected", "length capped", "samples", "follow-ups"):
        assert counts[name], (name, counts)
    assert counts["fast"] >= 0.9 * NUM_CASES, counts


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(12), id="0-11"),
        pytest.param(range(12, 90), id="12-89", marks=pytest.mark.slow),
    ],
)
def test_decodes_of_groups_may_be_taken_together(seeds: range) -> None:
    reached = Counter(
        name
        for seed in seeds
        for name in regimes_of(assert_equal_paths(*draw_group_case(seed), of_groups))
    )
    assert reached["fast"] >= 0.75 * len(seeds)
    for name in ("preemptions", "hits", "blocked heads", "five quiet steps"):
        assert reached[name] >= 3, (name, reached)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(12), id="0-11"),
        pytest.param(range(12, 90), id="12-89", marks=pytest.mark.slow),
    ],
)
def test_a_tier_may_stand_behind_decodes_that_are_taken_together(seeds: range) -> None:
    reached: Counter[str] = Counter()
    for seed in seeds:
        case = draw_tier_case(seed)
        compared = assert_equal_paths(*case, one_by_one)
        happened = regimes_of(compared)
        reached.update(happened)
        if case.config.engine.schedules_ahead and "fast" in happened:
            reached["ahead"] += 1
    assert reached["fast"] >= 0.9 * len(seeds)
    for name in ("preemptions", "hits", "loads", "five quiet steps", "ahead"):
        assert reached[name] >= 3, (name, reached)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(16), id="0-15"),
        pytest.param(range(16, 200), id="16-199", marks=pytest.mark.slow),
    ],
)
def test_steps_may_read_a_prefix_once(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both paths find the same prefix, and price it alike."""
    read: Counter[bool] = Counter()
    is_used = CascadeRule.is_used

    def note(self: CascadeRule, *batch: int, has_chunks: bool) -> bool:
        used = is_used(self, *batch, has_chunks=has_chunks)
        read[has_chunks] += used
        return used

    monkeypatch.setattr(CascadeRule, "is_used", note)
    reached: Counter[str] = Counter()
    for seed in seeds:
        case, before = draw_prefix_case(seed), read.total()
        reached.update(regimes_of(assert_equal_paths(*case)))
        if read.total() > before:
            reached["ahead" if case.config.engine.schedules_ahead else "alone"] += 1
    assert reached["fast"] >= 0.9 * len(seeds)
    assert min(read[True], read[False]) > 5 * len(seeds), read
    for name in ("preemptions", "blocked heads", "five quiet steps", "ahead", "alone"):
        assert reached[name] >= 3, (name, reached)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(6), id="0-5"),
        pytest.param(range(6, 90), id="6-89", marks=pytest.mark.slow),
    ],
)
def test_engines_behind_a_router_may_run_as_far_as_it_looks(seeds: range) -> None:
    reached: Counter[str] = Counter()
    for seed in seeds:
        compared = assert_equal_paths(*draw_fleet_case(seed), one_by_one)
        reached.update(regimes_of(compared))
    assert reached["fast"] >= 0.8 * len(seeds)
    for name in ("preemptions", "five quiet steps"):
        assert reached[name] >= 0.2 * len(seeds), (name, reached)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param([0, 1, 6, 8], id="quick"),
        pytest.param(range(90), id="0-89", marks=pytest.mark.slow),
    ],
)
def test_prefillers_and_decoders_may_run_as_far_as_others_let_them(
    seeds: Sequence[int],
) -> None:
    reached: Counter[str] = Counter()
    for seed in seeds:
        compared = assert_equal_paths(*draw_pair_case(seed), of_groups)
        reached.update(regimes_of(compared))
    for name in ("fast", "five quiet steps"):
        assert reached[name] >= 0.4 * len(seeds), (name, reached)


def test_steps_that_end_together_end_behind_those_of_one_engine() -> None:
    """Where prompts of ranks that divide experts end as a decoder's step does."""
    assert_equal_paths(*draw_pair_case(64), of_groups)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param([*range(4), 17, 92, 446, 820], id="quick"),
        pytest.param(range(4, 90), id="4-89", marks=pytest.mark.slow),
    ],
)
def test_a_tier_may_stand_behind_several_groups(seeds: Sequence[int]) -> None:
    """On the last four of the quick ones usage once differed where requests ended."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        compared = assert_equal_paths(*draw_group_tier_case(seed), of_groups)
        reached.update(regimes_of(compared))
        reached[compared.chosen.path] += 1
    for name in ("loads", "hits", "fast"):
        assert reached[name] >= 2, (name, reached)


@pytest.mark.parametrize("seed", [850, 139, 143, 364, 33])
def test_rare_meetings_of_a_tier_and_steps_ahead(seed: int) -> None:
    """The paths once differed on each of these seeds.

    A client hears of a failed load at once; an engine that waits looks when it would
    have, whatever is rejected meanwhile; an output that was there before ends a call in
    no time; what is written behind the host is followed by each step.
    """
    assert_equal_paths(*draw_tier_case(seed), one_by_one)


@pytest.mark.parametrize(
    "draw",
    [
        draw_case,
        draw_group_case,
        draw_tier_case,
        pytest.param(draw_group_tier_case, marks=pytest.mark.slow),
        pytest.param(draw_prefix_case, marks=pytest.mark.slow),
    ],
)
def test_a_fleet_of_one_is_the_engine(draw: Callable[[int], Case]) -> None:
    for seed in (1064, 1187, *range(8)):  # loads of the first two fail
        config, _ = draw(seed)
        assert_equal_paths(config, ONLY_THE_END, of_one_engine)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 200))
def test_many_more(first: int) -> None:
    for seed in range(first, first + 200):
        checked(seed)
