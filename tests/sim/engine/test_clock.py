"""Absolute times on the SimPy clock."""

from __future__ import annotations

from math import nextafter
from typing import TYPE_CHECKING, Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.clock import (
    ARRIVAL_PRIORITY,
    SCRAPE_PRIORITY,
    STEP_PRIORITY,
    At,
    Clock,
    LoneClock,
    next_multiple,
    step_priority,
)
from sim.engine.stretch import Stretch

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


@given(st.sampled_from([0.05, 0.1, 0.3, 15.0, 60.0]), st.integers(1, 10**6))
def test_no_multiple_is_left_out(interval_s: float, number: int) -> None:
    """Not where a time and a multiple differ in the last bit only."""
    time_s = number * interval_s
    assert next_multiple(interval_s, nextafter(time_s, 0.0)) == time_s
    assert next_multiple(interval_s, time_s) == (number + 1) * interval_s
    assert next_multiple(interval_s, 0.0) == interval_s


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


@pytest.mark.parametrize("kind", [Clock, LoneClock])
def test_time_begins_as_the_float_that_it_is_later(kind: type[Clock]) -> None:
    """An engine absent from the start writes this time: an int has other JSON bytes."""
    assert type(kind().now) is float


@pytest.mark.parametrize("time_s", [-1.0, float("nan")])
def test_the_clock_never_goes_back(time_s: float) -> None:
    with pytest.raises(ValueError, match="the clock never goes back"):
        At(simpy.Environment(), time_s, STEP_PRIORITY)


LOOKS = st.tuples(
    st.integers(0, 40),
    st.sampled_from([ARRIVAL_PRIORITY, SCRAPE_PRIORITY]),
    st.booleans(),
)


class Stretches:
    """Takes stretches of four steps of two seconds, and waits when it is cut twice."""

    def __init__(self, env: Clock) -> None:
        self.env = env
        self.waits: Any = None
        self.seen: list[tuple[float, float, int]] = []
        env.process(self._run())

    def look(self, *, cuts: bool) -> None:
        self.seen.append((self.env.now, self.env.turn, -1))
        if cuts and self.waits is not None:
            self.waits.succeed()
            self.waits = None

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env = self.env
        while env.now < 60:
            ends_s = [env.now + 2.0 * i for i in range(1, 5)]
            stretch = self.waits = Stretch(env, ends_s, env.now, step_priority(0))
            yield stretch.end
            self.seen.append((env.now, env.turn, len(stretch.ends_s)))
            if len(stretch.ends_s) == 2:
                self.waits, event = env.wait(env.now + 3.0)
                yield event
                self.seen.append((env.now, env.turn, 0))


@given(st.lists(LOOKS, max_size=12))
def test_a_clock_of_one_process_is_a_clock(looks: list[tuple[int, int, bool]]) -> None:
    looks.sort()
    shared, lone = Stretches(Clock()), Stretches(LoneClock())

    def look_on() -> Generator[simpy.Event, Any, None]:
        for time_s, priority, cuts in looks:
            yield At(shared.env, float(time_s), priority)
            shared.look(cuts=cuts)

    shared.env.process(look_on())
    shared.env.run()
    assert isinstance(lone.env, LoneClock)
    for time_s, priority, cuts in looks:
        lone.env.run_to(float(time_s), priority)
        lone.look(cuts=cuts)
    lone.env.run_out()
    assert lone.seen == shared.seen
