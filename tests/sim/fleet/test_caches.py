"""Routers of a fleet that know what engines cache."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import parse_config
from sim.fleet.lookahead import AtArrivals, BetweenScrapes
from sim.simulation.run import Simulation
from tests.routers.test_dynamo import trace
from tests.sim.fleet.test_run import SESSIONS, TIGHT, data_of, sorted_tables

if TYPE_CHECKING:
    from pathlib import Path

WARMEST = '''
class Warmest:
    """The engine that has most of a prompt, then the one after the latest."""

    def __init__(self, num_engines, cached_blocks):
        self.num_engines, self.cached_blocks, self.turn = num_engines, cached_blocks, 0

    def choose(self, request):
        cached = self.cached_blocks(request)
        self.turn += 1
        places = [(self.turn + i) % self.num_engines for i in range(self.num_engines)]
        return max(places, key=cached.__getitem__)

    def ended(self, request, place):
        pass
'''


EMPTIEST = '''
class Emptiest:
    """The engine whose pool is used least, as it is when a request comes."""

    looks_at_arrivals_only = True

    def __init__(self, num_engines, loads):
        self.loads = loads

    def choose(self, request):
        usage = [load.kv_cache_usage for load in self.loads()]
        return usage.index(min(usage))

    def ended(self, request, place):
        pass
'''
OWN = {"Warmest": WARMEST, "Emptiest": EMPTIEST}


def fleet_of(kind: str, tmp_path: Path) -> dict[str, Any]:
    router: dict[str, Any] = {"kind": kind}
    if kind == "llm_d":
        router["precise"] = True
    elif kind in OWN:
        (tmp_path / "own.py").write_text(OWN[kind])
        router["kind"] = f"{tmp_path / 'own.py'}:{kind}"
    return {"pools": [{"name": "main", "replicas": 3}], "router": router}


@pytest.mark.parametrize("kind", ["llm_d", "dynamo_kv", "Warmest"])
def test_what_engines_cache_is_seen_as_it_is(kind: str, tmp_path: Path) -> None:
    sessions = SESSIONS["sessions"] | {
        "num_sessions": 40,
        "arrivals": {"kind": "burst", "burst_size": 20, "interval_s": 1.0},
        "turns": {"kind": "fixed", "number": 4},
    }
    data = data_of(TIGHT | {"enable_prefix_caching": True}, None) | {
        "fleet": fleet_of(kind, tmp_path),
        "workload": {"sessions": sessions, "max_concurrent_users": 40},
    }
    fast, slow = (
        Simulation(parse_config(data), stepwise=way).run() for way in (False, True)
    )
    assert fast.summary["num_preemptions"] > 0
    assert fast.summary["prefix_cache_hits"] > 0
    assert fast.requests.equals(slow.requests)


@pytest.mark.parametrize(
    ("cost", "is_ahead"), [("roofline", True), ("constant", True), ("constant", False)]
)
@pytest.mark.parametrize("kind", ["llm_d", "dynamo_kv", "Warmest", "Emptiest"])
def test_engines_are_run_up_to_each_look_at_their_caches(
    kind: str, tmp_path: Path, cost: str, *, is_ahead: bool, is_quick: bool
) -> None:
    rows = [
        row | {"output_length": 4 * row["output_length"]} for row in trace(3, 20.0)[:60]
    ]
    if cost == "constant":  # steps of engines end, and arrivals come, at one instant
        rows = [row | {"timestamp": row["timestamp"] // 125 * 125} for row in rows]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    engine = {
        "enable_prefix_caching": True,
        "async_scheduling": is_ahead,
        "num_gpu_blocks_override": 600,
        "max_model_len": 9_000,
    }
    data = data_of(engine, fleet_of(kind, tmp_path)) | {
        "workload": {"trace": {"kind": "mooncake", "path": str(path)}}
    }
    if cost == "constant":
        data["cost"] = {"kind": "constant", "step_s": 0.0078125}
    config = parse_config(data)
    simulation = Simulation(config)
    wanted = BetweenScrapes if kind == "llm_d" else AtArrivals
    assert type(simulation.engine) is wanted
    fast = simulation.run(check_every=25 if is_quick else 3)
    slow = Simulation(config, stepwise=True).run()
    assert fast.summary["num_preemptions"] > 0
    assert fast.summary["prefix_cache_hits"] > 0
    for name, table in sorted_tables(fast).items():
        assert table.equals(sorted_tables(slow)[name]), name
