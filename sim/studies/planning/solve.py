"""A plan from its file to its folder."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import yaml

from sim.results.output import ResultFiles, write_json, write_text
from sim.studies.planning.answer.configurations import configurations
from sim.studies.planning.answer.report import plan_json
from sim.studies.planning.answer.verdict import verdicts_of
from sim.studies.planning.phases.planner import Planner, expected_questions
from sim.studies.planning.phases.progress import Course
from sim.studies.planning.phases.study import StoppedError, Study
from sim.studies.sweeps import session
from sim.studies.sweeps.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pandas as pd

    from sim.studies.planning.phases.progress import AnswerFile
    from sim.studies.planning.spec import PlanConfig
    from sim.studies.sweeps.job import Executor

PLAN_FILES = ResultFiles(
    "a plan",
    "plan.json",
    frozenset({"plan.json", "plan.yaml", "run.json", "configs", "figures"}),
)
"""Files and folders of a plan."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Findings of a plan.

    Parameters
    ----------
    plan
        The plan that was solved.
    data
        The contents of ``plan.json``.
    configs
        Configurations by their path from the plan's folder.
    stopped_in
        The phase in which it was stopped; empty if it is complete.
    """

    plan: PlanConfig
    data: Mapping[str, Any]
    configs: Mapping[str, str]
    stopped_in: str = ""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each candidate: its highest rate with its interval, and the price.

        Columns are empty where a candidate does not fit or misses the objectives.
        """
        import pandas as pd  # noqa: PLC0415 - slow to import

        return pd.DataFrame([_row(each) for each in self.data["candidates"]])

    def write(self, directory: Path, *, wall_s: float) -> None:
        """Write everything into `directory`, which exists.

        All but ``run.json`` has the same bytes whenever the same plan is made.
        """
        write_json(directory / "plan.json", self.data)
        asked = yaml.safe_dump(self.plan.model_dump(mode="json"), sort_keys=False)
        write_text(directory / "plan.yaml", asked)
        write_json(directory / "run.json", {"wall_seconds": {"command": wall_s}})
        (directory / "configs").mkdir()
        for path, text in self.configs.items():
            write_text(directory / path, text)


def _row(each: Mapping[str, Any]) -> dict[str, Any]:
    rate, binding = each.get("rate") or {}, each.get("binding") or {}
    return {
        "name": each["name"],
        "status": each["status"],
        "reason": each["reason"],
        "num_gpu_blocks": each.get("num_gpu_blocks"),
        "rate": rate.get("value"),
        "rate_low": rate.get("low"),
        "rate_high": rate.get("high"),
        "binds": binding.get("resource"),
        "replicas": each.get("replicas"),
        "num_gpus": each.get("num_gpus"),
        "cost_per_hour": each.get("cost_per_hour"),
    }


def executor_for(
    plan: PlanConfig, workers: int | None = None, address: str | None = None
) -> Executor:
    """Return the executor of a plan; its traces are read once, here."""
    # The configuration of some candidate: all read the same traces and profiles.
    chosen = {key: values[0] for key, values in plan.tables[0].items()}
    workload = {k: v for k, v in plan.workload.model_dump().items() if v is not None}
    run = {
        "workload": workload,
        "engine": {**plan.engine, **chosen},
        "cost": dict(plan.cost),
        "seed": plan.seed,
    }
    return session.executor_for([Job(0, {}, run)], workers, address, at_least=1)


class PlanStopped(KeyboardInterrupt):
    """A plan was stopped before it had anything to write.

    `phase` is the one in progress, `known` a line on each candidate so far.
    """

    def __init__(self, phase: str, known: list[str]) -> None:
        super().__init__(phase)
        self.phase = phase
        self.known = known


def _known(study: Study, planner: Planner) -> list[str]:
    """Return the results of pilot runs, a line for each candidate."""
    lines = []
    for each in planner.plans:
        if each.found is None:
            lines.append(f"{each.candidate.name}: {each.reason or each.status}")
            continue
        rate = each.found.rate.value
        engines = ceil(study.target_rate / rate)
        cost = study.cost_per_hour(each.candidate, engines)
        lines.append(
            f"{each.candidate.name}: roughly {rate:.3g} requests/s an engine, so "
            f"{engines:,} of them, {cost:,.2f} {study.plan.parsed_prices.currency} an "
            f"hour (pilot run: one seed)"
        )
    return lines


def solve(
    plan: PlanConfig,
    executor: Executor,
    on_progress: Callable[[str, int, int], None] | None = None,
    answers: AnswerFile | None = None,
) -> PlanResult:
    """Make a plan on an executor, which is open; see `Study` for `answers`.

    `on_progress` is told the phase, how many runs are done, and how many there may be.
    Raises PlanStopped if it was stopped before the highest rates were known.
    """
    course = Course(on_progress or (lambda *_: None))
    study = Study(plan, executor, course, answers)
    course.expect(expected_questions(study))
    planner = Planner(study)
    stopped_in = ""
    try:
        planner.run()
    except StoppedError as stopped:
        stopped_in = str(stopped)
        if not any(each.values for each in planner.plans):
            raise PlanStopped(stopped_in, _known(study, planner)) from stopped
    data = plan_json(study, planner.plans, planner.effects, planner.given)
    data["stopped_in"] = stopped_in or None
    verdicts = verdicts_of(data)
    data["verdict"] = {model: each.to_dict() for model, each in verdicts.items()}
    return PlanResult(plan, data, configurations(study, planner.plans), stopped_in)
