"""Remedies tried on the traffic of a run, and the effect of each of them.

Every remedy meets the same traffic as the run itself, seed by seed, so that a small
effect shows: what is judged is the mean of the differences.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.results.recording.recorder import Recording
from sim.results.summary.objectives import parse_objectives
from sim.simulation.run import Simulation
from sim.studies.advice.remedies import remedies_for
from sim.studies.planning.search.binding import binding_of, facts_of, mean_facts
from sim.studies.planning.search.tasks import natural_rate
from sim.studies.sweeps.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.results.summary.objectives import Objective
    from sim.studies.advice.remedies import Remedy
    from sim.studies.sweeps.job import Executor

NUM_SEEDS = 5
DEFAULT_OBJECTIVE = "p95_e2el_ms"
"""Judged where a run promises nothing."""

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of 97.5 % of Student's t with 1, 2, ... degrees of freedom."""
MAX_SEEDS = len(_T_95) + 1
_HARDLY = 0.01
"""Smaller effects are none, however sure they are."""
_WIDE = 0.05
"""An interval about none that reaches farther says nothing, not that nothing is."""
_MARGINS = (-4.6, 9.2)
"""A hundredth of a limit and ten thousand times it: beyond, numbers say no more."""
_NUM_WINDOWS, _WINDOW_S = 10, 60.0
"""A trace is resampled in windows of a minute, or of the tenth part of it."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a remedy, on average over seeds.

    Parameters
    ----------
    name, flags, needs, changes
        Those of the remedy.
    verdict
        ``helps``, ``no effect``, ``harms``, ``unclear`` if it may do either by more
        than 5 %, or ``cannot run``.
    value
        Mean of the failing objective with the remedy, in its own unit.
    change, low, high
        Change of the objective as a share, with its interval of 95 %.
    others
        Change of each other objective, as a share.
    worst
        Mean margin of the worst objective, by which remedies are ranked: logarithm of
        value over limit.
    seeds_that_hold
        In how many seeds all objectives were kept.
    reason
        Why it cannot run.
    """

    name: str
    flags: str
    needs: str
    changes: Mapping[str, Any]
    verdict: str
    value: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    others: Mapping[str, float] | None = None
    worst: float | None = None
    seeds_that_hold: int = 0
    reason: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """Remedies that were tried on a run, and how far each helps.

    Parameters
    ----------
    objective, limit
        The objective that is judged: the one that fails first.
    is_promised
        Whether the run has objectives of its own.
    value
        Mean over seeds as the run is.
    num_seeds, seeds_that_hold
        Traffic that was tried, and on how much of it all objectives are kept.
    resource, binds
        The resource that binds the run, as a key and in a sentence.
    best
        The three remedies that help most, one of a kind.
    tried
        All remedies, the best first.
    """

    objective: str
    limit: float
    is_promised: bool
    value: float
    num_seeds: int
    seeds_that_hold: int
    resource: str
    binds: str
    best: tuple[Effect, ...]
    tried: tuple[Effect, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``advice.json``."""
        return asdict(self)


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a configuration to its end, and tell its objectives and what binds it."""
    simulation = Simulation(parse_config(dict(request["run"])))
    results = simulation.run()
    summary = results.summary
    found = {each["name"]: each["value"] for each in summary["verdict"]["objectives"]}
    answer = {"values": found, "holds": summary["verdict"]["holds"]}
    answer["preemptions"] = summary["num_preemptions"] / max(summary["completed"], 1)
    finds = summary.get("prefix_cache_hits") or simulation.config.workload.sessions
    answer["loses_prefixes"] = bool(finds and summary.get("num_evictions"))
    if request["facts"]:
        assert isinstance(results.recording, Recording)
        share = simulation.capacity.gpu_memory_utilization
        answer["facts"] = facts_of(simulation, results.recording, 0.0)
        answer["facts"]["gpu_memory_utilization"] = share
    return answer


def advise(
    run: Mapping[str, Any],
    executor: Executor,
    *,
    base_value: float | None = None,
    num_seeds: int = NUM_SEEDS,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Advice:
    """Try what may help a run; the executor is open.

    Parameters
    ----------
    run
        Its configuration, as plain data.
    executor
        The executor that simulates.
    base_value
        Value of `DEFAULT_OBJECTIVE`, for a run without objectives.
    num_seeds
        Seeds of the traffic, 2 to 11.
    on_progress
        Told the phase, how many of its runs are done, and how many there are.

    Raises
    ------
    ConfigError
        If the run itself cannot be run.
    KeyboardInterrupt
        If the executor was stopped.
    """
    is_promised = bool(run.get("objectives"))
    if not is_promised:
        run = {**run, "objectives": {DEFAULT_OBJECTIVE: base_value or 1.0}}
    study = _Study(run, executor, num_seeds, on_progress or (lambda *_: None))
    base = study.measured("the run itself", [run], facts=True)[0]
    if isinstance(base, str):
        raise ConfigError(base)
    failing = study.failing(base)
    value = _mean(base, failing.name)
    if value is None:
        raise ConfigError(
            f"objectives.{failing.name}: no request that was served has it, so nothing "
            f"would show what makes it better; give objectives that this traffic has"
        )
    config = parse_config(dict(run))
    facts = mean_facts([each["facts"] for each in base])
    facts["loses_prefixes"] = float(np.mean([each["loses_prefixes"] for each in base]))
    preemptions = float(np.mean([each["preemptions"] for each in base]))
    binding = binding_of(facts, preemptions, failing.name, value)
    resource = _resource(binding.resource, facts)
    remedies = remedies_for(config.engine, facts, resource)
    answers = study.measured("remedies", [each.apply(run) for each in remedies])
    pairs = zip(remedies, answers, strict=True)
    tried = [study.effect(each, base, own, failing) for each, own in pairs]
    tried.sort(key=_rank)
    return Advice(
        objective=failing.name,
        limit=failing.limit,
        is_promised=is_promised,
        value=value,
        num_seeds=num_seeds,
        seeds_that_hold=sum(each["holds"] for each in base),
        resource=resource,
        binds=binding.sentence,
        best=tuple(_of_a_kind(tried)[:3]),
        tried=tuple(tried),
    )


def _resource(found: str, facts: Mapping[str, float]) -> str:
    """Return the resource that binds; the budget where prompts mostly wait for it."""
    waits = facts["waiting_tokens"] > 0.5 and facts["waiting_share"] > 0.1
    is_time = found not in ("kv_capacity", "max_num_seqs", "swap_bandwidth")
    return "max_num_batched_tokens" if waits and is_time else found


def _rank(effect: Effect) -> tuple[int, float]:
    order = ("helps", "unclear", "no effect", "harms", "cannot run")
    return order.index(effect.verdict), effect.worst or 0.0


def _of_a_kind(tried: Sequence[Effect]) -> list[Effect]:
    """Return those that help, one of each key."""
    first = {each.key: each for each in reversed(tried) if each.verdict == "helps"}
    return sorted(first.values(), key=_rank)


def _mean(answers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [a["values"][name] for a in answers if a["values"][name] is not None]
    return float(np.mean(known)) if known else None


class _Study:
    """The seeds of a run's traffic, and the measurements with them."""

    def __init__(
        self,
        run: Mapping[str, Any],
        executor: Executor,
        num_seeds: int,
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self.objectives = parse_objectives(run["objectives"])
        self._executor = executor
        self._on_progress = on_progress
        self._seeds = [int(run.get("seed", 0)) + i for i in range(num_seeds)]

    def measured(
        self, phase: str, runs: Sequence[Mapping[str, Any]], *, facts: bool = False
    ) -> list[list[dict[str, Any]] | str]:
        """Return the answers of each run, seed by seed, or why it cannot be run."""
        requests = [
            {"run": {**resampled(run), "seed": seed}, "facts": facts}
            for run in runs
            for seed in self._seeds
        ]
        jobs = [Job(i, {}, request) for i, request in enumerate(requests)]
        found: dict[int, Any] = {}
        self._on_progress(phase, 0, len(jobs))
        for outcome in self._executor.run(jobs, measure):
            if outcome.status not in ("done", "refused"):
                raise RuntimeError(f"a remedy {outcome.status}: {outcome.error}")
            found[outcome.index] = outcome.summary or outcome.error
            self._on_progress(phase, len(found), len(jobs))
        if len(found) < len(jobs):
            raise KeyboardInterrupt
        number = len(self._seeds)
        groups = [
            [found[i] for i in range(first, first + number)]
            for first in range(0, len(jobs), number)
        ]
        return [
            next((each for each in group if isinstance(each, str)), group)
            for group in groups
        ]

    def failing(self, base: Sequence[Mapping[str, Any]]) -> Objective:
        """Return the objective that is missed by most, or the nearest to its limit."""
        return max(
            self.objectives, key=lambda each: float(np.mean(_margins(each, base)))
        )

    def effect(
        self,
        remedy: Remedy,
        base: Sequence[Mapping[str, Any]],
        answers: Sequence[Mapping[str, Any]] | str,
        failing: Objective,
    ) -> Effect:
        """Return the effect of a remedy on the failing objective and on the others."""
        own = (remedy.name, remedy.flags, remedy.needs, remedy.changes)
        if isinstance(answers, str):
            return Effect(*own, "cannot run", reason=answers, key=remedy.key)
        moves = _margins(failing, answers) - _margins(failing, base)
        mean, half = float(moves.mean()), _half_interval(moves)
        low, high = mean - half, mean + half
        # A floor rises where a limit would fall.
        sign = -1.0 if failing.is_floor else 1.0
        ends = sorted(exp(sign * each) - 1.0 for each in (low, high))
        worst = np.max([_margins(each, answers) for each in self.objectives], axis=0)
        others = {
            each.name: _change(each, base, answers)
            for each in self.objectives
            if each.name != failing.name
        }
        return Effect(
            *own,
            _verdict(mean, half),
            value=_mean(answers, failing.name),
            change=exp(sign * mean) - 1.0,
            low=ends[0],
            high=ends[1],
            others=others,
            worst=float(worst.mean()),
            seeds_that_hold=sum(each["holds"] for each in answers),
            key=remedy.key,
        )


def _verdict(mean: float, half: float) -> str:
    """Return the verdict on a mean move of the margin, which is known to `half`."""
    if abs(mean) <= half:
        return "unclear" if exp(abs(mean) + half) - 1.0 > _WIDE else "no effect"
    if abs(exp(mean) - 1.0) < _HARDLY:
        return "no effect"
    return "helps" if mean < 0.0 else "harms"


def _margins(objective: Objective, answers: Sequence[Mapping[str, Any]]) -> Any:
    margins = [objective.margin(each["values"][objective.name]) for each in answers]
    return np.clip(np.array(margins, np.float64), *_MARGINS)


def _change(
    objective: Objective,
    base: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
) -> float:
    move = float((_margins(objective, answers) - _margins(objective, base)).mean())
    return exp(-move if objective.is_floor else move) - 1.0


def _half_interval(moves: Any) -> float:
    """Return half of the interval of 95 % of a mean, by Student's t."""
    number = len(moves)
    return float(_T_95[number - 2] * moves.std(ddof=1) / sqrt(number))


def resampled(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run whose traffic differs from seed to seed, that of a trace as well."""
    workload = run["workload"]
    if workload.get("trace") is None or workload.get("resample") is not None:
        return dict(run)
    from sim.simulation.workload import make_workload  # noqa: PLC0415

    config = parse_config(dict(run))
    specs = make_workload(config.workload, config.seed).requests()
    length_s = len(specs) / natural_rate(specs)
    if not length_s:  # all come at once: there is no other time to draw from
        return dict(run)
    window_s = min(_WINDOW_S, length_s / _NUM_WINDOWS)
    table = {"window_s": window_s, "num_windows": None}
    return {**run, "workload": {**workload, "resample": table}}
