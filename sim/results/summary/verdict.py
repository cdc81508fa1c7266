"""Whether a run kept its objectives: by how much, and which one fails first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.metrics import SERVED, goodput, quantity
from sim.results.schema import LATENCIES, OF_REQUESTS
from sim.results.tables.percentiles import percentiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.results.recording.recorder import Recording
    from sim.results.summary.objectives import Objective

_OF_REQUESTS = {each.key for each in OF_REQUESTS}
_FAR = 10.0
"""From so many times the limit on, a percentage says less than a factor."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An objective, and the value that the run reached.

    Parameters
    ----------
    name, limit
        As in the configuration.
    value
        The measured value; None where nothing was measured.
    holds
        Whether the limit is kept.
    margin
        Share of the limit by which it is kept; negative where it is missed, and None
        where nothing was measured.
    """

    name: str
    limit: float
    value: float | None
    holds: bool
    margin: float | None


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict on a run with objectives.

    Parameters
    ----------
    holds
        Whether every request was served and every objective kept.
    answer
        The same in a sentence, with the objective that fails first.
    lines
        Further sentences: on the other objectives, and on goodput.
    fails_first
        The objective that is missed by most or, where all hold, the nearest to its
        limit.
    objectives
        All of them, that one first.
    goodput_share, request_goodput
        Requests that were served within the limits of latency: as a share, and a
        second.
    """

    holds: bool
    answer: str
    lines: tuple[str, ...]
    fails_first: str
    objectives: tuple[Judged, ...]
    goodput_share: float | None
    request_goodput: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``verdict`` of ``summary.json``."""
        return asdict(self) | {"lines": list(self.lines)}


def judged(
    objectives: Sequence[Objective],
    recording: Recording,
    numbers: Mapping[str, Any],
    num_requests: int,
) -> RunVerdict:
    """Return the verdict on a run.

    Parameters
    ----------
    objectives
        The objectives, at least one.
    recording
        The tables of the run.
    numbers
        The numbers of the summary, which are taken where they are there.
    num_requests
        Requests of the workload.
    """
    values = {
        each.name: _value(each, recording, numbers, num_requests) for each in objectives
    }
    ranked = sorted(objectives, key=lambda each: -each.margin(values[each.name]))
    found = tuple(_judged(each, values[each.name]) for each in ranked)
    limits_ms = limits_ms_of(objectives)
    good: dict[str, Any] = {}
    if limits_ms:
        table, duration_s = recording.request_table, numbers["duration"]
        good = goodput(table, limits_ms, num_requests, duration_s)
    unserved = num_requests - numbers["completed"]
    holds = not unserved and all(each.holds for each in found)
    lines = [f"{_said(each)}." for each in found[1:]]
    if unserved:
        lines.append(f"{unserved:,} of {num_requests:,} requests were not served.")
    if good:
        lines.append(
            f"Goodput: {good['request_goodput']:.4g} requests/s; "
            f"{good['goodput_share']:.1%} of the requests kept "
            f"{' and '.join(f'{k} {quantity(v)}' for k, v in limits_ms.items())}."
        )
    return RunVerdict(
        holds=holds,
        answer=_answer(found, is_served=not unserved),
        lines=tuple(lines),
        fails_first=found[0].name,
        objectives=found,
        goodput_share=good.get("goodput_share"),
        request_goodput=good.get("request_goodput"),
    )


def verdict_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return whether the run kept its objectives, in sentences; none without any."""
    verdict = summary.get("verdict")
    return [] if verdict is None else [verdict["answer"], *verdict["lines"]]


def _answer(found: Sequence[Judged], *, is_served: bool) -> str:
    first = found[0]
    missed = sum(not each.holds for each in found)
    if not missed:
        if not is_served:
            return f"Fails: not every request is served; {_said(first)}."
        which = ", the nearest to its limit," if len(found) > 1 else ""
        said = _said(first).removeprefix(first.name)
        return f"Holds: {first.name}{which}{said}."
    number = f"{missed} of {len(found)} objectives" if len(found) > 1 else "the limit"
    return f"Fails {number}: {_said(first)}{', the first to fail' * (len(found) > 1)}."


def _said(each: Judged) -> str:
    if each.value is None or each.margin is None:
        return f"{each.name} was not measured: no request that was served has it"
    is_share = each.name == "goodput" or "kv_cache_usage" in each.name
    value, limit = (
        (f"{each.value:.1%}", f"{each.limit:.4g}")
        if is_share
        else (quantity(each.value), quantity(each.limit))
    )
    if each.name != "goodput" and each.value >= _FAR * each.limit:
        return f"{each.name} is {value}, {each.value / each.limit:,.0f} times {limit}"
    side = "below" if each.value < each.limit else "above"
    if each.value == each.limit:
        return f"{each.name} is {value}, on its limit"
    return f"{each.name} is {value}, {abs(each.margin):.0%} {side} {limit}"


def _judged(objective: Objective, value: float | None) -> Judged:
    holds = objective.margin(value) <= 0.0
    margin = None
    if value is not None:
        margin = 1.0 - value / objective.limit
        margin = -margin if objective.is_floor else margin
    return Judged(objective.name, objective.limit, value, holds, margin)


def limits_ms_of(objectives: Sequence[Objective]) -> dict[str, float]:
    """Return the limits of a good request: the tightest of each latency."""
    limits: dict[str, float] = {}
    for each in objectives:
        pairs = each.limits_ms
        if each.of in _OF_REQUESTS:
            pairs = ((each.of, each.limit),)
        for of, limit_ms in pairs:
            limits[f"{of}_ms"] = min(limit_ms, limits.get(f"{of}_ms", limit_ms))
    return limits


def _value(
    objective: Objective,
    recording: Recording,
    numbers: Mapping[str, Any],
    num_requests: int,
) -> float | None:
    """Return the number of an objective, that of the summary where it is there."""
    if objective.name in numbers:
        found: float | None = numbers[objective.name]
    elif objective.of == "goodput":
        limits_ms = {f"{of}_ms": limit for of, limit in objective.limits_ms}
        requests = recording.request_table
        found = goodput(requests, limits_ms, num_requests, 1.0)["goodput_share"]
    elif objective.of == "kv_cache_usage":
        percent, duration_s = objective.percent or 0.0, numbers["duration"]
        found = recording.totals.usage_percentile(percent, duration_s)
    elif objective.of == "itl":
        ranks = [objective.percent or 0.0]
        known = recording.itl.moments[0]
        found = recording.itl.percentiles(ranks)[0] * 1e3 if known else None
    else:
        found = _of_requests(objective, recording)
    return found


def _of_requests(objective: Objective, recording: Recording) -> float | None:
    """Return the mean of preemptions, or a percentile of a latency, of those served."""
    requests = recording.request_table
    is_served = requests.is_one_of("status", SERVED)
    if objective.of == "preemptions":
        numbers = requests["num_preemptions"][is_served]
        return float(numbers.mean()) if len(numbers) else None
    values = requests[LATENCIES[objective.of].column][is_served]
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    ones = np.ones(len(values), np.int64)
    ranks = [objective.percent or 0.0]
    return percentiles(lambda: [(values, ones)], ranks)[0] * 1e3
