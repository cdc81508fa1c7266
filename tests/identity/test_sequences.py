"""Generations before V1: decodes on a clock, and each looked at, are equal."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from tests.identity.compare import assert_equal_paths, one_by_one
from tests.identity.random_sequences import draw_sequence_case
from tests.identity.regimes import regimes_of

_GROUPS = [range(10), range(10, 60), *(range(i, i + 60) for i in range(60, 600, 60))]


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(
            seeds,
            id=f"{seeds[0]}-{seeds[-1]}",
            marks=[pytest.mark.slow] if seeds[0] else [],
        )
        for seeds in _GROUPS
    ],
)
def test_decodes_one_by_one_may_be_counted(seeds: range) -> None:
    reached = Counter(
        name
        for seed in seeds
        for name in regimes_of(
            assert_equal_paths(*draw_sequence_case(seed), one_by_one)
        )
    )
    assert reached["fast"] >= 0.7 * len(seeds)
    if len(seeds) < 30:
        return
    for name in ("preemptions", "blocked heads", "five quiet steps", "shared blocks"):
        assert reached[name] >= 3, (name, reached)


@pytest.mark.parametrize(
    ("scheduler", "num_blocks"),
    [
        ("cacheflow", 4000),
        ("v0_2", 4000),
        ("v0", 4000),
        ("v0", 16000),
        pytest.param("cacheflow", 16000, marks=pytest.mark.slow),
        pytest.param("v0_2", 16000, marks=pytest.mark.slow),
    ],
)
def test_a_minute_of_chat_is_equal(scheduler: str, num_blocks: int) -> None:
    config = parse_config(
        {
            "workload": {
                "preset": {"name": "azure_conv_2023", "duration_s": 40},
                "beam_width": {1: 0.99, 4: 0.01},
            },
            "engine": {
                "model": "Qwen/Qwen3-32B",
                "gpu": "h200_sxm",
                "scheduler": scheduler,
                "max_model_len": 8192,
                "num_gpu_blocks_override": num_blocks,
            },
            "cost": {"kind": "roofline"},
        }
    )
    compared = assert_equal_paths(config, reference=one_by_one)
    assert compared.chosen.path == "fast"


def test_what_is_not_counted_is_said() -> None:
    def path_of(**engine: object) -> str:
        config = parse_config(
            {
                "workload": {"preset": {"name": "azure_conv_2023", "duration_s": 5}},
                "engine": {
                    "model": "Qwen/Qwen3-32B",
                    "gpu": "h200_sxm",
                    "scheduler": "v0",
                    "max_model_len": 8192,
                    **engine,
                },
                "cost": {"kind": "roofline"},
            }
        )
        return Simulation(config).path_reason

    assert path_of() == ""
    assert "cached prefixes" in path_of(enable_prefix_caching=True)
    assert "sliding windows" in path_of(sliding_window=4096)
    assert "lookahead" in path_of(num_lookahead_slots=2)
