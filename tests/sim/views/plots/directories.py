"""Results directories for figures: two runs and a sweep, made once a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import parse_config
from sim.results.output import write_json
from sim.simulation.simulate import simulate
from sim.studies.sweeps import directory as folder
from sim.studies.sweeps.local import SerialExecutor
from sim.studies.sweeps.session import run_sweep
from tests.sim.studies.sweeps.files import sweep_of, tiny

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

RATE = "workload.synthetic.rate_scale"
BLOCKS = "engine.num_gpu_blocks_override"
MODE = "engine.preemption_mode"


def pressed(**engine: Any) -> dict[str, Any]:
    """A run on a generation that swaps; it preempts."""
    data = tiny(scheduler="v0", max_num_batched_tokens=512, **engine)
    data["cost"] = {"kind": "roofline"}
    data["workload"]["synthetic"]["num_requests"] = 30
    return data | {"goodput": {"ttft_ms": 40.0, "tpot_ms": 12.0}}


def write_run(directory: Path, **engine: Any) -> Path:
    directory.mkdir(parents=True)
    simulate(parse_config(pressed(**engine))).write(directory)
    return directory


def write_sweep_results(directory: Path, **spec: Any) -> Path:
    """Do what `kvsim sweep` does, in this process."""
    directory.mkdir(parents=True)
    sweep = sweep_of(directory, **{"base": pressed()} | spec)
    jobs = list(sweep.jobs())
    out = directory / "out"
    given, facts = sweep.file.given, folder.identity(jobs)
    folder.begin(out, given, facts, overwrite=False)
    run_sweep(sweep, jobs, out / folder.RUNS, SerialExecutor())
    write_json(out / "run.json", {})
    return out


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    return [
        write_run(base / "small", num_gpu_blocks_override=20),
        write_run(base / "large", num_gpu_blocks_override=40),
    ]


@pytest.fixture(scope="session")
def pressed_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three loads, two caches, two modes, two seeds."""
    grid = {
        RATE: [0.05, 0.2, 1.0],
        BLOCKS: [20, 30],
        MODE: ["recompute", "swap"],
    }
    base = tmp_path_factory.mktemp("sweep")
    return write_sweep_results(base / "pressed", grid=grid, repeats=2)


def said(figure: Figure) -> str:
    """All that a figure says outside of its panels."""
    texts = [text.get_text() for text in figure.texts]
    for legend in figure.legends:
        texts += [text.get_text() for text in legend.get_texts()]
    return "\n".join(texts)
