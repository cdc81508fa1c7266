"""Which engines serve layers in groups, and which hold them alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import load_config
from sim.errors import CapacityError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.results.summary.warnings import pool_warnings
from sim.simulation.assemble import make_capacity
from sim.simulation.layout import layout_of
from sim.simulation.run import Simulation
from tests.shared import ROOT

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout
    from sim.hardware.capacity import CapacityEstimate


def planned(model: str, **engine: Any) -> tuple[CapacityEstimate, KVCacheLayout | None]:
    settings = {f"engine.{key}": value for key, value in engine.items()}
    config = load_config(
        ROOT / "examples/demo.yaml", {"engine.model": model} | settings
    )
    architecture = load_model(model)
    capacity = make_capacity(config.engine, architecture, load_gpu("b200_sxm"))
    return capacity, layout_of(config.engine, architecture, capacity)


def test_windows_beside_full_attention_are_groups() -> None:
    capacity, layout = planned("openai/gpt-oss-20b")
    assert layout is not None
    assert len(layout.groups) == 2
    assert layout.num_blocks == capacity.num_gpu_blocks


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ("Qwen/Qwen3-8B", {}),
        ("deepseek-ai/DeepSeek-V2-Lite", {}),
        ("google/gemma-2-2b", {"scheduler": "v0"}),
        ("google/gemma-2-2b", {"engine_version": "0.9"}),
    ],
)
def test_layers_held_alike_are_none(model: str, engine: dict[str, Any]) -> None:
    capacity, layout = planned(model, **engine)
    assert layout is None
    assert capacity.kv_cache_tokens == capacity.num_gpu_blocks * 16


def test_states_set_the_size_of_a_block() -> None:
    capacity, layout = planned("Qwen/Qwen3.5-35B-A3B", enable_prefix_caching=True)
    assert layout is not None
    assert capacity.block_size == layout.scheduler_block_size == 1088
    assert "block_size" not in capacity.defaults
    with pytest.raises(CapacityError, match="has layers with a state, which share"):
        planned("ibm-granite/granite-4.0-h-tiny", scheduler="v0")


def test_a_run_warns_of_what_it_does_not_simulate() -> None:
    name = "deepseek-ai/DeepSeek-V3.2"
    settings = {"engine.model": name, "engine.tensor_parallel_size": 8}
    settings |= {"engine.block_size": 64}
    config = load_config(ROOT / "examples/demo.yaml", settings)
    model = replace(load_model(name), not_simulated=("what it does besides",))
    capacity = make_capacity(config.engine, model, load_gpu("b200_sxm"))
    (said,) = pool_warnings(capacity, model, config, frees_window=False)
    assert said.startswith("not simulated: what it does besides")


@pytest.mark.parametrize(
    ("engine", "is_warned"),
    [
        ({}, False),
        ({"scheduler": "v1", "engine_version": "0.9"}, True),
        ({"scheduler": "v1", "engine_version": "0.9", "sliding_window": 4096}, False),
    ],
)
def test_a_lone_window_that_stays_held_is_warned_of(
    engine: dict[str, Any], is_warned: bool
) -> None:
    overrides: dict[str, Any] = {
        "engine.model": "mistralai/Mistral-7B-v0.1",
        "workload.preset.duration_s": 2.0,
        **{f"engine.{key}": value for key, value in engine.items()},
    }
    config = load_config(ROOT / "examples/demo.yaml", overrides)
    warnings = Simulation(config).warnings
    assert any("sliding window stay held" in each for each in warnings) is is_warned
