"""Whole runs of the loop, requests per second, and how they compare.

Trace reading, result tables and figures are not counted. Paths of a regime take turns,
round by round, so that a slow minute of the machine meets all of them alike; ratios are
medians over rounds. The tables in README.md beside this file say what was seen.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from tests.bench.loops import (
    REGIMES,
    Outcome,
    Seconds,
    make_loop,
    medians,
    timed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_benchmark.fixture import BenchmarkFixture

    from sim.config.tables import RunConfig

NUM_ROUNDS = 5


class Turns:
    """The rounds of a regime: other paths in `prepare`, the fast one in `run`."""

    def __init__(self, config: RunConfig, others: tuple[str, ...]) -> None:
        self.config = config
        self.others = others
        self.seconds: dict[str, list[Seconds]] = defaultdict(list)
        self.outcomes: dict[str, Outcome] = {}

    def prepare(self) -> tuple[tuple[Callable[[], object]], dict[str, Any]]:
        for path in self.others:
            self.run_other(path)
        self.loop = make_loop(self.config, "fast")
        return (self.loop.run,), {}

    def run_other(self, path: str) -> None:
        loop = make_loop(self.config, path)
        self.seconds[path].append(timed(loop.run))
        self.outcomes[path] = loop.outcome()

    def run(self, loop: Callable[[], object]) -> None:
        self.seconds["fast"].append(timed(loop))

    def figures(self) -> dict[str, float]:
        """Return requests/s of each path and how many times faster the fast one is."""
        num_requests = self.outcomes["fast"].num_requests
        figures: dict[str, float] = {}
        for path, rounds in self.seconds.items():
            middle = medians(rounds)
            figures[f"{path} requests/s"] = num_requests / middle.cpu
            figures[f"{path} requests/s, wall"] = num_requests / middle.wall
            if path != "fast":
                figures[f"fast / {path}"] = median(
                    slow.cpu / fast.cpu
                    for slow, fast in zip(rounds, self.seconds["fast"], strict=True)
                )
        return figures


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.benchmark(group="whole run")
def test_loop(benchmark: BenchmarkFixture, regime: str) -> None:
    _, _, _, num_requests, paths = REGIMES[regime]
    turns = Turns(REGIMES[regime].config(), tuple(paths[1:]))
    benchmark.pedantic(turns.run, setup=turns.prepare, rounds=NUM_ROUNDS)
    turns.outcomes["fast"] = turns.loop.outcome()
    alike = turns.outcomes.copy()
    if turns.config.engine.enable_prefix_caching:
        alike.pop("plain", None)
    assert set(alike.values()) == {turns.outcomes["fast"]}
    assert turns.outcomes["fast"].num_requests == num_requests
    figures = turns.figures()
    benchmark.extra_info |= figures | turns.outcomes["fast"]._asdict()
    ratios = [f"{name}: {figures[name]:.1f}" for name in figures if "/ " in name]
    print(f"\n{regime}: {figures['fast requests/s']:,.0f} requests/s", *ratios)
