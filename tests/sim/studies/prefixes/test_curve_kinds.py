"""``kvsim workload curve`` for models whose layers keep different things."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.hardware.capacity import estimate_capacity
from sim.hardware.models.kv_memory import kv_memory
from tests.sim.commands import refused

if TYPE_CHECKING:
    from pathlib import Path

GPT_OSS = "openai/gpt-oss-120b"
GEMMA = "google/gemma-3-27b-it"
QWEN = "Qwen/Qwen3-Next-80B-A3B-Instruct"
SCOUT = "meta-llama/Llama-4-Scout-17B-16E"
DEEPSEEK = "deepseek-ai/DeepSeek-V3"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Five requests that begin with the same 8,192 tokens, and go on by themselves."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * user,
            "input_length": 10_240,
            "output_length": 20,
            "hash_ids": [*range(16), *(100 * (user + 1) + k for k in range(4))],
        }
        for user in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def asked(
    chats: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, Any]:
    command = ["workload", "curve", str(chats), "--json", *options]
    assert kvsim(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_shared_beginning_is_found_from_the_third_request_on(
    chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = asked(chats, capsys, "--model", DEEPSEEK)
    assert every["possible_hit_rate"] == 4 * 8192 / (5 * 10_240)
    assert "kinds" not in every
    assert "hit_tokens" not in every["memory"]
    found = asked(chats, capsys, "--model", GPT_OSS)
    assert found["possible_hit_rate"] == 3 * 8192 / (5 * 10_240)
    window, full = found["kinds"]
    assert full["kept_tokens"] == 16 * found["num_distinct_blocks"]
    assert window["kept_tokens"] == 6 * 128  # five prompts' ends, and where they part
    assert window["hit_needs"] == "the last 8 blocks"
    assert window["token_bytes"] == full["token_bytes"] == 36_864
    again = asked(
        chats, capsys, "--model", GPT_OSS, "--prefix-cache-retention-interval", "4096"
    )
    assert again["possible_hit_rate"] == every["possible_hit_rate"]


def test_hits_of_states_end_with_their_blocks(
    chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(chats, capsys, "--model", QWEN)
    assert found["block_size"] == found["memory"]["hit_tokens"] == 544
    assert found["possible_hit_rate"] == 3 * 15 * 544 / (5 * 10_240)
    state, full = found["kinds"]
    assert (state["num_layers"], state["num_groups"]) == (36, 3)
    assert state["token_bytes"] == 3 * full["token_bytes"]
    assert state["kept_tokens"] == 6 * 544


def test_sentence_and_notes_say_that_sizes_are_the_least(
    chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvsim(["workload", "curve", str(chats), "--model", GEMMA]) == 0
    said = capsys.readouterr().out
    assert "takes at least " in said
    assert "for the full attention of google/gemma-3-27b-it (bfloat16)" in said
    assert "LRU at most" in said
    assert "52 x sliding window of 1,024" in said
    assert "if every block were kept, an infinite cache would find 64.00%" in said
    assert kvsim(["workload", "curve", str(chats), "--model", SCOUT]) == 0
    said = capsys.readouterr().out
    assert "an infinite cache finds 64.00 %" in said  # chunks keep all their blocks
    assert "the blocks of its last chunk" in said
    window_only = "mistralai/Mistral-7B-v0.1"
    assert kvsim(["workload", "curve", str(chats), "--model", window_only]) == 0
    assert f"note: no layer of {window_only} keeps every" in capsys.readouterr().out


def test_two_requests_share_what_no_window_is_kept_for(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats.write_text("".join(chats.read_text().splitlines(keepends=True)[:2]))
    out = ["--out", str(tmp_path / "out")]
    assert kvsim(["workload", "curve", str(chats), "--model", GPT_OSS, *out]) == 0
    assert "none ends where a window or a state is kept" in capsys.readouterr().out
    assert (tmp_path / "out" / "figures" / "prefix_hits.png").is_file()


def test_memory_is_that_of_the_pool_that_capacity_predicts() -> None:
    memory = kv_memory(GPT_OSS, "h200_sxm", block_size=16)
    pool = estimate_capacity(GPT_OSS, "h200_sxm")
    assert memory.pool_tokens == pool.num_gpu_blocks * 16
    assert memory.token_bytes * 16 == pool.block_bytes
    assert [each.block_bytes for each in memory.layers] == [pool.block_bytes] * 2
    halves = kv_memory(GPT_OSS, block_size=16, tensor_parallel_size=2)
    assert halves.token_bytes == memory.token_bytes
    gemma = kv_memory(GEMMA, block_size=16)
    assert [each.num_groups for each in gemma.layers] == [6, 1]
    assert gemma.tails == (1024,)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--model", GPT_OSS, "--sample", "0.5"], "sample of blocks must not be taken"),
        (["--prefix-cache-retention-interval", "16"], "needs a model"),
        (
            ["--model", DEEPSEEK, "--prefix-cache-retention-interval", "16"],
            "is for models with windows",
        ),
        (
            ["--model", QWEN, "--prefix-cache-retention-interval", "544"],
            "depends on where steps end",
        ),
        (
            ["--model", GPT_OSS, "--prefix-cache-retention-interval", "24"],
            "must be 0 or a multiple of 16",
        ),
    ],
)
def test_mistakes_are_refused_in_a_line(
    options: list[str],
    rule: str,
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["workload", "curve", str(chats), "--from", "mooncake", "--quiet"]
    assert rule in refused([*command, *options], capsys, tmp_path)
