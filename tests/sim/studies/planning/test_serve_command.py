"""The command that starts the engine that was simulated."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_capacity
from sim.simulation.pools import pools_of, transfer_settings
from sim.studies.planning.answer.configurations import not_said, serve_command
from tests.sim.config.test_config import minimal


def said(**engine: Any) -> tuple[str, list[str]]:
    config = parse_config(minimal(**engine)).engine
    model, gpu = load_model(config.model), load_gpu(config.gpu)
    return serve_command(config, make_capacity(config, model, gpu)), not_said(config)


def test_limits_are_written_out() -> None:
    command, missing = said(max_model_len=4096, enable_prefix_caching=False)
    assert command == (
        "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 1 "
        "--max-model-len 4096 --max-num-seqs 1024 --max-num-batched-tokens 8192 "
        "--no-enable-prefix-caching"
    )
    assert not missing


def test_the_share_of_a_gpu_is_said_where_the_release_takes_another() -> None:
    """0.9 is the default up to 0.19, 0.92 later; SGLang's follows from the card."""
    sglang = {"scheduler": "sglang", "gpu": "h100_sxm"}
    for engine, utilization, is_said in (
        ({"engine_version": "0.19"}, None, False),
        ({"engine_version": "0.19"}, 0.9, False),
        ({"engine_version": "0.19"}, 0.92, True),
        ({"engine_version": "0.33"}, None, False),
        ({"engine_version": "0.33"}, 0.9, True),
        ({"engine_version": "0.33"}, 0.92, False),
        (sglang, None, False),
        (sglang, 0.835, False),
        (sglang, 0.9, True),
    ):
        command, _ = said(**engine, gpu_memory_utilization=utilization)
        is_told = "--gpu-memory-utilization" in command
        is_told |= "--mem-fraction-static" in command
        assert is_told == is_said, (engine, utilization)


def words_of(pool: str, **table: Any) -> list[str]:
    fleet = {
        "pools": [
            {"name": "prefill", "role": "prefill", "replicas": 1},
            {"name": "decode", "role": "decode", "replicas": 1},
        ],
        "links": {"bytes_per_s": 5e10},
    } | table.pop("fleet", {})
    config = parse_config(minimal(**table) | {"fleet": fleet})
    found = {each.name: each for each in pools_of(config)}[pool]
    side = transfer_settings(found)
    return shlex.split(serve_command(found.engine, found.capacity, side))


def connector_in(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return found


def test_a_pool_says_which_side_it_is() -> None:
    for pool, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        words = words_of(pool)
        assert words[:2] == ["vllm", "serve"]
        assert connector_in(words) == {
            "kv_connector": "NixlConnector",
            "kv_role": role,
        }
    connector = {"kv_lease_duration": 60, "kv_load_failure_policy": "recompute"}
    assert connector_in(words_of("decode", fleet={"connector": connector})) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"kv_lease_duration": 60},
        "kv_load_failure_policy": "recompute",
    }


def test_states_that_are_sent_need_a_layout() -> None:
    """0.33's NIXL worker asserts it."""
    granite = {"model": "ibm-granite/granite-4.0-h-small", "gpu": "h200_sxm"}
    for pool in ("prefill", "decode"):
        words = words_of(pool, **granite)
        assert words[:3] == ["VLLM_SSM_CONV_STATE_LAYOUT=DS", "vllm", "serve"]
    assert said(**granite)[0].startswith("vllm serve")


def test_a_tier_behind_a_pool_stands_beside_its_side() -> None:
    """``--kv-offloading-size`` would replace the connector."""
    fleet = {"connector": {"asks_tier_first": True}}
    words = words_of("decode", kv_offloading_size=16.0, fleet=fleet)
    assert "--kv-offloading-size" not in words
    whole = connector_in(words)
    assert whole["kv_connector"] == "MultiConnector"
    tier, side = whole["kv_connector_extra_config"]["connectors"]
    assert side == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    assert tier == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 16 * 2**30},
    }


def test_a_tier_is_said_as_json_and_ours_in_words() -> None:
    extra = {"cpu_bytes_to_use": 10**9, "blocks_per_chunk": 4}
    own = {"write_policy": "write_back"}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    command, missing = said(
        kv_transfer_config={**connector, "kv_connector_extra_config": extra | own},
        kv_offloading_link={"load_bytes_per_s": 2e10, "store_bytes_per_s": 2e10},
    )
    assert connector_in(shlex.split(command)) == {
        **connector,
        "kv_connector_extra_config": extra,
    }
    assert "--kv-offloading-link" not in command
    assert "write_policy=write_back" in missing
    assert any(each.startswith("kv_offloading_link=") for each in missing)
    command, missing = said(kv_offloading_size=16.0)
    assert command.endswith("--kv-offloading-size 16")
    assert not missing


def test_what_was_set_is_said_in_the_words_of_the_release() -> None:
    command, missing = said(
        scheduler="v0",
        preemption_mode="swap",
        swap_space=8.0,
        enable_chunked_prefill=True,
        block_size=32,
        watermark=0.02,
        enforce_eager=True,
    )
    words = shlex.split(command)
    for pair in ("--preemption-mode swap", "--swap-space 8", "--block-size 32"):
        assert pair in command
    assert "--enable-chunked-prefill=True" in words
    assert "--enforce-eager" in words
    assert missing == ["watermark=0.02"]


def test_keys_of_groups_are_said_in_the_words_of_the_release() -> None:
    command, missing = said(
        model="ibm-granite/granite-4.0-h-small",
        gpu="h200_sxm",
        prefix_cache_retention_interval="dense",
        prefix_match_unit=16,
        mamba_ssm_cache_dtype="float32",
        disable_hybrid_kv_cache_manager=False,
    )
    for pair in (
        "--prefix-cache-retention-interval None",
        "--prefix-match-unit 16",
        "--mamba-ssm-cache-dtype float32",
        "--no-disable-hybrid-kv-cache-manager",
    ):
        assert pair in command
    assert not missing


@pytest.mark.parametrize("generation", ["cacheflow", "v0_2"])
def test_before_vllm_serve(generation: str) -> None:
    command, missing = said(scheduler=generation, preemption_mode="swap")
    assert command.startswith("python -m vllm.entrypoints.openai.api_server --model ")
    assert missing == ["preemption_mode=swap"]


def test_drafts_are_said_as_the_release_reads_them() -> None:
    drafts = {"method": "eagle3", "num_speculative_tokens": 3}
    command, missing = said(speculative_config=drafts)
    words = shlex.split(command)
    found = words[words.index("--speculative-config") + 1]
    assert json.loads(found) == drafts
    assert missing == ["speculative_config.model, the checkpoint of the head"]
    none = {"method": "mtp", "num_speculative_tokens": 0}
    command, missing = said(speculative_config=none)
    assert "speculative" not in command
    assert not missing


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("OLMo-2-7B", "allenai/OLMo-2-1124-7B"),
        ("allenai/OLMo-2-7B", "allenai/OLMo-2-1124-7B"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama 3 8b", "meta-llama/Meta-Llama-3-8B"),
        ("gemma-3-4b", "google/gemma-3-4b-pt"),
        ("gemma-3-4b-it", "google/gemma-3-4b-it"),
        ("Mixtral-8x7B-Instruct", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("GLM-4-9B-0414", "zai-org/GLM-4-9B-0414"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("THUDM/GLM-4-9B-0414", "THUDM/GLM-4-9B-0414"),
    ],
)
def test_a_model_is_called_as_the_hub_does(typed: str, name: str) -> None:
    command, missing = said(model=typed)
    assert shlex.split(command)[2] == name
    assert not missing


def test_a_name_that_the_hub_lacks_is_not_made_up() -> None:
    """An instruct model is another checkpoint of the shape that was counted."""
    command, missing = said(model="OLMo-2-7B-Instruct")
    assert shlex.split(command)[2] == "OLMo-2-7B-Instruct"
    assert missing == [
        "the owner of OLMo-2-7B-Instruct on the hub, a name that kvsim does not know"
    ]


def test_weights_lie_beside_a_config(tmp_path: Path) -> None:
    facts = Path("sim/hardware/models/configs/Qwen--Qwen3-8B.json").read_text()
    (tmp_path / "config.json").write_text(facts)
    for model in (tmp_path, tmp_path / "config.json"):
        command, missing = said(model=str(model))
        assert shlex.split(command)[2] == str(tmp_path)
        assert not missing
