"""Our router of AIBrix's kind: its table beside lists, its choice case by case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache.prompt_tree import PromptTree
from sim.fleet.routers.aibrix_prefix import (
    BLOCK_TOKENS,
    FORGOTTEN_AFTER_S,
    AIBrixPrefix,
    BlockTable,
)
from sim.fleet.routers.block_index import Run, prompt_runs
from tests.sim.fleet.test_routers import prompt_hashes, request

PROMPTS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4
)


class Table(RuleBasedStateMachine):
    """The table beside a list of blocks, the latest last, that is swept each second."""

    @initialize(most=st.integers(1, 30), in_tree=st.booleans())
    def begin(self, most: int, *, in_tree: bool) -> None:
        self.most, self.tree = most, PromptTree() if in_tree else None
        self.table = BlockTable(most)
        self.naive: list[tuple[int, set[int], float]] = []
        self.now_s = 0.0

    def prompt(self, segments: list[tuple[int, int]]) -> tuple[list[Run], list[int]]:
        made = request(0, *segments, tree=self.tree)
        return prompt_runs(made, BLOCK_TOKENS), prompt_hashes(made, BLOCK_TOKENS)

    @rule(segments=PROMPTS, place=st.integers(0, 2))
    def add(self, segments: list[tuple[int, int]], place: int) -> None:
        runs, hashes = self.prompt(segments)
        self.table.add(runs, place, self.now_s)
        for each in hashes:
            known = [places for own, places, _ in self.naive if own == each]
            self.naive = [row for row in self.naive if row[0] != each]
            places = known[0] | {place} if known else {place}
            self.naive.append((each, places, self.now_s))
            self.naive = self.naive[-self.most :]

    @rule(seconds=st.integers(1, 3), last=st.sampled_from([0.0, 0.25, 0.5]))
    def wait(self, seconds: int, last: float) -> None:
        """Let so many sweeps happen, from one to the next a second."""
        end_s = self.now_s + seconds * 500 + last
        for sweep_s in range(int(self.now_s) + 1, int(end_s) + 1):
            self.naive = [
                row for row in self.naive if sweep_s - row[2] <= FORGOTTEN_AFTER_S
            ]
        self.now_s = end_s
        self.table.forget(end_s)

    @rule(place=st.integers(0, 2))
    def forget_engine(self, place: int) -> None:
        self.table.forget_engine(place)
        left = [(each, places - {place}, sent) for each, places, sent in self.naive]
        self.naive = [row for row in left if row[1]]

    @rule(segments=PROMPTS, among=st.sets(st.integers(0, 2), min_size=1))
    def ask(self, segments: list[tuple[int, int]], among: set[int]) -> None:
        runs, hashes = self.prompt(segments)
        expected: dict[int, int] = {}
        for place in among:
            num_known = 0
            for each in hashes:
                if not any(each == own and place in its for own, its, _ in self.naive):
                    break
                num_known += 1
            if num_known:
                expected[place] = num_known * 100 // len(hashes)
        assert self.table.percents(runs, among) == expected

    @invariant()
    def is_sound(self) -> None:
        self.table.check()
        held = [
            (span.places, span.sent_s)
            for span in self.table._by_age
            for _ in range(span.start, span.stop)
        ]
        assert held == [(places, sent_s) for _, places, sent_s in self.naive]


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=50, stateful_step_count=20)


def router(loads: list[int], **more: Any) -> AIBrixPrefix:
    env: Any = SimpleNamespace(now=0.0)
    made = AIBrixPrefix(len(loads), np.random.default_rng(0), env, **more)
    made.num_in_flight = loads
    return made


@pytest.mark.parametrize(
    ("loads", "percents", "places"),
    [
        ([0, 0, 0], {0: 100, 1: 50}, [0]),  # the most known
        ([2, 1, 1], {0: 50, 1: 50, 2: 50}, [1, 2]),  # of equals, the fewest in flight
        ([9, 0, 0], {0: 100, 1: 40}, [1]),  # 9 > 3 + 5.2
        ([8, 0, 4], {0: 100, 1: 40}, [0]),  # 8 = 4 + 4
        ([9, 0, 0], {0: 100}, []),  # no other: load decides
        ([3], {0: 100}, []),  # one has no deviation
    ],
)
def test_prefix_then_load(
    loads: list[int], percents: dict[int, int], places: list[int]
) -> None:
    assert router(loads).candidates(percents) == places


def test_out_of_balance_only_the_least_loaded_are_looked_at() -> None:
    balanced, unbalanced = router([8, 0]), router([9, 0])
    for each in (balanced, unbalanced):
        each.table.add([(1, 2)], 0, 0.0)
    assert balanced._looked_at() == [0, 1]
    assert unbalanced._looked_at() == [1]
    assert router([9, 0], imbalance_abs_count=9)._looked_at() == [0, 1]


def test_prompts_come_back_until_they_are_forgotten() -> None:
    env: Any = SimpleNamespace(now=0.0)
    made = AIBrixPrefix(4, np.random.default_rng(0), env)
    first = made.choose(request(0, (1, 64)))
    made.ended(request(0), first)
    for number in range(1, 9):
        assert made.choose(request(number, (1, 64), (number + 9, 8))) == first
        made.ended(request(number), first)
    env.now = FORGOTTEN_AFTER_S + 1.5
    places = set()
    for number in range(20, 60):
        env.now += FORGOTTEN_AFTER_S + 2.0
        place = made.choose(request(number, (1, 64)))
        made.ended(request(number), place)
        places.add(place)
    assert places == {0, 1, 2, 3}
