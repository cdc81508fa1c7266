"""Agents on SGLang, measured by others: direction and order of size.

Source: two public runs of agents in a closed loop, GLM-5.2 on 8 B200 with 4 clients and
DeepSeek-V4-Pro on 8 B300 with 32. Their sessions, the share of thinking, drafts and
the precision of weights are not published; ours are those of another public trace of
coding agents, with weights in NVFP4 and an FP8 cache, which give the published pool.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from tests.shared import shared

pytestmark = pytest.mark.slow
POOL, REUSE, REUSE_OF_32 = 1_961_024, 0.977, 0.969
TTFT_MS, ITL_MS, LATENCY_MS = {"p50": 192.0, "p90": 690.0}, {"p90": 3.826}, 11_610.0


def agents(num_users: int) -> dict[str, Any]:
    config = parse_config(
        {
            "workload": {
                "trace": {
                    "kind": "kv_cache_tester",
                    "path": str(shared("traces/kv_cache_tester_agentic_rle.jsonl.gz")),
                    "num_sessions": 100,
                },
                "max_concurrent_users": num_users,
            },
            "engine": {
                "scheduler": "sglang",
                "model": "zai-org/GLM-5",
                "gpu": "b200_sxm",
                "tensor_parallel_size": 8,
                "quantization": "nvfp4",
                "kv_cache_dtype": "fp8",
            },
            "cost": {"kind": "roofline"},
        }
    )
    return Simulation(config).run().summary


def test_few_agents_find_nearly_all_and_many_a_little_less() -> None:
    few, many = agents(4), agents(32)
    assert few["num_gpu_blocks"] == pytest.approx(POOL, rel=0.01)
    assert few["prefix_cache_hit_rate"] == pytest.approx(REUSE, abs=0.04)
    assert many["prefix_cache_hit_rate"] == pytest.approx(REUSE_OF_32, abs=0.05)
    assert many["prefix_cache_hit_rate"] < few["prefix_cache_hit_rate"]
    # no front end and no drafts, and shorter answers: within a factor of three
    for found, published in (
        (few["p50_ttft_ms"], TTFT_MS["p50"]),
        (few["p90_ttft_ms"], TTFT_MS["p90"]),
        (few["p90_itl_ms"], ITL_MS["p90"]),
        (few["p90_e2el_ms"], LATENCY_MS),
    ):
        assert published / 3 < found < 3 * published
    for name in ("p90_ttft_ms", "p90_itl_ms", "p90_e2el_ms"):
        assert many[name] > few[name]
