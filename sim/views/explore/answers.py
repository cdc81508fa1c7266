"""Answers of the page on runs: tiles, figures, sentences and words to take along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sim.results.metrics import quantity
from sim.results.summary.compared import compared_lines
from sim.results.summary.objectives import parse_objectives
from sim.results.summary.verdict import verdict_lines
from sim.views.explore.kept import live
from sim.views.report.charts import Chart
from sim.views.report.html import (
    Markup,
    bullets,
    count,
    element,
    join,
    milliseconds,
    percent,
)
from sim.views.report.plotly_charts import specification
from sim.views.report.sections.batch import show_batch
from sim.views.report.sections.cache import show_cache
from sim.views.report.sections.capacity import show_capacity
from sim.views.report.sections.latency import distributions, percentiles
from sim.views.report.sections.summary import numbers_table, sentences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sim.views.explore.base import Base, Settings
    from sim.views.explore.kept import Kept, LiveRun

NOW: Final = "now"
"""Label of the run of the page's settings beside others."""

PINNED: Final = "pinned"
"""The page's name of the run that tiles are compared with."""

_NUMBERS: Final[Sequence[tuple[str, str, Callable[[Any], str], bool]]] = (
    ("num_preemptions", "preemptions", count, False),
    ("kv_cache_usage_max", "KV usage, highest", percent, False),
    ("kv_cache_usage_mean", "KV usage, mean", percent, False),
    ("num_waiting_max", "waiting, most", count, False),
    ("p95_ttft_ms", "p95 TTFT", milliseconds, False),
    ("p95_tpot_ms", "p95 TPOT", milliseconds, False),
    ("p95_e2el_ms", "p95 E2E", milliseconds, False),
    ("output_throughput", "output tokens/s", count, True),
)
"""Key of the summary, its words, how it is written, and whether more is better."""

_HARDLY: Final = 0.005


def answer(
    base: Base,
    settings: Settings,
    now: Kept,
    beside: Sequence[tuple[str, Kept]] = (),
) -> dict[str, Any]:
    """Return the page's answer on a run, JSON-ready.

    Parameters
    ----------
    base, settings
        The base and the settings of the run.
    now
        The run.
    beside
        Runs that are shown with it, and their names.
    """
    others = [
        live(number, label, kept) for number, (label, kept) in enumerate(beside, 2)
    ]
    current = live(1, NOW, now)
    runs = [*others, current]
    cache, queues = [*show_cache(runs)], [*show_batch(runs)]
    latency: list[Markup | Chart] = [percentiles(runs)]
    if any(run.served.any() for run in runs):
        latency.insert(0, distributions(runs))
    blocks: dict[str, Sequence[Markup | Chart]] = {
        "cache": [*_of_several(now), *cache],
        "queues": queues,
        "latency": latency,
        "capacity": [*show_capacity(runs)],
        "numbers": [numbers_table(runs)],
    }
    return {
        "summary": dict(now.summary),
        "said": _sentences(current, others),
        "tiles": tiles(now, dict(beside).get(PINNED)),
        "html": {key: _html(each) for key, each in blocks.items()},
        "figures": {
            block.key: specification(block)
            for each in blocks.values()
            for block in each
            if isinstance(block, Chart)
        },
        "resolved": resolved(now),
        "warnings": list(now.summary["warnings"]),
        "yaml": now.yaml,
        "command": base.command(settings),
        "serve": now.serve,
        "notServed": list(now.not_served),
        "settings": settings,
    }


def _of_several(now: Kept) -> Iterable[Markup]:
    if now.num_engines > 1:
        yield element(
            "p",
            f"{now.num_engines} engines: the line is the mean of their caches, the "
            f"band reaches from the emptiest to the fullest; queues add up.",
            class_="note",
        )


def _sentences(current: LiveRun, others: Sequence[LiveRun]) -> str:
    """Return sentences on the run as HTML, first a comparison with the others."""
    told = [*sentences(current, advice=False)]
    if others:
        runs = [*others, current]
        lines = compared_lines(
            [run.label for run in runs],
            [run.config for run in runs],
            [run.summary for run in runs],
        )
        told = [*(element("span", line) for line in lines if line), *told]
    return bullets(told)


def _html(blocks: Iterable[Markup | Chart]) -> str:
    """Return a section; figures are places that the page's script fills."""
    return join(
        _place(block) if isinstance(block, Chart) else block for block in blocks
    )


def _place(chart: Chart) -> Markup:
    caption = element("figcaption", chart.caption, f" {chart.hint}" * bool(chart.hint))
    place = element(
        "div",
        id=f"plot-{chart.key}",
        class_="plot",
        role="img",
        aria_label=chart.caption,
        style=f"height:{chart.height_px}px",
    )
    return element("figure", caption, place, id=chart.key)


# -- tiles --------------------------------------------------------------------------


def tiles(now: Kept, pinned: Kept | None) -> list[dict[str, str]]:
    """Return the verdict and the numbers that matter, each with its difference.

    ``state`` is ``holds``, ``fails`` or empty; of a difference ``better``, ``worse`` or
    empty.
    """
    return [*_verdict_tiles(now), *_number_tiles(now, pinned)]


def _verdict_tiles(now: Kept) -> Iterable[dict[str, str]]:
    verdict = now.summary.get("verdict")
    if verdict is None:
        return
    state = _state(verdict["holds"])
    answer_, *_ = verdict_lines(now.summary)
    yield _tile("verdict", "verdict", state.capitalize(), answer_, state)
    labels = {
        each.name: each.label() for each in parse_objectives(now.config["objectives"])
    }
    for each in verdict["objectives"]:
        value = each["value"]
        is_ms = each["name"].endswith("_ms")
        shown = (
            "-" if value is None else milliseconds(value) if is_ms else quantity(value)
        )
        margin = each["margin"]
        under = "" if margin is None else _margin(margin)
        told = f"{labels[each['name']]}{' ms' * is_ms}"
        key = f"objectives.{each['name']}"
        yield _tile(key, told, shown, under, _state(each["holds"]))


def _margin(margin: float) -> str:
    if margin < -1.0:
        return f"{1.0 - margin:,.1f} times the limit"
    return f"{abs(margin):.0%} {'to spare' if margin >= 0 else 'beyond it'}"


def _state(holds: bool) -> str:
    return "holds" if holds else "fails"


def _blocks(summary: Mapping[str, Any], num_engines: int) -> str:
    """Say of which blocks the highest usage is a share."""
    pools = summary.get("pools", ())
    if len({pool["num_gpu_blocks"] for pool in pools}) > 1:
        return "of the blocks of an engine"
    told = f"of {summary['num_gpu_blocks']:,} blocks"
    return told + (" on each engine" if num_engines > 1 else "")


def _number_tiles(now: Kept, pinned: Kept | None) -> Iterable[dict[str, str]]:
    s = now.summary
    preempted = f"{s['num_requests_preempted']:,}"
    under = {
        "num_preemptions": f"of {preempted} of {s['num_requests']:,} requests"
        if s["num_preemptions"]
        else f"of {s['num_requests']:,} requests",
        "kv_cache_usage_max": _blocks(s, now.num_engines),
        "num_waiting_max": f"mean {s['num_waiting_mean']:.1f}",
        "output_throughput": f"{s['request_throughput']:.3g} of "
        f"{s['request_rate']:.3g} requests/s served"
        if s.get("request_rate") is not None
        else "",
    }
    for key, label, show, more in _NUMBERS:
        value = s.get(key)
        shown = "-" if value is None else show(value)
        tile = _tile(key, label, shown, under.get(key, ""))
        if pinned is not None:
            tile |= _difference(value, pinned.summary.get(key), show, more=more)
        yield tile


def _tile(
    key: str, label: str, value: str, under: str, state: str = ""
) -> dict[str, str]:
    return {
        "key": key,
        "label": label,
        "value": value,
        "under": under,
        "state": state,
        "before": "",
        "change": "",
    }


def _difference(
    value: Any, before: Any, show: Callable[[Any], str], *, more: bool
) -> dict[str, str]:
    if before is None or value is None:
        return {}
    found = {"before": f"pinned: {show(before)}"}
    if abs(value - before) <= _HARDLY * max(abs(before), 1e-12):
        return found | {"change": ""}
    return found | {"change": "better" if (value > before) is more else "worse"}


def resolved(now: Kept) -> dict[str, Any]:
    """Return the values of the release's defaults, by key of a control."""
    s = now.summary
    engine = now.config["engine"]
    capacity = s["capacity"]
    found = {
        "engine.num_gpu_blocks_override": s["num_gpu_blocks"],
        "engine.gpu_memory_utilization": capacity["gpu_memory_utilization"],
        "engine.max_num_seqs": s["max_num_seqs"],
        "engine.max_num_batched_tokens": s["max_num_batched_tokens"],
        "engine.max_model_len": capacity["max_model_len"],
    }
    return {key: v for key, v in found.items() if engine.get(key.split(".")[1]) is None}
