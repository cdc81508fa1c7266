"""A plan as its phases share it: candidates, rates, and questions to workers.

Questions that do not depend on each other are put in groups, and answered in their
order, whichever run ends first: so a plan is the same on any number of workers.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.config.tables import parse_config
from sim.errors import ConfigError, UserError
from sim.simulation.workload import make_workload
from sim.studies.planning.phases.candidates import candidates_of
from sim.studies.planning.phases.outcome import Fleet, bootstrap_interval, num_held
from sim.studies.planning.search import tasks
from sim.studies.planning.search.trial import with_scale
from sim.studies.planning.spec import as_router
from sim.studies.sweeps.job import Job
from workloads.draws.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.studies.planning.phases.candidates import Candidate
    from sim.studies.planning.phases.outcome import CandidatePlan, Interval
    from sim.studies.planning.phases.progress import AnswerFile
    from sim.studies.planning.spec import PlanConfig
    from sim.studies.sweeps.job import Executor, Outcome, Task

Answer = dict[str, Any]

STEP = 1.04
"""First factor of the searches of single seeds: thresholds differ by a few per cent."""

PART, SMALL_PART = 0.5, 0.25
"""Of the requests, the first, that runs take once rates and fleets are known: runs of a
fleet with more than it needs, and runs that are compared with others of the same
requests, or only drawn."""

_SEEDS_AT_RATE = 5
"""Seeds that are run at the highest rate, where objectives are near their limits."""


class StoppedError(Exception):
    """The plan was asked to end before it was complete."""


class Study:
    """A plan with its candidates, and the executor that simulates them.

    `base_rate` and `target_rate` are requests/s of the traffic at a ``rate_scale`` of
    1, and at the plan's. `on_progress` is told the phase, how many of its questions are
    answered, and how many there are. A question whose answer is in `answers` is not
    asked again, and new answers go there.
    """

    def __init__(
        self,
        plan: PlanConfig,
        executor: Executor,
        on_progress: Callable[[str, int, int], None] | None = None,
        answers: AnswerFile | None = None,
    ) -> None:
        self.plan = plan
        self._executor = executor
        self._answers = answers
        self._on_progress = on_progress or (lambda *_: None)
        self._streams = Streams(plan.seed)
        self.candidates = candidates_of(plan)
        fitting = next(each for each in self.candidates if not each.reason)
        self.base_rate = base_rate(fitting)
        if self.base_rate == inf:
            raise ConfigError(
                "workload: all of its requests come at once, so there is no rate to "
                "plan for; give traffic that is spread over time"
            )
        self.target_rate = self.base_rate * fitting.scale
        self.seeds = [plan.seed + i for i in range(plan.search.num_seeds)]

    def request(
        self, candidate: Candidate, seed: int, warmup_share: float, **more: Any
    ) -> Answer:
        """Return a question about a candidate with another seed."""
        run = {**candidate.run, "seed": seed}
        return tasks.request_of(
            run, self.plan.objectives, warmup_share=warmup_share, **more
        )

    def search_request(
        self, each: CandidatePlan, seed: int, guess_rate: float, **more: Any
    ) -> Answer:
        """Return a question for the threshold of one seed, to begin near a rate."""
        found = each.highest
        if found.at_bound == "high":
            more["most"] = found.rate.value / self.base_rate
        return self.request(
            each.candidate,
            seed,
            each.warmup_share,
            guess=guess_rate / self.base_rate,
            step=STEP,
            slope=found.slope,
            tolerance=self.plan.search.tolerance,
            bounds=self.bounds,
            **more,
        )

    @property
    def seeds_at_rate(self) -> list[int]:
        """Return the first seeds, with which runs at the highest rate are made."""
        return self.seeds[:_SEEDS_AT_RATE]

    @property
    def routers(self) -> list[dict[str, Any]]:
        """Return the routers before replicas; their number is found with the first."""
        settings = self.plan.replicas
        return [as_router(each) for each in settings.routers or [settings.by]]

    @property
    def bounds(self) -> list[float] | None:
        """Lowest and highest ``rate_scale`` of a search, if the plan has any."""
        rates = self.plan.search.rates
        return None if rates is None else [rate / self.base_rate for rate in rates]

    def ask(
        self, phase: str, task: Task, groups: Sequence[Sequence[Answer]]
    ) -> list[list[Answer]]:
        """Return the answers, group by group; raise the first refusal as ConfigError.

        A run is refused for a mistake that shows only when it begins. StoppedError says
        that the executor was stopped, UserError that the process of a run died,
        RuntimeError that a run failed: a fault of ours, or of a class of the user's.
        """
        answers = self.try_to(phase, task, groups)
        for answer in (answer for group in answers for answer in group):
            if isinstance(answer, str):
                raise ConfigError(answer)
        return [[a for a in group if not isinstance(a, str)] for group in answers]

    def try_to(
        self, phase: str, task: Task, groups: Sequence[Sequence[Answer]]
    ) -> list[list[Answer | str]]:
        """Return the same, with the reason in place of an answer that is refused."""
        requests = [request for group in groups for request in group]
        answers = self._known(task, requests)
        left = [i for i in range(len(requests)) if i not in answers]
        jobs = [Job(i, {}, requests[i]) for i in left]
        self._on_progress(phase, 0, len(requests))
        for outcome in self._executor.run(jobs, task) if jobs else ():
            answer = _answer(outcome)
            if self._answers is not None:
                answer = self._answers.keep(task, requests[outcome.index], answer)
            answers[outcome.index] = answer
            self._on_progress(phase, len(answers), len(requests))
        if len(answers) < len(requests):
            raise StoppedError(phase)
        in_order = (answers[i] for i in range(len(requests)))
        return [list(islice(in_order, len(group))) for group in groups]

    def _known(self, task: Task, requests: Sequence[Answer]) -> dict[int, Answer | str]:
        """Return the answers that there are already, by the place of the question."""
        if self._answers is None:
            return {}
        found = ((i, self._answers.get(task, r)) for i, r in enumerate(requests))
        return {i: answer for i, answer in found if answer is not None}

    def intervals(self, points: Sequence[Answer], name: str) -> dict[str, Interval]:
        """Return medians over runs with bootstrap intervals, of the measured values."""
        found = {}
        for number in points[0]["values"]:
            known = [p["values"][number] for p in points]
            known = [value for value in known if value is not None]
            if known:
                found[number] = bootstrap_interval(
                    known,
                    self.plan.search.confidence,
                    self._streams,
                    f"{name}: {number}",
                )
        return found

    def fleet(self, num_replicas: int, points: Sequence[Answer], name: str) -> Fleet:
        """Return how a fleet serves the traffic, from its runs with several seeds."""
        return Fleet(
            num_replicas=num_replicas,
            holds=num_held(points),
            num_seeds=len(points),
            values=self.intervals(points, name),
            tokens_per_s=float(np.median([point["tokens_per_s"] for point in points])),
        )

    def cost_per_hour(self, candidate: Candidate, num_replicas: int) -> float:
        num_gpus = num_replicas * candidate.num_gpus
        more = candidate.host_gib, candidate.link_gb_per_s
        return self.plan.parsed_prices.per_hour(
            candidate.gpu, num_gpus, *(num_replicas * each for each in more)
        )


def _answer(outcome: Outcome) -> Answer | str:
    if outcome.status == "done":
        return dict(outcome.summary or {})
    if outcome.status == "refused":
        return outcome.error or "refused"
    told = f"a run of the plan {outcome.status}: {outcome.error}"
    if outcome.status == "crashed":  # of too little memory, mostly
        raise UserError(f"{told}; finished answers are kept: go on with --resume")
    raise RuntimeError(told)


def base_rate(candidate: Candidate) -> float:
    """Return requests/s of a candidate's traffic at a ``rate_scale`` of 1.

    Of a trace, that of the trace itself, not of a resampled one; of arrivals that have
    a ``rate``, that; else that of the traffic drawn with the plan's seed.
    """
    config = parse_config(with_scale(candidate.run, 1.0))
    synthetic = config.workload.synthetic
    workload = config.workload.model_copy(update={"resample": None})
    traffic = make_workload(workload, config.seed)  # refuses a rate that is none
    if synthetic is not None and "rate" in synthetic.arrivals:
        return float(synthetic.arrivals["rate"])
    return tasks.natural_rate(traffic.requests())


def shares_text(candidate: Candidate) -> bool:
    """Whether a prompt of a candidate's traffic begins as another one."""
    config = parse_config(with_scale(candidate.run, 1.0))
    workload = config.workload.model_copy(update={"resample": None})
    known: set[int] = set()
    for each in make_workload(workload, config.seed).requests():
        first, _ = each.prompt[0]
        if first in known:
            return True
        known.add(first)
    return False
