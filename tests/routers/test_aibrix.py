"""Our router of AIBrix's kind: its table beside lists, its choice case by case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sim.fleet.routers.aibrix_prefix import (
    FORGOTTEN_AFTER_S,
    AIBrixPrefix,
    BlockTable,
)
from tests.sim.fleet.test_routers import request

MOST = 5
HASHES = st.lists(st.integers(0, 7), max_size=7, unique=True)


class Table(RuleBasedStateMachine):
    """The table beside a list of blocks, the latest last, that is swept each second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(MOST)
        self.naive: list[tuple[int, set[int], float]] = []
        self.now_s = 0.0

    @rule(hashes=HASHES, place=st.integers(0, 2))
    def add(self, hashes: list[int], place: int) -> None:
        self.table.add(hashes, place, self.now_s)
        for each in hashes:
            known = [places for own, places, _ in self.naive if own == each]
            self.naive = [row for row in self.naive if row[0] != each]
            places = known[0] | {place} if known else {place}
            self.naive.append((each, places, self.now_s))
            self.naive = self.naive[-MOST:]

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

    @rule(hashes=HASHES, among=st.sets(st.integers(0, 2), min_size=1))
    def ask(self, hashes: list[int], among: set[int]) -> None:
        expected: dict[int, int] = {}
        for place in among:
            num_known = 0
            for each in hashes:
                if not any(each == own and place in its for own, its, _ in self.naive):
                    break
                num_known += 1
            if num_known:
                expected[place] = num_known * 100 // len(hashes)
        assert self.table.percents(hashes, among) == expected

    @invariant()
    def is_sound(self) -> None:
        self.table.check()
        held = list(self.table._places.items())
        assert held == [(each, places) for each, places, _ in self.naive]


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
        each.table.add([1, 2], 0, 0.0)
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
