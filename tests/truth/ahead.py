"""Errors on the measured runs with scheduling ahead and without, side by side.

``python -m tests.truth.ahead`` prints the table of the README, some minutes long.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sim.simulation.simulate import simulate
from sim.studies.validation.readers import read
from sim.studies.validation.readers.requests_csv import read_timeseries
from sim.studies.validation.run import validate
from tests.shared import shared
from tests.truth.runs import RTX, STAGE_RUNS, StageRun, rtx_config

if TYPE_CHECKING:
    from collections.abc import Iterator

LATENCIES = ("ttft", "tpot", "e2el")
"""The median of the first and the means of the others are compared."""
CURVES = ("num_running", "num_waiting")

Errors = dict[str, float]
"""By latency, signed, in percent; by curve, the mean distance in requests."""


def of_stages(run: StageRun, folder: Path, *, ahead: bool) -> list[Errors]:
    """Return the errors of each stage of a run."""
    config = run.config(folder, {"kind": "roofline"}, async_scheduling=ahead)
    errors = run.errors(simulate(config))
    return [
        dict(zip(LATENCIES, of_stage, strict=True))
        for of_stage in zip(*(errors[name] for name in LATENCIES), strict=True)
    ]


def of_rtx(*, ahead: bool) -> Errors:
    """Return the errors of the run whose curves were recorded, too."""
    observed = read(shared(f"{RTX}/requests.csv"))
    observed = replace(
        observed, series=read_timeseries(shared(f"{RTX}/timeseries.csv"))
    )
    report = validate(rtx_config(async_scheduling=ahead), observed).to_dict()
    found = {
        name: report["metrics"][f"{'p50' if name == 'ttft' else 'mean'}_{name}_ms"]
        for name in LATENCIES
    }
    curves = {name: report["curves"][name]["mean_abs"] for name in CURVES}
    return {name: each["error_pct"] for name, each in found.items()} | curves


def row(name: str, load: str, ahead: Errors, one_by_one: Errors) -> str:
    """Return a line of the table, ahead before one step at a time."""
    cells = [f"{ahead[key]:+.1f} / {one_by_one[key]:+.1f}" for key in LATENCIES]
    told = [
        ", ".join(f"{e[key]:.1f}" for key in CURVES if key in e)
        for e in (ahead, one_by_one)
    ]
    cells.append(" / ".join(filter(None, told)))
    return " | ".join(("", name, load, *cells, "")).strip()


def rows(folder: Path) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| run | requests/s | TTFT | TPOT | E2E | running, waiting apart |"
    yield "|---|---|---|---|---|---|"
    for run in STAGE_RUNS:
        both = [of_stages(run, folder, ahead=each) for each in (True, False)]
        for (rate, _), *errors in zip(run.stages, *both, strict=True):
            yield row(run.name, str(rate), *errors)
    yield row("llama_3.1_8b", "10", *[of_rtx(ahead=each) for each in (True, False)])


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        for line in rows(Path(name)):
            print(line, flush=True)
