"""The first section: the bound of a run, some sentences, the numbers side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.costs.base import STEP_PARTS
from sim.results.folder import read_json
from sim.results.summary.compared import compared_lines
from sim.results.summary.verdict import verdict_lines
from sim.studies.advice.words import advice_lines, best_rows
from sim.views.report.html import (
    Markup,
    bullets,
    count,
    datum,
    decimal,
    element,
    join,
    listed,
    milliseconds,
    percent,
    plural,
    table,
)
from sim.views.report.looks import tag
from sim.views.report.reduced import FULL
from sim.views.report.sections.step_time import PART_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.views.report.source import Run


_OFTEN_IDLE: Final = 0.5
_MOSTLY: Final = 0.5
_OFTEN_FULL: Final = 0.2
_SOMETIMES_FULL: Final = 0.05
_MANY_PREEMPTIONS: Final = 0.02
"""Preemptions a request."""


def bound_by(run: Run) -> str:
    """Return the bound that kept a run from being faster: room first, then time.

    Requests that wait although a step has tokens to spare, or that are preempted, would
    be served if there were more places or blocks; a plan asks in the same order
    (`sim.studies.planning.search.binding`). Otherwise steps' largest parts bind.
    """
    if not run.steps.num_steps:
        return "Nothing ran: there is not a single step."
    swap_s, total_s = run.steps.seconds["swap_s"], run.steps.seconds["latency_s"]
    if swap_s > _MOSTLY * total_s:
        return f"Bound by swapping: {_largest_parts(run)}."
    waiting = float(run.summary.get("num_waiting_mean") or 0.0)
    is_waiting = waiting >= 1.0 or _queue_share(run) > _MOSTLY
    return _by_room(run, is_waiting=is_waiting) or _by_time(run, is_waiting=is_waiting)


def _by_room(run: Run, *, is_waiting: bool) -> str | None:
    """Return which room requests wait for, if that binds."""
    s, waits = run.summary, run.steps.waits
    waited_s = max(waits.total_s, 1e-300)
    for_seqs, for_blocks = waits.for_seqs_s / waited_s, waits.for_blocks_s / waited_s
    if is_waiting and for_seqs > _MOSTLY:
        return (
            f"Bound by admission: {percent(for_seqs)} of all waiting is for one of "
            f"{count(s['max_num_seqs'])} places (max_num_seqs)."
        )
    full = full_share(run)
    a_request = s["num_preemptions"] / max(s["num_requests"], 1)
    is_full = full > _OFTEN_FULL and a_request > _MANY_PREEMPTIONS
    if is_full or (is_waiting and for_blocks > _MOSTLY and full > _SOMETIMES_FULL):
        return (
            f"Bound by KV capacity: {percent(for_blocks)} of all waiting is for "
            f"some of the {count(s['num_gpu_blocks'])} blocks, with "
            f"{decimal(a_request)} preemptions a request."
        )
    return None


def _by_time(run: Run, *, is_waiting: bool) -> str:
    s, waits = run.summary, run.steps.waits
    if is_waiting and waits.for_tokens_s > _MOSTLY * waits.total_s:
        return (
            f"Bound by the time of steps: prompts wait for the "
            f"{count(s['max_num_batched_tokens'])} tokens of a step "
            f"(max_num_batched_tokens), and {_largest_parts(run)}."
        )
    idle = 1.0 - float(s.get("engine_busy_share") or 0.0)
    if idle > _OFTEN_IDLE:
        return f"Bound by nothing: the engine is idle for {percent(idle)} of the time."
    return f"Bound by the time of steps: {_largest_parts(run)}."


def full_share(run: Run) -> float:
    """Return the share of the time at which the cache was full, see `FULL`."""
    return run.steps.waits.full_s / max(float(run.summary["duration"]), 1e-300)


def _queue_share(run: Run) -> float:
    """Return the share of all time to the first token that was spent queueing."""
    r = run.requests
    ttft_s = r["ttft_s"]
    known = np.isfinite(ttft_s)
    queued_s = (r["first_scheduled_s"] - r["arrival_s"])[known]
    return float(queued_s.sum() / max(float(ttft_s[known].sum()), 1e-300))


def _largest_parts(run: Run) -> str:
    seconds = run.steps.seconds
    total_s = max(seconds["latency_s"], 1e-300)
    largest = sorted(STEP_PARTS, key=lambda part: -seconds[part])[:2]
    first, second = (f"{percent(seconds[part] / total_s)}" for part in largest)
    return (
        f"steps spend {first} of their time on {PART_NAMES[largest[0]]} and {second} "
        f"on {PART_NAMES[largest[1]]}"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A number of the summary: its table, its key, its name, how it is written."""

    group: str
    key: str
    name: str
    show: Callable[[Any], str]


ROWS: Final = (
    Row("Traffic", "num_requests", "requests", count),
    Row("Traffic", "completed", "completed", count),
    Row("Traffic", "rejected", "rejected", count),
    Row("Traffic", "aborted", "aborted", count),
    Row("Traffic", "unfinished", "unfinished", count),
    Row("Traffic", "duration", "simulated time (s)", decimal),
    Row("Traffic", "request_rate", "offered (requests/s)", decimal),
    Row("Traffic", "request_throughput", "served (requests/s)", decimal),
    Row("Traffic", "output_throughput", "output tokens/s", decimal),
    Row("Latency", "mean_ttft_ms", "mean TTFT", milliseconds),
    Row("Latency", "p50_ttft_ms", "p50 TTFT", milliseconds),
    Row("Latency", "p95_ttft_ms", "p95 TTFT", milliseconds),
    Row("Latency", "p99_ttft_ms", "p99 TTFT", milliseconds),
    Row("Latency", "p50_tpot_ms", "p50 TPOT", milliseconds),
    Row("Latency", "p95_tpot_ms", "p95 TPOT", milliseconds),
    Row("Latency", "p99_tpot_ms", "p99 TPOT", milliseconds),
    Row("Latency", "p95_itl_ms", "p95 ITL", milliseconds),
    Row("Latency", "p99_itl_ms", "p99 ITL", milliseconds),
    Row("Latency", "p50_e2el_ms", "p50 E2E", milliseconds),
    Row("Latency", "p95_e2el_ms", "p95 E2E", milliseconds),
    Row("Latency", "p99_e2el_ms", "p99 E2E", milliseconds),
    Row("Cache", "num_gpu_blocks", "KV blocks", count),
    Row("Cache", "kv_cache_usage_mean", "KV usage, mean", percent),
    Row("Cache", "kv_cache_usage_mean_up", "KV usage, while there", percent),
    Row("Cache", "kv_cache_usage_max", "KV usage, highest", percent),
    Row("Cache", "num_preemptions", "preemptions", count),
    Row("Cache", "num_requests_preempted", "requests preempted", count),
    Row("Cache", "recomputed_tokens", "tokens computed again", count),
    Row("Cache", "swapped_out_blocks", "blocks swapped out", count),
    Row("Cache", "copied_blocks", "blocks copied on write", count),
    Row("Cache", "prefix_cache_hit_rate", "prefix hit rate", percent),
    Row("Queues", "num_running_mean", "running, mean", decimal),
    Row("Queues", "num_waiting_mean", "waiting, mean", decimal),
    Row("Queues", "num_waiting_max", "waiting, most", count),
    Row("Traffic", "num_steps", "steps", count),
    Row("Traffic", "mean_step_ms", "mean step", milliseconds),
    Row("Traffic", "engine_busy_share", "engine busy", percent),
    Row("Traffic", "engine_busy_share_up", "engine busy, while there", percent),
)
"""Rows of the table, in its order; one that is 0 in all runs is left out where it
counts a rare event."""

_HARDLY: Final = 0.001
_SCATTERED: Final = 0.2
"""Half of the preemptions in no less of the time are nowhere in particular."""

_OFTEN_ZERO: Final = frozenset(
    {
        "rejected",
        "aborted",
        "unfinished",
        "swapped_out_blocks",
        "copied_blocks",
        "prefix_cache_hit_rate",
    }
)


def show_summary(runs: Sequence[Run]) -> Iterator[Markup]:
    for run in runs:
        if len(runs) > 1:
            yield element("h3", tag(run))
        yield element("div", bullets(sentences(run)), class_="lead")
    if len(runs) > 1:
        yield element("h3", "Compared")
        names = [run.label for run in runs]
        configs, summaries = zip(*((r.config, r.summary) for r in runs), strict=True)
        answer, differences = compared_lines(names, configs, summaries)
        lines = [element("strong", answer), element("span", differences)]
        yield element("div", bullets(lines), class_="lead")
        yield bullets(_comparison(runs))
    yield numbers_table(runs)


def sentences(run: Run, *, advice: bool = True) -> Iterator[Markup]:
    """Yield sentences on a run, the most urgent first; with remedies that help."""
    yield from urgent(run)
    for place, line in enumerate(verdict_lines(run.summary)):
        yield element("span" if place else "strong", line)
    yield element("strong", bound_by(run))
    if advice:
        yield from _advice(run)
    yield _preempted(run)
    yield _full(run)
    yield from served(run)


def urgent(run: Run) -> Iterator[Markup]:
    """Yield the warnings without which the other numbers mislead."""
    for warning in run.summary.get("warnings", ()):
        if warning.startswith(("overloaded", "the queue stalled")):
            yield element("span", _capital(warning), class_="warn")


def served(run: Run) -> Iterator[Markup]:
    """Yield the load, how fast it was served, and the unserved requests."""
    yield _load(run)
    yield from _unserved(run)


def _advice(run: Run) -> Iterator[Markup]:
    """Yield tried remedies that help, or how to try them if an objective is missed."""
    if (path := run.folder.recorded("advice.json")) is not None:
        advice = read_json(path)
        for line in advice_lines(advice):
            yield element("span", line)
        for name, *facts in best_rows(advice):
            yield element("span", f"{name}: {'; '.join(filter(None, facts))}.")
    elif not run.summary.get("verdict", {"holds": True})["holds"]:
        yield element("span", f"What would help: kvsim advise {run.path}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _preempted(run: Run) -> Markup:
    s = run.summary
    number = s["num_preemptions"]
    if not number:
        none = datum(run, "num_preemptions", "0")
        return join([none, " preemptions: every request kept its blocks to the end."])
    costs = []
    if s.get("recomputed_tokens"):
        again = datum(run, "recomputed_tokens", count(s["recomputed_tokens"]))
        costs.append(join([again, " tokens were computed again"]))
    if s.get("swapped_out_blocks"):
        out = datum(run, "swapped_out_blocks", count(s["swapped_out_blocks"]))
        costs.append(join([out, " blocks were swapped out"]))
    parts = [
        datum(run, "num_preemptions", count(number)),
        " preemption" if number == 1 else " preemptions",
        " of ",
        datum(run, "num_requests_preempted", count(s["num_requests_preempted"])),
        f" of {plural(s['num_requests'], 'request')}",
        f" ({_when(run)})",
        ": " if costs else "",
        join(costs, " and "),
        ".",
    ]
    return join(parts)


def _when(run: Run) -> str:
    """Return in how much of the time half of the preemptions fell."""
    time_s = np.sort(run.preemptions["time_s"])
    half = -(-time_s.size // 2)
    if time_s.size < 4:
        return f"at {listed([f'{each:,.0f} s' for each in time_s.tolist()])}"
    spans_s = time_s[half - 1 :] - time_s[: time_s.size - half + 1]
    first = int(np.argmin(spans_s))
    begin_s, end_s = float(time_s[first]), float(time_s[first + half - 1])
    share = (end_s - begin_s) / run.steps.stop_s
    if share > _SCATTERED:
        return f"from {time_s[0]:,.0f} to {time_s[-1]:,.0f} s"
    return (
        f"half of them within {percent(share)} of the time, "
        f"{begin_s:,.0f} to {end_s:,.0f} s"
    )


def _full(run: Run) -> Markup:
    s = run.summary
    share = full_share(run)
    return join(
        [
            "The cache was full, at least ",
            f"{percent(FULL)} of its blocks in use, for ",
            datum(run, "full_share", percent(share), share),
            " of the time; on average ",
            datum(run, "kv_cache_usage_mean", percent(s["kv_cache_usage_mean"])),
            " of the blocks were in use, at most ",
            datum(run, "kv_cache_usage_max", percent(s["kv_cache_usage_max"])),
            ".",
        ]
    )


def _load(run: Run) -> Markup:
    s = run.summary
    parts: list[object] = []
    if s.get("request_rate") is not None:
        rate = datum(run, "request_rate", decimal(s["request_rate"]))
        parts += [rate, " requests/s were offered and "]
    served = datum(run, "request_throughput", decimal(s["request_throughput"]))
    parts += [served, " served"]
    if s.get("p50_ttft_ms") is not None:
        parts += [": median time to the first token ", _spread_of(run, "ttft")]
        parts += [", to the whole answer ", _spread_of(run, "e2el")]
    return join([*parts, "."])


def _spread_of(run: Run, latency: str) -> Markup:
    """Return the median of a latency with p95 and p99; folders of old lack p95."""
    keys = [f"{each}_{latency}_ms" for each in ("p50", "p95", "p99")]
    median, *tails = [
        datum(run, key, milliseconds(value))
        for key in keys
        if (value := run.summary.get(key)) is not None
    ]
    names = ["p95", "p99"][-len(tails) :] if tails else []
    told = [join([name, " ", tail]) for name, tail in zip(names, tails, strict=True)]
    return join([median, " (", join(told, ", "), ")"])


def _unserved(run: Run) -> Iterator[Markup]:
    s = run.summary
    kinds = ("rejected", "aborted", "unsent", "unfinished", "length_capped")
    found = [
        f"{count(s[each])} {each.replace('_', ' ')}" for each in kinds if s.get(each)
    ]
    if found:
        yield join([f"Of {plural(s['num_requests'], 'request')}, {listed(found)}."])


_COMPARED: Final = (
    ("num_preemptions", "preemptions", count, False),
    ("p50_ttft_ms", "p50 TTFT", milliseconds, False),
    ("p95_ttft_ms", "p95 TTFT", milliseconds, False),
    ("p99_ttft_ms", "p99 TTFT", milliseconds, False),
    ("p50_e2el_ms", "p50 E2E", milliseconds, False),
    ("p95_e2el_ms", "p95 E2E", milliseconds, False),
    ("output_throughput", "output tokens/s", decimal, True),
)


def _comparison(runs: Sequence[Run]) -> Iterator[Markup]:
    """Yield for each number that counts which run does best, and which worst."""
    for key, label, show, is_high_good in _COMPARED:
        known = [run for run in runs if run.summary.get(key) is not None]
        if len(known) < 2:
            continue
        ranked = sorted(known, key=lambda run: run.summary[key], reverse=is_high_good)
        best, worst = ranked[0], ranked[-1]
        if show(best.summary[key]) == show(worst.summary[key]):
            shown = datum(best, key, show(best.summary[key]))
            yield join([f"{label}: the same in all, ", shown, "."])
            continue
        what = "most" if is_high_good else "least"
        other = "least" if is_high_good else "most"
        yield join(
            [
                f"{label}: {what} with ",
                tag(best),
                ", ",
                datum(best, key, show(best.summary[key])),
                f"; {other} with ",
                tag(worst),
                ", ",
                datum(worst, key, show(worst.summary[key])),
                ".",
            ]
        )


def numbers_table(runs: Sequence[Run]) -> Markup:
    """Return the numbers of the summaries: of one run in three tables, side by side.

    Of several runs there is one table, with differences to the first run.
    """
    rows = [row for row in ROWS if _is_shown(runs, row)]
    if len(runs) > 1:
        return _compared_table(runs, rows)
    groups = dict.fromkeys(row.group for row in rows)
    tables = (
        table(
            group,
            ["", "value"],
            [[row.name, _cell(runs[0], row)] for row in rows if row.group == group],
        )
        for group in groups
    )
    return element("div", *tables, class_="side")


def _is_shown(runs: Sequence[Run], row: Row) -> bool:
    values = [run.summary.get(row.key) for run in runs]
    if row.key in _OFTEN_ZERO:
        return any(values)
    return any(value is not None for value in values)


def _compared_table(runs: Sequence[Run], rows: Sequence[Row]) -> Markup:
    head: list[object] = ["", tag(runs[0])]
    for run in runs[1:]:
        head += [tag(run), "difference"]
    told = []
    for row in rows:
        first = runs[0].summary.get(row.key)
        cells: list[object] = [row.name, _cell(runs[0], row)]
        for run in runs[1:]:
            cells += [_cell(run, row), _difference(first, run.summary.get(row.key))]
        told.append(cells)
    return table("Numbers of summary.json; differences are to the first", head, told)


def _cell(run: Run, row: Row) -> object:
    value = run.summary.get(row.key)
    return "-" if value is None else datum(run, row.key, row.show(value))


def _difference(first: Any, value: Any) -> str:
    if first is None or value is None:
        return "-"
    if first == value:
        return "="
    if not first:
        return "new"
    change = value / first - 1.0
    if abs(change) < _HARDLY:
        return f"< {percent(_HARDLY)}"
    return f"x {value / first:.3g}" if change >= 2.0 else f"{100 * change:+.1f} %"
