"""What workers do for a plan: plain data in, plain data out.

Each takes what `request_of` makes: a configuration of ``kvsim run`` and what it is held
to. The same request gives the same answer in any process, so that a plan depends
neither on how many there are nor on which ends first.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.results.objectives import parse_objectives
from sim.simulation.run import Simulation
from sim.simulation.workload import make_workload
from sim.studies.planning.observation import (
    MAX_SHARE,
    numbers_in_system,
    warmup_share,
)
from sim.studies.planning.rate_search import find_threshold, guessed_rate
from sim.studies.planning.trial import Trial, arrivals_of, perform, warmup_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.studies.planning.rate_search import Threshold
    from workloads.spec import RequestSpec

_IDLE_SHARE = 1e-4
"""Of the guessed rate: requests hardly ever meet."""
_NUM_IDLE = 1000
"""Requests of an idle engine, which takes a step for each of their tokens."""
_NUM_PILOTS = 3
_PILOT_LOAD = 0.95
_DEFAULT_WARMUP = 0.05


def request_of(
    run: Mapping[str, Any], objectives: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Return a request to a task: what to run, what it is held to, and `more`."""
    return {"run": dict(run), "objectives": dict(objectives), **more}


def _trial(request: Mapping[str, Any]) -> Trial:
    return Trial(
        run=request["run"],
        objectives=parse_objectives(request["objectives"]),
        warmup_share=request.get("warmup_share") or 0.0,
        num_replicas=request.get("num_replicas", 1),
        by=request.get("by", "random"),
        step_time=request.get("step_time", 1.0),
        bound=request.get("bound"),
    )


def observe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run traffic at a rate and tell what came of it.

    Of `request`: ``rate_scale``, and if need be ``warmup_share``, ``num_replicas``,
    ``by``, ``step_time``, ``details``.
    """
    trial = _trial(request).at(request["rate_scale"])
    seen = perform(trial, details=request.get("details", False))
    return seen.to_dict() | {"rate_scale": request["rate_scale"]}


def threshold(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look for the highest rate that holds, with one seed.

    Of `request`: ``guess`` and ``step`` of the search, ``tolerance``, ``bounds``, all
    in ``rate_scale``.
    """
    trial = _trial(request)
    tried: list[dict[str, Any]] = []
    found = _search(trial, request, request["guess"], request["step"], tried)
    return {"rate_scale": found.rate, "at_bound": found.at_bound, "tried": tried}


def _search(
    trial: Trial,
    request: Mapping[str, Any],
    guess: float,
    step: float,
    tried: list[dict[str, Any]],
) -> Threshold:
    def margin(rate_scale: float) -> float:
        seen = perform(trial.at(rate_scale))
        tried.append(seen.to_dict() | {"rate_scale": rate_scale})
        return seen.margin

    low, high = request.get("bounds") or (0.0, inf)
    tolerance = request["tolerance"]
    return find_threshold(
        margin, guess, step=step, tolerance=tolerance, bounds=(low, high)
    )


def pilot(request: Mapping[str, Any]) -> dict[str, Any]:
    """Get to know a candidate: idle, its threshold roughly, and how it warms up.

    Of `request`: ``tolerance``, ``bounds``, ``seeds``; ``warmup_share`` if it is given.
    """
    trial = _trial(request)
    config = parse_config(dict(trial.at(1.0).run))
    specs = make_workload(config.workload, config.seed).requests()
    guess = guessed_rate(config, specs, trial.objectives) / natural_rate(specs)
    idle = perform(replace(trial.at(guess * _IDLE_SHARE), most=_NUM_IDLE), details=True)
    answer: dict[str, Any] = {"idle": idle.to_dict(), "tried": [], "warmup_share": 0.0}
    if idle.margin > 0 or idle.num_rejected:
        return answer | {"rate_scale": None, "at_bound": ""}
    given = request.get("warmup_share")
    first = Trial(trial.run, trial.objectives, given or _DEFAULT_WARMUP)
    found = _search(first, request, guess, 1.25, answer["tried"])
    if given is None:
        given = _warmup(trial, found.rate * _PILOT_LOAD, request["seeds"])
    return answer | {
        "rate_scale": found.rate,
        "at_bound": found.at_bound,
        "warmup_share": given,
    }


def _warmup(trial: Trial, rate_scale: float, seeds: Sequence[int]) -> float:
    """Return the share of the requests that a run needs to fill up.

    By MSER, and at least the mean life of a request: only then can one have left.
    """
    runs, arrivals_s, lives_s = [], [], []
    for seed in seeds[:_NUM_PILOTS]:
        run = {**trial.at(rate_scale).run, "seed": seed}
        simulation = Simulation(parse_config(run))
        results = simulation.run()
        runs.append(numbers_in_system(results.recording.request_table))
        arrivals_s.append(arrivals_of(simulation.specs))
        lives_s.append((results.summary["mean_e2el_ms"] or 0.0) / 1e3)
    share_of_time = warmup_share(runs)
    # From a share of the time to one of the requests, of all runs together.
    counts = [
        (times_s < max(share_of_time * times_s[-1], life_s)).sum()
        for times_s, life_s in zip(arrivals_s, lives_s, strict=True)
    ]
    return min(MAX_SHARE, float(sum(counts) / sum(map(len, arrivals_s))))


def natural_rate(specs: Sequence[RequestSpec]) -> float:
    """Return the mean rate of requests in their order of arrival, in requests/s."""
    last_s = warmup_of(specs, 1.0)
    return len(specs) / last_s if last_s > 0 else inf


def change(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look for the threshold of a changed configuration, from the old rate on.

    Of `request`: what `threshold` takes. The first rate that is tried is ``guess``, so
    what came of it tells what the change does at the old rate.
    """
    found = threshold(request)
    return found | {"at_base": found["tried"][0]}
