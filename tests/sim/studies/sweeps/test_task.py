"""A run of a sweep keeps few columns of its steps: its summary is that of any run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from sim.studies.sweeps.task import run_summary

ENGINE = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"}
DRAWN = {
    "num_requests": 40,
    "arrivals": {"kind": "poisson", "rate": 20.0},
    "prompt_tokens": {"kind": "fixed", "tokens": 700},
    "output_tokens": {"kind": "fixed", "tokens": 20},
}
APART = [
    {"name": "prefill", "role": "prefill", "replicas": 1},
    {"name": "decode", "role": "decode", "replicas": 2},
]


@pytest.mark.parametrize(
    ("engine", "fleet"),
    [
        ({}, None),
        ({"kv_offloading_size": 1}, None),
        ({}, {"pools": [{"name": "main", "replicas": 3}]}),
        ({"scheduler": "sglang"}, {"pools": [{"name": "main", "replicas": 2}]}),
        ({}, {"pools": APART}),
        ({"scheduler": "sglang"}, {"pools": APART}),
        ({"kv_offloading_size": 1}, {"pools": APART}),
        (
            {},
            {
                "pools": [{"name": "main", "replicas": 2}],
                "autoscaler": {
                    "targets": {"requests_in_flight": 2},
                    "min_replicas": 1,
                    "max_replicas": 3,
                    "start_s": 0.5,
                },
            },
        ),
    ],
    ids=["one", "tier", "fleet", "sglang", "apart", "sglang apart", "tiers", "scaled"],
)
def test_the_summary_is_that_of_a_run(
    engine: dict[str, Any], fleet: dict[str, Any] | None
) -> None:
    config: dict[str, Any] = {
        "workload": {"synthetic": DRAWN},
        "engine": ENGINE | engine,
    }
    if fleet is not None:
        router = {"kind": "least_requests"}
        links = {"links": {"bytes_per_s": 50e9}} if fleet["pools"] is APART else {}
        apart = {"decode_router": router} | links if links else {}
        config["fleet"] = {"router": router} | apart | fleet
    told = Simulation(parse_config(config)).run().summary
    assert json.dumps(run_summary(config)) == json.dumps(told)
