"""A CPU tier of models with windows: bytes counted by hand, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError, UserError
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from pathlib import Path

    from sim.results.run import Results

GPT_OSS = "openai/gpt-oss-120b"
GEMMA = "google/gemma-3-27b-it"
PAGES = {GPT_OSS: 32_768, GEMMA: 131_072}
"""Bytes of 16 tokens of a layer: K and V, 8 heads of 64 and 16 of 128, bfloat16."""


def run(
    path: Path, rows: list[tuple[int, int, list[int]]], engine: dict[str, Any]
) -> Results:
    """Rows of Mooncake's format: second, prompt tokens, blocks of 512 tokens."""
    lines = [
        {
            "timestamp": 1000 * second,
            "input_length": num_tokens,
            "output_length": 2,
            "hash_ids": hash_ids,
        }
        for second, num_tokens, hash_ids in rows
    ]
    trace = path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "workload": {"trace": {"kind": "mooncake", "path": str(trace)}},
        "engine": {"gpu": "h200_sxm", "kv_offloading_size": 16, **engine},
        "cost": {"kind": "roofline"},
    }
    return Simulation(parse_config(config)).run(check_every=1)


AGAIN = [(0, 1000, [1, 2]), (20, 3000, [3, 4, 5, 6, 7, 8]), (40, 1000, [1, 2])]


@pytest.mark.parametrize(
    ("model", "num_blocks", "layers"),
    [
        # full attention of 18 layers, and a window of 128 of 18
        (GPT_OSS, 378, [(18, None), (18, 128)]),
        # of 62 layers every sixth reads all: 10, and 52 with a window of 1,024
        (GEMMA, 1500, [(10, None)] + 5 * [(10, 1024)] + [(2, 1024)]),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_bytes_are_those_of_the_windows_that_a_hit_needs(
    tmp_path: Path,
    model: str,
    num_blocks: int,
    layers: list[tuple[int, int | None]],
    *,
    ahead: bool,
) -> None:
    engine = {
        "model": model,
        "num_gpu_blocks_override": num_blocks,
        "max_model_len": 4000,
        "async_scheduling": ahead,
    }
    found = run(tmp_path, AGAIN, engine)
    copies = found.recording.transfer_table.arrow.to_pandas()

    def by_hand(num_tokens: int) -> int:
        num_full = num_tokens // 16
        num_hit = (num_tokens - 1) // 16  # the last token is computed again
        num_bytes = 0
        for num_layers, window in layers:
            in_window = (
                num_full if window is None else min(-(-(window - 1) // 16), num_hit)
            )
            num_bytes += num_layers * in_window * PAGES[model]
        return num_bytes

    stores, loads = (copies[copies["kind"] == kind] for kind in ("store", "load"))
    assert stores["num_bytes"].sum() == by_hand(1000) + by_hand(3000)
    assert list(loads["num_bytes"]) == [by_hand(1000)]
    assert list(found.requests["num_loaded_tokens"]) == [0, 0, 992]


def test_loads_that_fail_are_refused_of_several_groups(tmp_path: Path) -> None:
    engine = {"model": GPT_OSS, "kv_offloading_link": {"load_failure_rate": 0.1}}
    with pytest.raises(ConfigError, match="ends where a load of a model"):
        run(tmp_path, AGAIN, engine)


def test_states_are_refused(tmp_path: Path) -> None:
    engine = {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tensor_parallel_size": 8}
    with pytest.raises(UserError, match="attention only, not with states"):
        run(tmp_path, AGAIN, engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_beyond_the_longest_request_is_stored(
    tmp_path: Path, *, ahead: bool
) -> None:
    """A prompt that nothing checks has no blocks there; some ended in a traceback."""
    engine = {
        "model": GPT_OSS,
        "num_gpu_blocks_override": 60,
        "max_model_len": 100,
        "max_num_batched_tokens": 2048,
        "enable_chunked_prefill": False,
        "admission_check": False,
        "async_scheduling": ahead,
    }
    rows = [(0, 90, [1]), (20, 1000, [3, 4]), (40, 90, [1])]
    copies = run(tmp_path, rows, engine).recording.transfer_table.arrow.to_pandas()
    assert list(copies["num_tokens"]) == [80, 96]
