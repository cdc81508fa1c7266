"""``kvsim workload curve``: its sentence, its files, its figure, its refusals."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import run as kvsim
from sim.errors import CapacityError
from sim.hardware.capacity import estimate_capacity
from sim.hardware.gpus import GIB
from sim.hardware.models.bundled import load_model
from sim.hardware.models.kv_memory import kv_memory
from sim.studies.prefixes.report import PrefixReport, what_is_left_out
from sim.views.plots.studies.prefixes import prefix_hits
from sim.views.plots.style import to_png
from tests.shared import shared
from tests.sim.cli.test_workload_describe import chat
from tests.sim.commands import TRACE, files, refused
from workloads.analysis import prefix_curve

if TYPE_CHECKING:
    from pathlib import Path

MOONCAKE = "traces/mooncake_fast25_conversation.jsonl"
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.mark.slow
def test_sentence_answers_in_blocks_tokens_and_gib(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["workload", "curve", str(shared(MOONCAKE)), "--quiet"]
    assert kvsim([*command, "--model", LLAMA, "--gpu", "h200_sxm"]) == 0
    pool = estimate_capacity(LLAMA, "h200_sxm").kv_cache_tokens
    assert capsys.readouterr().out == (
        "80 % of the possible hits (29.89 % of prompt tokens; an infinite cache finds "
        "37.36 %) takes 675,685 blocks of 16 tokens, 10,810,960 tokens, 1,319.70 GiB "
        f"of GPU or host memory for {LLAMA} (bfloat16), {10_810_960 / pool:.2f} KV "
        "pools of an engine on h200_sxm; with the future known 94,607 blocks would "
        "do.\n"
    )


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """A trace in Mooncake's format: conversations, turn by turn."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for turn in range(1, 5):
        for user in range(5):
            ids = [0, *(100 * user + k for k in range(1, turn + 1))]
            lines.append(
                {
                    "timestamp": 10_000 * turn + 100 * user,
                    "input_length": 512 * turn + 100,
                    "output_length": 20,
                    "hash_ids": ids[: turn + 1],
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_files_hold_the_whole_curve(
    conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["workload", "curve", str(conversations), "--out", str(out)]
    assert kvsim([*command, "--json", "--model", LLAMA]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "curve.json").read_text())
    with (out / "curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(printed["points"]) > 20
    rates = [float(row["lru_hit_rate"]) for row in rows]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(printed["possible_hit_rate"])
    for row in rows:
        assert float(row["num_tokens"]) == 16 * float(row["num_blocks"])
        if row["belady_hit_rate"]:
            assert float(row["belady_hit_rate"]) >= float(row["lru_hit_rate"])
    assert set(files(out)) == {"curve.json", "curve.csv", "figures/prefix_hits.png"}
    need = printed["need"]
    asked = next(r for r in rows if float(r["num_blocks"]) == need["num_blocks"])
    assert float(asked["lru_hit_rate"]) == pytest.approx(need["hit_rate"])
    assert need["hit_rate"] >= 0.8 * printed["possible_hit_rate"]
    assert "exists already" in refused(command, capsys, tmp_path)
    assert kvsim([*command, "--overwrite"]) == 0
    assert "share of possible" in capsys.readouterr().out


def test_options_change_what_they_name(
    conversations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def curve(*options: str) -> dict:  # type: ignore[type-arg]
        assert kvsim(["workload", "curve", str(conversations), "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    whole = curve()
    assert whole["need"]["share"] == 0.8
    assert curve("--share", "1.0")["need"]["num_blocks"] > whole["need"]["num_blocks"]
    assert curve("--prompts-only")["num_distinct_blocks"] < whole["num_distinct_blocks"]
    assert curve("--block-size", "64")["num_prompt_blocks"] < whole["num_prompt_blocks"]
    assert curve("--sample", "0.5")["sample_rate"] == 0.5
    fewer = [p for p in curve("--bounds", "3")["points"] if p["belady_hit_rate"]]
    assert len(fewer) == 3


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--share", "0"], "share must be between"),
        (["--sample", "2"], "sample rate must be between"),
        (["--bounds", "1"], "bounds must be between"),
        (["--block-size", "0"], "block_size must be between"),
        (["--gpu", "h200_sxm"], "needs a model"),
        (["--tensor-parallel-size", "8"], "needs a model"),
        (["--dtype", "float16"], "needs a model"),
        (["--kv-cache-dtype", "fp8"], "needs a model"),
        (["--sample", "0.001"], "at least 64 blocks"),
        (["--model", "gpt-99"], "unknown model"),
        (["--model", LLAMA, "--gpu", "abacus"], "abacus"),
        (["--model", LLAMA, "--kv-cache-dtype", "int3"], "unknown kv_cache_dtype"),
        (["--model", LLAMA, "--tensor-parallel-size", "3"], "must divide"),
    ],
)
def test_mistakes_are_refused_in_a_line(
    options: list[str],
    rule: str,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["workload", "curve", str(conversations), "--from", "mooncake", "--quiet"]
    assert rule in refused([*command, *options], capsys, tmp_path)


def test_traffic_that_shares_nothing_is_said_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    command = ["workload", "curve", str(path), "--out", str(tmp_path / "out")]
    assert kvsim(command) == 0
    said = capsys.readouterr().out
    assert "no cache finds anything" in said
    assert "future known" not in said  # no table without rows
    assert (tmp_path / "out" / "figures" / "prefix_hits.png").is_file()


def test_memory_of_a_token_counts_all_ranks() -> None:
    model = load_model(LLAMA)
    alone = kv_memory(LLAMA, block_size=16)
    assert alone.token_bytes == model.kv_bytes_per_token() == 131_072
    assert alone.gib(8 * 1024) == 1.0
    halved = kv_memory(LLAMA, block_size=16, kv_cache_dtype="fp8")
    assert halved.token_bytes == alone.token_bytes // 2
    shared_heads = kv_memory(LLAMA, block_size=16, tensor_parallel_size=8)
    assert shared_heads.token_bytes == alone.token_bytes
    copied = kv_memory(LLAMA, block_size=16, tensor_parallel_size=16)
    assert copied.token_bytes == 2 * alone.token_bytes
    with pytest.raises(CapacityError, match="tensor_parallel_size"):
        kv_memory(LLAMA, block_size=16, tensor_parallel_size=0)


def test_memory_knows_the_pool_that_capacity_predicts() -> None:
    memory = kv_memory(LLAMA, "h200_sxm", block_size=16, tensor_parallel_size=2)
    estimate = estimate_capacity(LLAMA, "h200_sxm", tensor_parallel_size=2)
    assert memory.pool_tokens == estimate.kv_cache_tokens
    whole = 2 * estimate.num_gpu_blocks * estimate.block_bytes / GIB
    assert memory.gib(estimate.kv_cache_tokens) == pytest.approx(whole)


def test_what_the_curve_leaves_out_is_said() -> None:
    requests = chat()
    (note,) = what_is_left_out(requests)
    assert "earliest time" in note
    alone = [request._replace(previous_id=None, best_of=3) for request in requests]
    (note,) = what_is_left_out(alone)
    assert "samples" in note
    assert what_is_left_out([alone[0]._replace(best_of=1)]) == ()


@pytest.mark.parametrize("sample_rate", [1.0, 0.5])
def test_figure_is_the_same_again(sample_rate: float) -> None:
    curve = prefix_curve(chat(), sample_rate=sample_rate)
    memory = kv_memory(LLAMA, "h200_sxm", block_size=16)
    need, bounds = curve.need(0.8), curve.bounds(4)
    report = PrefixReport("chats", curve, bounds, need, memory)
    assert to_png(prefix_hits(report)) == to_png(prefix_hits(report))
    assert report.pools(need.num_blocks) == pytest.approx(
        need.num_blocks * 16 / (memory.pool_tokens or 0)
    )


def test_hits_of_runs_stand_beside_the_curve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "chats.yaml"
    config.write_text(CHATS)
    base = ["run", str(config), "--quiet", "--no-figures"]
    tier = ["--set", "engine.kv_offloading_size=1.0"]
    for name, more in (("none", []), ("1GiB", tier)):
        assert kvsim([*base, *more, "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    beside = [f"--beside={tmp_path / name}" for name in ("none", "1GiB")]
    out = tmp_path / "curve"
    command = ["workload", "curve", str(config), "--json", *beside]
    assert kvsim([*command, "--out", str(out)]) == 0
    none, host = json.loads(capsys.readouterr().out)["simulated"]
    assert (none["num_host_blocks"], none["host_hit_rate"]) == (0, 0.0)
    assert host["num_blocks"] == 512 > none["num_blocks"] == 300
    assert host["host_hit_rate"] > 0.1
    assert host["hit_rate"] == pytest.approx(host["lru_hit_rate"], abs=0.1)
    assert (out / "figures" / "prefix_hits.png").stat().st_size > 10_000
    assert kvsim([*command, "--block-size", "32"]) == 2
    assert "give --block-size 16" in capsys.readouterr().err


CHATS = """
workload:
  sessions:
    kind: chat
    num_sessions: 24
    arrivals: {kind: poisson, rate: 0.5}
    turns: {kind: fixed, number: 4}
    first_prompt_tokens: {kind: lognormal, median: 500, sigma: 0.8}
    prompt_tokens: {kind: fixed, tokens: 80}
    output_tokens: {kind: fixed, tokens: 16}
    think_s: {kind: lognormal, median_s: 15.0, sigma: 0.8}
    max_context_tokens: 4096
engine:
  model: meta-llama/Llama-3.1-8B
  gpu: h200_sxm
  num_gpu_blocks_override: 300
  max_model_len: 4096
  enable_prefix_caching: true
cost_intervals: false
"""
