"""Random fleets in which much happens at one instant: every way gives the same."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.fleet.engines import Engines
from sim.simulation.fleet import Fleet
from sim.simulation.run import Simulation
from tests.sim.fleet.test_run import (
    AT_ONE_INSTANT,
    DRAFTS,
    TIGHT,
    data_of,
    sorted_tables,
)
from tests.sim.fleet.test_tiers import DISK, POOL

STEP_S = 1 / 128
ROUTERS = ("round_robin", "least_requests", "vllm_dp", "llm_d", "aibrix_prefix")
WAYS = ("stepwise", "checked", "listeners", "one clock")


class Listener:
    """Hears of steps, which are then taken one by one."""

    def scheduled(self, *step: object) -> None: ...

    def ended(self, *step: object) -> None: ...


def engine_of(kind: str, draw: Random) -> dict[str, Any]:
    engine = TIGHT | {"num_gpu_blocks_override": draw.choice([60, 120, 400])}
    if kind == "drafts":
        return engine | DRAFTS
    engine |= {"async_scheduling": draw.choice([False, True])}
    if kind == "tiers":
        link = {"load_bytes_per_s": 2e10, "store_bytes_per_s": 2e10}
        engine |= {"enable_prefix_caching": True, "kv_offloading_size": 0.05}
        engine["kv_offloading_link"] = link
        if draw.random() < 0.4:
            extra = {
                "block_size": 64,
                "spec_name": "TieringOffloadingSpec",
                "secondary_tiers": [draw.choice([POOL, DISK])],
            }
            engine["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
    return engine


def data_at_one_instant(kind: str, draw: Random) -> dict[str, Any]:
    router = draw.choice(ROUTERS)
    pools = [{"name": "main", "replicas": draw.choice([2, 3, 5])}]
    fleet: dict[str, Any] = {"pools": pools, "router": {"kind": router}}
    if router != "vllm_dp" and draw.random() < 0.4:
        at_s = [round(draw.uniform(0.1, 1.0) / STEP_S) * STEP_S for _ in range(2)]
        fleet["events"] = [
            {"time_s": min(at_s), "kind": "die", "engine": 0},
            {"time_s": max(at_s) + STEP_S, "kind": "start", "engine": 0},
        ]
    data = data_of(engine_of(kind, draw), fleet, 60, 128.0)
    data["seed"] = draw.randrange(1000)
    if draw.random() < 0.5:
        data["workload"] = deepcopy(AT_ONE_INSTANT)
    elif draw.random() < 0.5:
        data["workload"]["synthetic"]["arrivals"] = {"kind": "constant", "rate": 128.0}
    data["cost"] = {"kind": "constant", "step_s": STEP_S}
    if kind == "drafts":
        data["cost"]["draft_step_s"] = 0.0
        data["workload"]["acceptance"] = {"kind": "constant", "rate": 0.7}
    return data


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["plain", "drafts", "tiers"])
def test_all_ways_are_the_same(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(data_at_one_instant(kind, Random(f"{kind} {seed}")))
    fast = sorted_tables(Simulation(config).run())
    for way in WAYS:
        if way == "one clock":
            monkeypatch.setattr(Fleet, "dealt", lambda *_: None)
        simulation = Simulation(config, stepwise=way == "stepwise")
        if way == "listeners":
            assert isinstance(simulation.engine, Engines)
            for engine in simulation.engine.engines:
                engine.listeners.append(Listener())
        other = sorted_tables(simulation.run(check_every=way == "checked"))
        for name, table in fast.items():
            assert table.equals(other[name]), (way, name)
