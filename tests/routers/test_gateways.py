"""sglang-router and SMG, their own servers before fake workers, beside our routers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.fleet.routers.counting import PowerOfTwo, RoundRobin
from sim.fleet.routers.sglang_cache_aware import SGLangCacheAware
from tests.routers.gateways import Came, Ended, Gateway, Traffic
from tests.sim.fleet.test_routers import request

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PACKAGES = {"sglang_router": "sglang-router==0.3.2", "smg": "smg==1.13.0"}
TRAFFIC = [
    (Traffic(1, 300, 4, 0.2, 40), 4),
    (Traffic(2, 300, 3, 0.8, 30), 2),
    (Traffic(3, 400, 4, 0.8, 60), 64),
    (Traffic(4, 600, 8, 0.7, 100), 64),
]


def decisions(
    package: str, policy: str, traffic: Traffic, directory: Path, *options: str
) -> list[Came | Ended]:
    pytest.importorskip(
        f"{package}.launch_router", reason=f"pip install {PACKAGES[package]}"
    )
    gateway = Gateway(package, policy, options, directory / "log")
    return asyncio.run(gateway.decisions(traffic))


@pytest.mark.parametrize("package", PACKAGES)
def test_choices_by_prefix_and_load_are_those_of_the_real_server(
    package: str, tmp_path: Path
) -> None:
    num_by: Counter[str] = Counter()
    for traffic, threshold in TRAFFIC:
        options = ["--balance-abs-threshold", str(threshold)]
        ours = SGLangCacheAware(
            traffic.num_workers,
            np.random.default_rng(0),
            spill_gate=package == "smg",
            balance_abs_threshold=threshold,
        )
        for each in decisions(package, "cache_aware", traffic, tmp_path, *options):
            if isinstance(each, Ended):
                ours.num_in_flight[each.place] -= 1
                continue
            pieces = tuple((ord(char), 0, 1) for char in each.text)
            num_known, places = ours.tree.match(pieces)
            candidates = ours.candidates(pieces)
            assert each.place in candidates, (ours.num_in_flight, places, each)
            if num_known / len(pieces) <= ours.cache_threshold:
                num_by["unknown"] += 1
            elif each.place in places:
                num_by["known"] += 1
            else:
                num_by["known to a busy one"] += 1
            ours.tree.insert(pieces, each.place)
            ours.num_in_flight[each.place] += 1
    assert num_by.total() == 1600
    assert all(num_by[kind] > 30 for kind in num_by), num_by
    assert len(num_by) == 3


def test_one_after_the_other_as_the_real_server(tmp_path: Path) -> None:
    traffic = Traffic(5, 1000, 5, 0.5, 20)
    ours = RoundRobin(traffic.num_workers)
    theirs = decisions("sglang_router", "round_robin", traffic, tmp_path)
    chosen = [each.place for each in theirs if isinstance(each, Came)]
    places = [ours.choose(request(number)) for number in range(len(chosen))]
    order = dict(zip(places[:5], chosen[:5], strict=True))
    assert [order[place] for place in places] == chosen


@pytest.mark.parametrize("metric", ["expected_wait", "requests"])
def test_the_less_loaded_of_two_as_the_real_server(metric: str, tmp_path: Path) -> None:
    """Of three the most loaded never, the least loaded twice in three."""
    traffic = Traffic(6, 1000, 3, 0.5, 40)
    ours = PowerOfTwo(3, np.random.default_rng(0))
    loads, num_least, num_clear = [0, 0, 0], [0, 0], 0
    options = ["--power-of-two-load-metric", metric]
    for each in decisions("smg", "power_of_two", traffic, tmp_path, *options):
        if isinstance(each, Ended):
            loads[each.place] -= 1
            continue
        if len({*loads}) == 3:
            ours.num_in_flight = [*loads]
            num_clear += 1
            for index, place in enumerate((each.place, ours.choose(request()))):
                assert loads[place] < max(loads)
                num_least[index] += loads[place] == min(loads)
        loads[each.place] += 1
    assert num_clear > 200
    shares = np.asarray(num_least) / num_clear
    assert np.all(np.abs(shares - 2 / 3) < 4 * np.sqrt(2 / 9 / num_clear)), shares
