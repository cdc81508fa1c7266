"""A sweep's time beside that of a bare process pool that does the same runs.

``python -m tests.bench.sweep_overhead [ROUNDS]`` alternates both in one session, each
with two processes that are started anew, and prints the medians of the ratios.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import yaml

from sim.studies.sweeps.directory import identity
from sim.studies.sweeps.expand import Sweep
from sim.studies.sweeps.forks import start_method, warm_up
from sim.studies.sweeps.local import LocalExecutor
from sim.studies.sweeps.session import run_sweep
from sim.studies.sweeps.spec import load_sweep
from sim.studies.sweeps.supplies import gather
from sim.studies.sweeps.task import run_summary
from tests.shared import ROOT
from tests.sim.studies.sweeps.files import tiny

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_WORKERS = 2
NAMES = ("500 of 12 requests", "60 of ten minutes", "20 of an hour")


def sweep_file(directory: Path, name: str) -> Path:
    """Write the sweep called `name`; return its path."""
    rates = {"workload.preset.rate_scale": {"uniform": [0.5, 1.1], "num": 10}}
    specs: Mapping[str, Mapping[str, object]] = {
        "500 of 12 requests": {"base": tiny(), "repeats": 500},
        "60 of ten minutes": {
            "base": str(ROOT / "examples/demo.yaml"),
            "grid": rates | {"workload.preset.duration_s": [600.0]},
            "repeats": 6,
        },
        "20 of an hour": {
            "base": str(ROOT / "examples/demo.yaml"),
            "grid": rates,
            "repeats": 2,
        },
    }
    path = directory / "sweep.yaml"
    path.write_text(yaml.safe_dump(dict(specs[name]), sort_keys=False))
    return path


def bare_s(path: Path) -> float:
    """Return the seconds of a pool that maps the runs."""
    started_s = perf_counter()
    configs = [job.config for job in Sweep(load_sweep(path)).jobs()]
    context = get_context(start_method())
    with ProcessPoolExecutor(NUM_WORKERS, mp_context=context) as pool:
        for _ in pool.map(run_summary, configs):
            pass
    return perf_counter() - started_s


def sweep_s(path: Path, directory: Path) -> float:
    """Return the seconds of the sweep, from its file to its dataset."""
    started_s = perf_counter()
    sweep = Sweep(load_sweep(path))
    jobs = list(sweep.jobs())
    identity(jobs)
    with LocalExecutor(NUM_WORKERS, gather(jobs)) as executor:
        tally = run_sweep(sweep, jobs, directory, executor)
    assert tally.is_complete
    return perf_counter() - started_s


def main(num_rounds: int) -> None:
    """Print a row of a table for each sweep."""
    warm_up()
    print("| runs | bare pool s | sweep s | sweep / bare |\n|---|---|---|---|")
    for name in NAMES:
        pairs = []
        for i in range(num_rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                path = sweep_file(Path(folder), name)
                runs = Path(folder) / "runs"
                runs.mkdir()
                if i % 2:
                    pair = bare_s(path), sweep_s(path, runs)
                else:
                    pair = (sweep_s(path, runs), bare_s(path))[::-1]
            if i:  # the first warms up
                pairs.append(pair)
        bare, sweep = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(b / a for a, b in pairs)
        print(f"| {name} | {bare:.2f} | {sweep:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
