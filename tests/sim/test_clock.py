"""Absolute times on the SimPy clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.clock import ARRIVAL_PRIORITY, STEP_PRIORITY, At

if TYPE_CHECKING:
    from collections.abc import Generator

times = st.floats(0, 1e6, allow_nan=False)


@given(times, times)
def test_times_are_met_to_the_last_bit(first: float, second: float) -> None:
    first, second = sorted((first, second))
    env = simpy.Environment()
    log: list[float] = []

    def process() -> Generator[simpy.Event, Any, None]:
        for time_s in (first, second):
            yield At(env, time_s, STEP_PRIORITY)
            log.append(env.now)

    env.process(process())
    env.run()
    assert log == [first, second]


def test_an_arrival_comes_before_a_step_end_of_the_same_instant() -> None:
    env = simpy.Environment()
    log: list[str] = []

    def process(name: str, priority: int) -> Generator[simpy.Event, Any, None]:
        yield At(env, 1.0, priority)
        log.append(name)

    env.process(process("step", STEP_PRIORITY))
    env.process(process("arrival", ARRIVAL_PRIORITY))
    env.run()
    assert log == ["arrival", "step"]


@pytest.mark.parametrize("time_s", [-1.0, float("nan")])
def test_the_clock_never_goes_back(time_s: float) -> None:
    with pytest.raises(ValueError, match="the clock never goes back"):
        At(simpy.Environment(), time_s, STEP_PRIORITY)
