"""Figures of a plan, each a function of ``plan.json``."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from sim.results.schema import LATENCIES
from sim.studies.planning.answer.file import labels
from sim.studies.planning.phases.outcome import is_noise, noise_word, shown_confidence
from sim.views.plots import style
from sim.views.plots.output import NotShownError

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Plan = Mapping[str, Any]

COLOURS = (
    style.BLUE,
    style.ORANGE,
    style.GREEN,
    style.VERMILLION,
    style.SKY,
    style.PURPLE,
    style.BLACK,
    style.GREY,
)
_LINES = ("-", "--", ":", "-.")
_MAX_PANELS = 4
_LEGEND_CHARACTERS, _PANEL_CHARACTERS, _BARS_CHARACTERS = 36, 52, 44
"""Characters of a line of a legend beside panels, and above one of two panels."""
_OUT_OF_SIGHT = 6.0
"""Values beyond so many times the limit tell nothing more."""


def looks(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return how each candidate is drawn: a colour a GPU, a line a size and model."""
    found = [each for each in plan["candidates"] if "rate" in each]
    gpus = list(dict.fromkeys(each["gpu"] for each in found))
    kinds = list(dict.fromkeys(_kind(each) for each in found))
    return {
        each["name"]: {
            "color": COLOURS[gpus.index(each["gpu"]) % len(COLOURS)],
            "linestyle": _LINES[kinds.index(_kind(each)) % len(_LINES)],
        }
        for each in found
    }


def _kind(each: Plan) -> tuple[str, int]:
    return each["model"], each["tensor_parallel_size"]


def load_points(each: Plan, name: str) -> dict[float, list[float]]:
    """Return values of runs by their load, as a share of the highest rate."""
    points: dict[float, list[float]] = {}
    for point in each["curve"]:
        value = point["values"].get(name)
        if point["load"] and value is not None and not point["is_overloaded"]:
            points.setdefault(point["load"], []).append(value)
    return dict(sorted(points.items()))


@style.house_style
def capacity_curves(plan: Plan) -> Figure:
    """Draw the values of each candidate's objectives at growing rates."""
    found = [each for each in plan["candidates"] if "rate" in each]
    best = max(found, key=lambda each: each["rate"]["value"])
    figure = style.titled_figure(
        f"One engine holds up to {best['rate']['value']:,.3g} requests/s "
        f"({labels(plan)[best['name']]})",
        f"{plan['traffic']['title']}; medians of seeds; bands: highest rates "
        f"at {shown_confidence(plan):.0%} confidence",
    )
    objectives = plan["objectives"][:_MAX_PANELS]
    panels = figure.subplots(
        ncols=len(objectives),
        squeeze=False,
        gridspec_kw=style.margins(0.08, 0.75, 0.085, 0.865, wspace=0.32),
    )[0]
    styles = looks(plan)
    for axes, objective in zip(panels, objectives, strict=True):
        _draw_candidates(axes, found, objective, styles)
    handles, names = panels[0].get_legend_handles_labels()
    said = [fill(labels(plan)[name], _LEGEND_CHARACTERS) for name in names]
    figure.legend(
        handles, said, loc="center left", bbox_to_anchor=(0.76, 0.5), fontsize=8
    )
    return figure


def _draw_candidates(
    axes: Axes,
    found: list[Plan],
    objective: Plan,
    styles: Mapping[str, dict[str, Any]],
) -> None:
    name, limit = objective["name"], objective["limit"]
    rates: list[float] = []
    highs: list[float] = []
    lowest = limit
    for each in found:
        points = load_points(each, name)
        rate = each["rate"]
        x = [load * rate["value"] for load in points]
        y = [float(np.median(values)) for values in points.values()]
        axes.plot(
            x, y, marker="o", markersize=3, label=each["name"], **styles[each["name"]]
        )
        axes.axvspan(
            rate["low"],
            rate["high"],
            color=styles[each["name"]]["color"],
            alpha=0.12,
            lw=0,
        )
        rates += x
        highs += y
        lowest = min([lowest, *(value for value in y if value > 0)])
    axes.axhline(limit, color=style.BLACK, linewidth=1.0, linestyle=(0, (6, 3)))
    _name_limit(axes, objective)
    axes.set_xlabel("requests/s of one engine")
    axes.set_ylabel(label_of(name))
    if rates:
        axes.set_xscale("log")
        style.set_log_axis(axes.xaxis, min(rates), max(rates))
        axes.set_xlim(min(rates) * 0.85, max(rates) * 1.15)
    if name != "goodput":
        axes.set_yscale("log")
        top = min(limit * _OUT_OF_SIGHT, 1.3 * max([limit, *highs]))
        style.set_log_axis(axes.yaxis, lowest, top)
        axes.set_ylim(lowest * 0.8, top)


def _name_limit(axes: Axes, objective: Plan) -> None:
    axes.annotate(
        objective["rule"],
        (0.02, objective["limit"]),
        xycoords=("axes fraction", "data"),
        xytext=(0, 5),
        textcoords="offset points",
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        zorder=4,
    )


def _add_legend(axes: Axes) -> None:
    num_entries = len(axes.get_legend_handles_labels()[1])
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=max(5, ceil(num_entries / 2)),
        borderaxespad=0.1,
        fontsize=7.5,
        handlelength=1.4,
        columnspacing=1.0,
    )


def label_of(name: str) -> str:
    """Return the label of an axis for an objective: ``p95 TTFT (ms)``."""
    statistic, _, rest = name.partition("_")
    latency = LATENCIES.get(rest.removesuffix("_ms")) if rest.endswith("_ms") else None
    if latency is None:
        return name.replace("_", " ")
    is_short = latency.key != "e2el"
    return f"{statistic} {latency.label if is_short else latency.meaning} (ms)"


@style.house_style
def latency_load(plan: Plan) -> Figure:
    """Draw TTFT and TPOT of the cheapest of each model against its load."""
    names = (
        list(plan["cheapest"].values())[:2]
        or [each["name"] for each in plan["candidates"] if "rate" in each][:2]
    )
    by_name = {each["name"]: each for each in plan["candidates"]}
    rates = [f"up to {by_name[name]['rate']['value']:,.3g}/s" for name in names]
    said = labels(plan)
    heads = {name: fill(said[name], _PANEL_CHARACTERS) for name in names}
    title = "Latency against load: " + ", ".join(
        f"{said[name]} {rate}" for name, rate in zip(names, rates, strict=True)
    )
    if len(title) > style.MAX_TITLE_CHARACTERS:  # the panels have the names, too
        title = f"Latency against load: {', '.join(rates)}"
    figure = style.titled_figure(
        title,
        "lines: medians of seeds; bands: all seeds; grey: the interval of the highest "
        "rate at which the objectives hold",
    )
    panels = figure.subplots(
        nrows=len(names),
        ncols=2,
        squeeze=False,
        gridspec_kw=style.margins(
            0.075, 0.98, 0.085, _top(heads), wspace=0.18, hspace=0.42
        ),
    )
    for row, name in zip(panels, names, strict=True):
        for axes, of in zip(row, ("ttft", "tpot"), strict=True):
            _draw_latency(axes, by_name[name], of, plan)
            axes.set_title(heads[name], fontsize=9, loc="left")
    return figure


def _top(heads: Mapping[str, str]) -> float:
    """Return where panels end: lower below heads of several lines."""
    return 0.86 - 0.025 * max((head.count("\n") for head in heads.values()), default=0)


def _draw_latency(axes: Axes, each: Plan, of: str, plan: Plan) -> None:
    rate = each["rate"]
    axes.axvspan(rate["low"], rate["high"], color=style.GREY, alpha=0.2, lw=0)
    highest = 1e-9
    for statistic, colour in (("median", style.SKY), ("p95", style.BLUE)):
        points = load_points(each, f"{statistic}_{of}_ms")
        x = [load * rate["value"] for load in points]
        y = [float(np.median(values)) for values in points.values()]
        low = [min(values) for values in points.values()]
        high = [max(values) for values in points.values()]
        axes.fill_between(x, low, high, color=colour, alpha=0.3, lw=0)
        axes.plot(x, y, color=colour, marker="o", markersize=3, label=statistic)
        highest = max([highest, *high])
    for objective in plan["objectives"]:
        if objective["name"].endswith(f"_{of}_ms"):
            limit = objective["limit"]
            axes.axhline(limit, color=style.VERMILLION, linestyle=(0, (6, 3)))
            _name_limit(axes, objective)
            highest = max(highest, limit)
    axes.set_ylim(0.0, highest * 1.15)
    axes.yaxis.set_major_formatter(FuncFormatter(style.plain_number))
    axes.set_xlabel("requests/s of one engine")
    axes.set_ylabel(label_of(f"p95_{of}_ms").removeprefix("p95 "))
    _add_legend(axes)


_MAX_MODELS = 2
_FAINT = "#BBBBBB"
_MAX_BARS = 16


@style.house_style
def pareto(plan: Plan) -> Figure:
    """Draw every fleet that serves the traffic by its cost and its latency."""
    points, currency = plan["pareto"]["points"], plan["prices"]["currency"]
    models = list(dict.fromkeys(point["model"] for point in points))[:_MAX_MODELS]
    front = [point for point in points if point["on_front"]]
    said = "; ".join(
        f"{model.rpartition('/')[2]} from "
        f"{min(p['cost_per_hour'] for p in front if p['model'] == model):,.2f}"
        for model in models
    )
    figure = style.titled_figure(
        f"{plan['traffic']['rate']:,.3g} requests/s, {currency} an hour: {said}"
        if models
        else "No candidate serves the traffic",
        f"{plan['traffic']['title']}; fleets that keep the objectives, some with spare "
        f"replicas; {plan['search']['confidence']:.0%} intervals",
    )
    panels = figure.subplots(
        ncols=max(1, len(models)),
        squeeze=False,
        gridspec_kw=style.margins(0.065, 0.98, 0.085, 0.855, wspace=0.18),
    )[0]
    if not models:
        style.say(panels[0], "no fleet to show")
    for axes, model in zip(panels, models, strict=False):
        _draw_fleets(axes, plan, [p for p in points if p["model"] == model])
        axes.set_xlabel(f"{currency} an hour, {model}")
        axes.set_ylabel(label_of(plan["pareto"]["latency"]))
    return figure


def _draw_fleets(axes: Axes, plan: Plan, points: list[Plan]) -> None:
    styles = looks(plan)
    front = sorted(
        (p for p in points if p["on_front"]), key=lambda p: p["cost_per_hour"]
    )
    axes.step(
        [p["cost_per_hour"] for p in front],
        [p["latency_ms"] for p in front],
        where="post",
        color=style.GREEN,
        linewidth=2.0,
        alpha=0.6,
        label="Pareto front",
        zorder=1,
    )
    gpus = set()
    shapes = _shapes(plan)
    edge: dict[str, Any] = {}
    if shapes:
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
    for point in sorted(points, key=lambda each: not each["on_front"]):
        colour = styles[point["candidate"]]["color"]
        gpu = next(
            c["gpu"] for c in plan["candidates"] if c["name"] == point["candidate"]
        )
        shape = "o" if point["on_front"] else "s"
        if shapes:  # candidates with one router have the first
            shape = shapes[point.get("router", next(iter(shapes)))]
        axes.errorbar(
            point["cost_per_hour"],
            point["latency_ms"],
            yerr=[
                [point["latency_ms"] - point["latency_low_ms"]],
                [point["latency_high_ms"] - point["latency_ms"]],
            ],
            fmt=shape,
            color=colour,
            markersize=(6 if point["on_front"] else 4) + 2 * bool(shapes),
            label=None if shapes or gpu in gpus else gpu,
            zorder=2 + bool(shapes and not point["on_front"]),
            **edge,
        )
        if shapes and gpu not in gpus:
            axes.plot([], [], color=colour, label=gpu)
        gpus.add(gpu)
    for router, shape in shapes.items():
        axes.plot([], [], shape, color=style.GREY, markersize=5, label=router)
    lows = [p["latency_low_ms"] for p in points]
    highs = [p["latency_high_ms"] for p in points]
    costs = [p["cost_per_hour"] for p in points]
    axes.set_yscale("log")
    style.set_log_axis(axes.yaxis, min(lows) * 0.8, max(highs) * 1.3)
    axes.set_xlim(0.0, max(costs) * 1.15)
    axes.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
    axes.set_ylim(min(lows) * 0.8, max(highs) * 1.3)
    named: set[tuple[str, float, int]] = set()
    for point in sorted(points, key=lambda each: not each["on_front"]):
        x, y = axes.transData.transform((point["cost_per_hour"], point["latency_ms"]))
        place = (_text_of(point), float(x), round(float(y) / _NAME_PIXELS))
        if place not in named:
            _name_point(axes, point)
            named.add(place)
    _add_legend(axes)


_SHAPES = ("o", "D", "^", "v", "P", "X", "s", "<", ">", "*")
_NAME_PIXELS = 14.0
"""Points nearer than this that have one name show it once: their routers differ."""


def _shapes(plan: Plan) -> dict[str, str]:
    """Return the shape of each router, where several were compared."""
    kinds = [
        router["router"]["kind"]
        for each in plan["candidates"]
        for router in each.get("routers", ())
    ]
    return {
        kind: _SHAPES[place % len(_SHAPES)]
        for place, kind in enumerate(dict.fromkeys(kinds))
    }


def _text_of(point: Plan) -> str:
    """Return replicas and ranks: ``6 x tp1``."""
    parts = [part for part in point["candidate"].split("_") if part.startswith("tp")]
    return f"{point['replicas']} x {parts[-1] if parts else ''}"


def _name_point(axes: Axes, point: Plan) -> None:
    axes.annotate(
        _text_of(point),
        (point["cost_per_hour"], point["latency_ms"]),
        xytext=(6, 3),
        textcoords="offset points",
        fontsize=7.5,
        color=style.BLACK if point["on_front"] else style.GREY,
    )


@style.house_style
def tornado(plan: Plan) -> Figure:
    """Draw the effect of each change on the highest rate of the cheapest candidates."""
    if not plan["sensitivity"]:
        raise NotShownError(
            "the plan has no sensitivities; run it with a sensitivity that is not null"
        )
    names = list(plan["sensitivity"])[:_MAX_MODELS]
    heads = {name: fill(labels(plan)[name], _BARS_CHARACTERS) for name in names}
    best = [_largest_effect(plan["sensitivity"][name]["effects"]) for name in names]
    figure = style.titled_figure(
        "What moves the highest rate: " + "; ".join(filter(None, best))
        if any(best)
        else "Nothing that was changed moves the highest rate",
        "change of the highest rate; orange: a resource a tenth larger; "
        "blue, red: a setting changed; grey: within noise",
    )
    panels = figure.subplots(
        ncols=len(names),
        squeeze=False,
        gridspec_kw=style.margins(0.21, 0.98, 0.085, _top(heads), wspace=0.72),
    )[0]
    for axes, name in zip(panels, names, strict=True):
        _draw_bars(axes, plan["sensitivity"][name]["effects"])
        axes.set_title(heads[name], fontsize=9, loc="left")
    return figure


def _largest_effect(effects: list[Plan]) -> str:
    known = [e for e in effects if e["rate_gain"] and not is_noise(e)]
    if not known:
        return ""
    most = max(known, key=lambda e: abs(e["rate_gain"]))
    return f"{most['lever']} {most['change']} brings {most['rate_gain']:+.0%}"


def _bar_colour(effect: Plan) -> str:
    if is_noise(effect):
        return _FAINT
    if effect["resource"]:
        return style.ORANGE
    return style.BLUE if effect["rate_gain"] >= 0 else style.VERMILLION


def _draw_bars(axes: Axes, effects: list[Plan]) -> None:
    known = [e for e in effects if e["rate_gain"] is not None]
    known.sort(key=lambda e: abs(e["rate_gain"]))
    shown = known[-_MAX_BARS:]
    gains = [100 * e["rate_gain"] for e in shown]
    colours = [_bar_colour(effect) for effect in shown]
    axes.barh(range(len(shown)), gains, color=colours, height=0.7)
    axes.set_yticks(
        range(len(shown)), [f"{e['lever']} {e['change']}" for e in shown], fontsize=7.5
    )
    axes.axvline(0.0, color=style.BLACK, linewidth=0.8)
    reach = max([1.0, *(abs(gain) for gain in gains)])
    axes.set_xlim(-1.35 * reach, 1.35 * reach)
    for place, gain in enumerate(gains):
        axes.annotate(
            noise_word(shown[place]) or f"{gain:+.1f}",
            (gain, place),
            xytext=(3 if gain >= 0 else -3, 0),
            textcoords="offset points",
            va="center",
            ha="left" if gain >= 0 else "right",
            fontsize=7.5,
        )
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("change of the highest rate (%)")


PLAN_FIGURES: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "capacity_curves": capacity_curves,
    "latency_load": latency_load,
    "pareto": pareto,
    "tornado": tornado,
}
"""File name without its ending, and the function that draws it."""
