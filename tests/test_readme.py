"""Outputs and figures quoted in the README and its pages are what the code prints."""

from __future__ import annotations

import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import load_config
from sim.hardware.gpus import GPUS
from sim.hardware.models.bundled import bundled_models
from sim.simulation.simulate import simulate
from tests.shared import ROOT, shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUESTIONS = (ROOT / "docs/questions.md").read_text(encoding="utf-8")


def blocks(comment: str) -> list[tuple[str, str]]:
    """Return commands, and the text that is said to be their output or a part of it."""
    pattern = rf"<!-- {comment}: kvsim (.*?) -->\n```text\n(.*?)```"
    return [
        pair for page in (README, QUESTIONS) for pair in re.findall(pattern, page, re.S)
    ]


WHOLE, EXCERPTS = blocks("output of"), blocks("excerpt of")
# Wall time differs from run to run, and so does the directory of a test.
VARYING = re.compile(r"^(simulated in|\$ |results in )")


def lines(text: str) -> list[str]:
    return [
        line.rstrip() for line in text.strip().splitlines() if not VARYING.match(line)
    ]


def test_what_is_bundled_is_counted() -> None:
    assert f"for {len(bundled_models())} bundled models" in README
    assert f"on {len(GPUS)} GPUs" in README


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """Return a function that gives the lines a command prints."""
    monkeypatch.chdir(ROOT)

    def run(command: str) -> list[str]:
        arguments = shlex.split(command)
        if arguments[0] == "run":
            arguments += ["--out", str(tmp_path / "out"), "--no-figures"]
        assert kvsim(arguments) == 0
        return lines(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(("command", "block"), WHOLE, ids=[c for c, _ in WHOLE])
def test_output_blocks_are_what_the_code_prints(
    command: str, block: str, printed: Callable[[str], list[str]]
) -> None:
    assert printed(command) == lines(block)


@pytest.mark.parametrize(("command", "block"), EXCERPTS, ids=[c for c, _ in EXCERPTS])
def test_excerpts_stand_in_what_the_code_prints(
    command: str, block: str, printed: Callable[[str], list[str]]
) -> None:
    """In its order and words; a line of dots stands for text left out."""
    found = " ".join(" ".join(printed(command)).split())
    for part in "\n".join(lines(block)).split("...\n"):
        _, said, found = found.partition(" ".join(part.split()))
        assert said, part


def test_the_readme_is_read_in_five_minutes_and_says_how_to_test() -> None:
    assert len(README.splitlines()) <= 180
    assert re.search(r"^make test ", README, re.MULTILINE)
    assert (len(WHOLE), len(EXCERPTS)) == (2, 5)


def test_figures_quoted_in_the_text_are_those_of_the_demo() -> None:
    """The neighbouring rates that the README tells of."""
    found = {}
    for rate_scale in (1.0, 1.15):
        override = f"workload.preset.rate_scale={rate_scale}"
        summary = simulate(load_config(ROOT / "examples/demo.yaml", [override])).summary
        found[rate_scale] = (
            f"{summary['num_preemptions']:,}",
            summary["mean_ttft_ms"] / 1e3,
        )
    assert found[1.0][0] == "5"
    assert "with 5 preemptions;" in README.replace("\n", " ")
    assert f"makes it {found[1.15][0]}" in README.replace("\n", " ")
    assert found[1.0][1] == pytest.approx(0.4, abs=0.05)
    assert found[1.15][1] == pytest.approx(1.9, abs=0.05)


@pytest.mark.slow
def test_figures_quoted_of_other_engines_are_measured() -> None:
    flat = " ".join(QUESTIONS.split())
    found = {}
    for name, overrides in {
        "0.11": ['engine.engine_version="0.11"'],
        "equal pools": [
            'engine.engine_version="0.11"',
            "engine.num_gpu_blocks_override=16075",
        ],
    }.items():
        config = load_config(ROOT / "examples/demo.yaml", overrides)
        found[name] = simulate(config).summary["num_preemptions"]
    assert f"The first gives {found['0.11']} preemptions instead of 60" in flat
    one_by_one = ["engine.async_scheduling=false"]
    config = load_config(ROOT / "examples/demo.yaml", one_by_one)
    plain = simulate(config).summary["num_preemptions"]
    assert f"would be {found['equal pools']} against {plain}" in flat


@pytest.mark.slow
def test_what_host_memory_is_worth_is_what_the_example_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = shared("traces/mooncake_fast25_conversation.jsonl")
    spec = spec_from_file_location("host_memory", ROOT / "examples/host_memory.py")
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "RATES", (example.SHOWN,))
    assert example.table(list(example.runs(trace))) in README


@pytest.mark.slow
def test_figures_quoted_of_swapping_and_recomputing_are_measured() -> None:
    flat = " ".join(QUESTIONS.split())
    summaries = {}
    for scheduler in ("cacheflow", "v0"):
        for mode in ("swap", "recompute"):
            config = load_config(
                ROOT / "examples/beams_under_pressure.yaml",
                [f"engine.scheduler={scheduler}", f"engine.preemption_mode={mode}"],
            )
            summary = summaries[scheduler, mode] = simulate(config).summary
            assert 52_500 < summary["copied_blocks"] < 53_500
            assert bool(summary["recomputed_tokens"]) == (mode == "recompute")
            assert summary["swapped_in_blocks"] == summary["swapped_out_blocks"]
    swap = {name: summaries[name, "swap"] for name in ("cacheflow", "v0")}
    again = {name: summaries[name, "recompute"] for name in ("cacheflow", "v0")}
    for name, words in (
        ("cacheflow", "{} preemptions move {:,} blocks out and as many back"),
        ("v0", "{} preemptions move {:,} blocks out, and as many back"),
    ):
        summary = swap[name]
        quoted = words.format(summary["num_preemptions"], summary["swapped_out_blocks"])
        assert quoted in flat
        mean_ms = again[name]["mean_ttft_ms"], summary["mean_ttft_ms"]
        assert "{:,.0f} ms against {:,.0f} ms".format(*mean_ms) in flat
    tokens = [again[name]["recomputed_tokens"] for name in ("cacheflow", "v0")]
    assert "costs {:,} and {:,} tokens".format(*tokens) in flat


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_figures_quoted_of_published_kernel_tables_are_measured(tmp_path: Path) -> None:
    tables, profile = shared("profiles/aiconfigurator"), tmp_path / "h200.json"
    command = ["profile", "import", "aiconfigurator", "--path", str(tables)]
    command += ["--system", "h200_sxm", "--model", "meta-llama/Llama-3.1-8B"]
    assert kvsim([*command, "--out", str(profile)]) == 0
    overrides = {
        "workload.trace.path": str(shared("traces/azure_llm_2023_conv.csv")),
        "cost": {"kind": "measured", "profile": str(profile)},
    }
    config = load_config(ROOT / "examples/azure_conv.yaml", overrides)
    summary = simulate(config).summary
    low_ms, high_ms = summary["mean_ttft_ms_interval"]
    assert (
        f"mean TTFT {summary['mean_ttft_ms']:.1f} ms, {low_ms:.1f} to {high_ms:.1f} "
        "while kernels move within their bounds, and "
        f"{100 * summary['extrapolated_share']:.2f} % of the time extrapolated"
    ) in " ".join(QUESTIONS.split())


@pytest.mark.slow
def test_figures_quoted_of_chats_are_measured() -> None:
    rows = re.findall(
        r"^\| (\d+)[^|]* \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) (m?s) \| (\d+) \|$",
        QUESTIONS,
        re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == [40, 70, 100, 130, 160]
    for users, hits, rate, ttft, unit, num_preemptions in rows:
        override = f"workload.max_concurrent_users={users}"
        config = load_config(ROOT / "examples/chat_sessions.yaml", [override])
        summary = simulate(config).summary
        found = summary["prefix_cache_hits"] / summary["prefix_cache_queries"]
        assert f"{100 * found:.1f}" == hits
        assert f"{summary['request_throughput']:.2f}" == rate
        mean_ms = summary["mean_ttft_ms"]
        assert (f"{mean_ms:.0f}" if unit == "ms" else f"{mean_ms / 1e3:.1f}") == ttft
        assert str(summary["num_preemptions"]) == num_preemptions
