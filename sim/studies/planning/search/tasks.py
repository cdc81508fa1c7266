"""Tasks of a plan's workers: plain data in, plain data out.

Each takes a request of `request_of`: a configuration of ``kvsim run`` and its
objectives. The same request gives the same answer in any process, so that a plan
depends neither on how many there are nor on the order in which they end.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.results.summary.objectives import parse_objectives
from sim.simulation.workload import make_workload
from sim.studies.planning.search.observation import (
    MAX_SHARE,
    mean_life_s,
    numbers_in_system,
    warmup_share,
)
from sim.studies.planning.search.threshold import LEVEL, find_threshold, guessed_rate
from sim.studies.planning.search.trial import (
    Trial,
    arrivals_of,
    num_of_part,
    perform,
    requests_of,
    warmup_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.studies.planning.search.threshold import Threshold
    from workloads.spec import RequestSpec

_IDLE_SHARE = 1e-4
"""Of the guessed rate: requests hardly ever meet."""
_NUM_IDLE, _LEAST_IDLE = 400, 50
"""Requests of an idle engine, which takes a step for each of their tokens; the second
of ranks that divide experts, all of which take each step."""
_NOTHING, _ANYTHING = 1e-4, 1e4
"""Of the guessed rate: below the first an engine holds no traffic, and at the second it
holds all of the traffic at once."""
_NUM_PILOTS = 3
_PILOT_PART = 0.25
"""Of the requests, the first, that a pilot run takes."""
_PILOT_LOAD = 0.95
_DEFAULT_WARMUP = 0.05


def request_of(
    run: Mapping[str, Any], objectives: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Return a request to a task: a configuration, its objectives, and `more`."""
    return {"run": dict(run), "objectives": dict(objectives), **more}


def _trial(request: Mapping[str, Any]) -> Trial:
    return Trial(
        run=request["run"],
        objectives=parse_objectives(request["objectives"]),
        warmup_share=request.get("warmup_share") or 0.0,
        num_replicas=request.get("num_replicas", 1),
        by=request.get("by", "random"),
        fleet=request.get("fleet"),
        step_time=request.get("step_time", 1.0),
        bound=request.get("bound"),
        part=request.get("part", 1.0),
    )


def observe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run traffic at a rate and return its observation.

    Of `request`: ``rate_scale``, and if need be ``warmup_share``, ``num_replicas``,
    ``by``, ``fleet``, ``step_time``, ``part``, ``details``.
    """
    trial = _trial(request).at(request["rate_scale"])
    seen = perform(trial, details=request.get("details", False))
    return seen.to_dict() | {"rate_scale": request["rate_scale"]}


def threshold(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look for the highest rate that holds, with one seed.

    Of `request`: ``guess`` and ``step`` of the search, ``tolerance``, ``bounds``, all
    in ``rate_scale``, the ``slope`` of the margin if it is known, and ``most``, the
    ``rate_scale`` at which a search found that all of the traffic holds at once.
    """
    tried: list[dict[str, Any]] = []
    found = _search(_trial(request), request, request["guess"], request["step"], tried)
    return _told(found) | {"tried": tried}


def _told(found: Threshold) -> dict[str, Any]:
    slope = found.slope
    return {"rate_scale": found.rate, "at_bound": found.at_bound, "slope": slope}


def _search(
    trial: Trial,
    request: Mapping[str, Any],
    guess: float,
    step: float,
    tried: list[dict[str, Any]],
) -> Threshold:
    """Search from a guess; rates that were `tried` before are not run again."""

    def margin(rate_scale: float) -> float:
        for each in tried:
            if each["rate_scale"] == rate_scale:
                return inf if each["margin"] is None else float(each["margin"])
        seen = perform(trial.at(rate_scale))
        tried.append(seen.to_dict() | {"rate_scale": rate_scale})
        return seen.margin

    return find_threshold(
        margin,
        guess,
        step=step,
        tolerance=request["tolerance"],
        bounds=request.get("bounds") or _bounds(guess, request.get("most")),
        slope=request.get("slope"),
    )


def _bounds(guess: float, most: float | None) -> tuple[float, float]:
    """Return where a search ends; `most` is where one from a worse guess ended."""
    if most is None:
        return guess * _NOTHING, guess * _ANYTHING
    return most / _ANYTHING * _NOTHING, most


def idle(request: Mapping[str, Any]) -> dict[str, Any]:
    """Get to know a candidate where requests hardly meet.

    Of `request`: ``warmup_share`` if it is given. The answer has its observation, and
    a ``guess`` of the ``rate_scale`` that holds.
    """
    trial = _trial(request)
    config = parse_config(dict(trial.at(1.0).run))
    specs = make_workload(config.workload, config.seed).requests()
    guess = guessed_rate(config, specs, trial.objectives) / natural_rate(specs)
    trial = replace(trial.at(guess * _IDLE_SHARE), most=_num_idle(config.engine))
    return {"idle": perform(trial, details=True).to_dict(), "guess": guess}


def _num_idle(engine: EngineConfig) -> int:
    if not engine.enable_expert_parallel:
        return _NUM_IDLE
    return max(_LEAST_IDLE, _NUM_IDLE // engine.data_parallel_size)


def pilot(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look for the threshold of a candidate roughly, and see how it warms up.

    Of `request`: ``guess``, ``tolerance``, ``bounds``, ``seeds``; ``warmup_share`` if
    it is given.
    """
    trial = _trial(request)
    tried: list[dict[str, Any]] = []
    config = parse_config(dict(trial.at(1.0).run))
    num_requests = len(make_workload(config.workload, config.seed).requests())
    given, guess = request.get("warmup_share"), request["guess"]
    share = num_of_part(num_requests, _PILOT_PART) / num_requests
    default = _DEFAULT_WARMUP * share
    trial = replace(trial, warmup_share=given or default, part=_PILOT_PART)
    found = _search(trial, request, guess, 1.25, tried)
    if given is None:
        given = _warmup(trial, found.rate * _PILOT_LOAD, request["seeds"]) * share
    return _told(found) | {"tried": tried, "warmup_share": given}


def _warmup(trial: Trial, rate_scale: float, seeds: Sequence[int]) -> float:
    """Return the share of the requests that a run needs to fill up.

    By MSER, and at least the mean life of a request: only then can one have left.
    """
    runs, arrivals_s, lives_s = [], [], []
    for seed in seeds[:_NUM_PILOTS]:
        run = {**trial.at(rate_scale).run, "seed": seed}
        table, specs = requests_of(replace(trial, run=run))
        runs.append(numbers_in_system(table))
        arrivals_s.append(arrivals_of(specs))
        lives_s.append(mean_life_s(table))
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

    Of `request`: the keys of `threshold`, and ``before``: the same seed's observation
    of the unchanged configuration at ``guess``, and its ``threshold``. The observation
    of the change at that rate is ``at_base``. If that is the same, so is the threshold;
    if it differs a little, the threshold moves with it by the slope; only else it is
    searched.
    """
    before, slope, guess = request["before"], request["slope"], request["guess"]
    seen = perform(_trial(request).at(guess)).to_dict() | {"rate_scale": guess}
    old: float = before["threshold"]
    if _is_alike(before, seen):
        return {"rate_scale": old, "at_bound": "", "at_base": seen}
    shift = _shift(before["margin"], seen["margin"], slope)
    is_level = shift < inf and abs(seen["margin"]) <= LEVEL
    if is_level and abs(shift) <= log(1 + request["tolerance"]):
        return {"rate_scale": old * exp(shift), "at_bound": "", "at_base": seen}
    if shift < inf:
        guess = old * exp(shift)
    tried = [seen]
    found = _search(_trial(request), request, guess, request["step"], tried)
    return _told(found) | {"at_base": seen}


def _is_alike(before: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
    """Whether a change made no difference to any request."""
    return before["margins"] == seen["margins"] and all(
        value is None or before["values"][name] == value
        for name, value in seen["values"].items()
    )


def _shift(before: float | None, after: float | None, slope: float | None) -> float:
    """Return by how much a threshold moves with a margin, as a logarithm.

    ``inf`` where a margin or the slope is unknown.
    """
    if before is None or after is None or slope is None:
        return inf
    return (before - after) / slope
