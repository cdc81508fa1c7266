"""Millions: of requests, sessions, blocks, runs of a sweep, and steps of a report.

``make scale`` runs all of it whole, in an hour; `make test-all` a fiftieth of it
(KVSIM_SCALE says how much). Each command has a limit for memory of its own
(RLIMIT_DATA): pages of mapped files, which are given back when others need the room,
do not count, all else does.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from sim.results.folder import RunFolder
from sim.results.tables.parquet import StepsFile
from tests.bench.scale import SYNTHETIC
from tests.shared import ROOT
from tests.sim.studies.sweeps.files import tiny, write_sweep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCALE = float(os.environ.get("KVSIM_SCALE", "0.02"))
GIB = 2**30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time and memory of a command."""

    cpu_s: float
    peak_mib: float
    """Mapped files included."""


def _num(whole: int) -> int:
    return max(1, round(whole * SCALE))


def _used(name: str, words: list[str], place: Path, most_bytes: int) -> Usage:
    """Run a command that may keep so much; print and return its usage."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))

    process = subprocess.Popen(
        [sys.executable, "-m", "kvsim", *words],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=limit,  # noqa: PLW1509 - there are no threads
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    assert process.returncode == 0, said[-2000:]
    used = Usage(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
    print(
        f"\n{name}: {used.cpu_s:.0f} s of processor time, {used.peak_mib:.0f} MiB with "
        f"mapped files, at most {most_bytes / 2**20:.0f} MiB without"
    )
    return used


def _run(place: Path, data: dict[str, Any]) -> list[str]:
    (place / "run.yaml").write_text(yaml.safe_dump(data))
    return ["run", "run.yaml", "--no-figures", "--quiet", "--out", "out"]


def test_ten_million_requests(tmp_path: Path) -> None:
    number = _num(10_000_000)
    data = yaml.safe_load(SYNTHETIC)
    data["workload"]["synthetic"]["num_requests"] = number
    used = _used(f"{number:,} requests", _run(tmp_path, data), tmp_path, GIB)
    assert used.peak_mib < 1024  # mapped files, too
    assert pq.read_metadata(tmp_path / "out/requests.parquet").num_rows == number


def test_a_million_sessions(tmp_path: Path) -> None:
    number = _num(1_000_000)
    data = yaml.safe_load((ROOT / "examples/chat_sessions.yaml").read_text())
    data["workload"]["max_concurrent_users"] = 1_000
    data["workload"]["sessions"] |= {
        "num_sessions": number,
        "arrivals": {"kind": "burst", "burst_size": number, "interval_s": 1.0},
        "turns": {"kind": "geometric", "mean": 2.0, "max": 20},
        "first_prompt_tokens": {"kind": "lognormal", "median": 60, "sigma": 0.8},
        "prompt_tokens": {"kind": "lognormal", "median": 30, "sigma": 0.8},
        "output_tokens": {"kind": "lognormal", "median": 20, "sigma": 0.6},
        "think_s": {"kind": "lognormal", "median_s": 5.0, "sigma": 0.9},
        "prefixes": {
            "kind": "system_prompts",
            "num_groups": 8,
            "tokens": {"kind": "uniform", "low": 32, "high": 128},
        },
    }
    used = _used(f"{number:,} sessions", _run(tmp_path, data), tmp_path, GIB)
    assert used.peak_mib < 1024  # mapped files, too
    assert RunFolder(tmp_path / "out").summary["sessions"]["num_completed"] == number


def test_five_million_blocks_that_are_cached(tmp_path: Path) -> None:
    number = _num(5_000_000)
    data = yaml.safe_load((ROOT / "examples/chat_sessions.yaml").read_text())
    data["workload"]["sessions"]["num_sessions"] = _num(60_000)
    data["engine"] |= {"num_gpu_blocks_override": number, "enable_prefix_caching": True}
    most_bytes = GIB + number * 600
    _used(f"{number:,} blocks", _run(tmp_path, data), tmp_path, most_bytes)
    assert RunFolder(tmp_path / "out").summary["num_gpu_blocks"] == number


def test_a_sweep_of_five_thousand_runs(tmp_path: Path) -> None:
    number = _num(5_000)
    write_sweep(tmp_path, repeats=number)
    words = ["sweep", "sweep.yaml", "--workers", "2", "--quiet", "--out", "out"]
    _used(f"a sweep of {number:,} runs", words, tmp_path, GIB)
    rows = sum(
        pq.read_metadata(path).num_rows
        for path in (tmp_path / "out/runs").glob("*.parquet")
    )
    assert rows == number


def test_a_report_of_a_hundred_million_steps(tmp_path: Path) -> None:
    data = tiny()
    data["workload"]["synthetic"]["num_requests"] = 2_000
    small = _run(tmp_path, data)
    _used("a small run", small, tmp_path, GIB)
    number = _num(100_000_000)
    _lengthened(tmp_path / "out", number)
    words = ["report", "out", "--static", "--quiet", "--out", "out.html"]
    _used(f"a report of {number:,} steps", words, tmp_path, GIB)
    assert (tmp_path / "out.html").stat().st_size > 10_000


def _lengthened(out: Path, num_steps: int) -> None:
    """Repeat the steps of a run, later each time, until there are so many."""
    folder = RunFolder(out)
    kinds = folder.step_table.kinds
    (batch,) = folder.step_table.batches([*kinds])
    length = len(batch["step"])
    end_s = float(batch["start_s"][-1] + batch["latency_s"][-1])
    longer = out / "longer.parquet"
    with StepsFile(longer, kinds) as file:
        repeat = _repeating(max(1, 65_536 // length), batch, end_s)
        for first in range(0, num_steps, len(repeat(0)["step"])):
            rows = repeat(first // length)
            file.write({name: row[: num_steps - first] for name, row in rows.items()})
    longer.replace(out / "steps.parquet")


def _repeating(
    times: int, batch: dict[str, Any], end_s: float
) -> Callable[[int], dict[str, Any]]:
    """Return a function that gives copies of a batch, from the copy of a number on."""
    length = len(batch["step"])
    columns = {name: np.tile(values, times) for name, values in batch.items()}
    copy = np.repeat(np.arange(times), length)

    def copies(first: int) -> dict[str, Any]:
        later = {"step": (first + copy) * length}
        later |= {
            name: (first + copy) * end_s
            for name in ("start_s", "output_s")
            if name in columns
        }
        return columns | {name: columns[name] + more for name, more in later.items()}

    return copies
