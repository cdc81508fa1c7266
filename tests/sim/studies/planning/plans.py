"""Small plans, and the executor that answers in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import yaml

from sim.studies.planning.solve import PlanResult, solve
from sim.studies.planning.spec import load_plan
from sim.studies.sweeps.local import SerialExecutor
from sim.studies.sweeps.task import perform

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from sim.studies.sweeps.job import Executor, Job, Outcome, Task

STEP_S = 0.01


def small(**changes: Any) -> dict[str, Any]:
    """Return a plan of constant steps and fixed lengths, in place of its parts."""
    plan: dict[str, Any] = {
        "workload": {
            "synthetic": {
                "num_requests": 700,
                "arrivals": {"kind": "constant", "rate": 10.0},
                "prompt_tokens": {"kind": "fixed", "tokens": 16},
                "output_tokens": {"kind": "fixed", "tokens": 20},
                "rate_scale": 8.0,
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "max_num_seqs": 8,
            "async_scheduling": False,
        },
        "candidates": {"gpu": ["h200_sxm"]},
        "objectives": {"p99_ttft_ms": 100},
        "prices": {"per_gpu_hour": {"h200_sxm": 4.0, "h100_sxm": 3.0}},
        "cost": {"kind": "constant", "step_s": STEP_S},
        "cost_band": 0.0,
        "search": {"num_seeds": 3, "curve": [0.5], "curve_seeds": 1},
        "sensitivity": None,
    }
    return plan | changes


def written(plan: dict[str, Any], directory: Path) -> Path:
    """Write a plan and return its path."""
    path = directory / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    return path


def solved(
    plan: dict[str, Any], directory: Path, executor: Executor | None = None
) -> PlanResult:
    """Make a plan in this process."""
    with executor or SerialExecutor() as open_executor:
        return solve(load_plan(written(plan, directory)), open_executor)


class Stopping(SerialExecutor):
    """An executor that is stopped after so many answers."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        for outcome in super().run(jobs, task):
            if not self.left:
                self.stop()
                return
            self.left -= 1
            yield outcome


class BackToFront:
    """An executor that ends what came last first."""

    num_workers = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        """See `Executor.run`."""
        for job in reversed(list(jobs)):
            yield perform(job, task)

    def stop(self) -> None:
        """Never asked."""
