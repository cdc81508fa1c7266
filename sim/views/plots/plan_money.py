"""Figures of a plan: what latency costs, and what a change would bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter

from sim.views.plots.plan_curves import label_of, looks
from sim.views.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILLION,
    house_style,
    plain_number,
    say,
    set_log_axis,
    titled_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plan = Mapping[str, Any]

_MAX_PANELS = 2
_MAX_BARS = 16


@house_style
def pareto(plan: Plan) -> Figure:
    """Draw every fleet that serves the traffic by its cost and its latency."""
    points, currency = plan["pareto"]["points"], plan["prices"]["currency"]
    models = list(dict.fromkeys(point["model"] for point in points))[:_MAX_PANELS]
    front = [point for point in points if point["on_front"]]
    said = "; ".join(
        f"{model.rpartition('/')[2]} from "
        f"{min(p['cost_per_hour'] for p in front if p['model'] == model):,.2f}"
        for model in models
    )
    figure = titled_figure(
        f"{plan['traffic']['rate']:,.3g} requests/s, {currency} an hour: {said}"
        if models
        else "No candidate serves the traffic",
        f"{plan['traffic']['title']}; fleets that keep the objectives, some with spare "
        f"replicas; {plan['search']['confidence']:.0%} intervals",
    )
    panels = figure.subplots(
        ncols=max(1, len(models)),
        squeeze=False,
        gridspec_kw={
            "left": 0.065,
            "right": 0.98,
            "top": 0.855,
            "bottom": 0.085,
            "wspace": 0.18,
        },
    )[0]
    if not models:
        say(panels[0], "no fleet to show")
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
        color=GREEN,
        linewidth=2.0,
        alpha=0.6,
        label="Pareto front",
        zorder=1,
    )
    gpus = set()
    for point in points:
        colour = styles[point["candidate"]]["color"]
        gpu = next(
            c["gpu"] for c in plan["candidates"] if c["name"] == point["candidate"]
        )
        axes.errorbar(
            point["cost_per_hour"],
            point["latency_ms"],
            yerr=[
                [point["latency_ms"] - point["latency_low_ms"]],
                [point["latency_high_ms"] - point["latency_ms"]],
            ],
            fmt="o" if point["on_front"] else "s",
            color=colour,
            markersize=6 if point["on_front"] else 4,
            label=None if gpu in gpus else gpu,
        )
        gpus.add(gpu)
        _name(axes, point)
    lows = [p["latency_low_ms"] for p in points]
    highs = [p["latency_high_ms"] for p in points]
    costs = [p["cost_per_hour"] for p in points]
    axes.set_yscale("log")
    set_log_axis(axes.yaxis, min(lows) * 0.8, max(highs) * 1.3)
    axes.set_xlim(0.0, max(costs) * 1.15)
    axes.xaxis.set_major_formatter(FuncFormatter(plain_number))
    axes.set_ylim(min(lows) * 0.8, max(highs) * 1.3)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=5,
        borderaxespad=0.1,
        fontsize=7.5,
        handlelength=1.4,
        columnspacing=1.0,
    )


def _name(axes: Axes, point: Plan) -> None:
    """Write replicas and ranks beside a point: ``6 x tp1``."""
    parts = [part for part in point["candidate"].split("_") if part.startswith("tp")]
    axes.annotate(
        f"{point['replicas']} x {parts[-1] if parts else ''}",
        (point["cost_per_hour"], point["latency_ms"]),
        xytext=(6, 3),
        textcoords="offset points",
        fontsize=7.5,
        color=BLACK if point["on_front"] else GREY,
    )


@house_style
def tornado(plan: Plan) -> Figure:
    """Draw what each change does to the highest rate of the cheapest candidates."""
    names = list(plan["sensitivity"])[:_MAX_PANELS]
    best = [_most(plan["sensitivity"][name]["effects"]) for name in names]
    figure = titled_figure(
        "What moves the highest rate: " + "; ".join(filter(None, best))
        if any(best)
        else "Nothing that was changed moves the highest rate",
        "change of the highest rate; orange: a resource a tenth larger; "
        "blue, red: a setting changed; below 1 % is noise of the search",
    )
    panels = figure.subplots(
        ncols=max(1, len(names)),
        squeeze=False,
        gridspec_kw={
            "left": 0.21,
            "right": 0.98,
            "top": 0.855,
            "bottom": 0.085,
            "wspace": 0.72,
        },
    )[0]
    if not names:
        say(panels[0], "no sensitivities were asked for")
    for axes, name in zip(panels, names, strict=False):
        _draw_bars(axes, plan["sensitivity"][name]["effects"])
        axes.set_title(name, fontsize=9, loc="left")
    return figure


def _most(effects: list[Plan]) -> str:
    known = [e for e in effects if e["rate_gain"]]
    if not known:
        return ""
    most = max(known, key=lambda e: abs(e["rate_gain"]))
    return f"{most['lever']} {most['change']} brings {most['rate_gain']:+.0%}"


def _colour(effect: Plan) -> str:
    if effect["resource"]:
        return ORANGE
    return BLUE if effect["rate_gain"] >= 0 else VERMILLION


def _draw_bars(axes: Axes, effects: list[Plan]) -> None:
    known = [e for e in effects if e["rate_gain"] is not None]
    known.sort(key=lambda e: abs(e["rate_gain"]))
    shown = known[-_MAX_BARS:]
    gains = [100 * e["rate_gain"] for e in shown]
    colours = [_colour(effect) for effect in shown]
    axes.barh(range(len(shown)), gains, color=colours, height=0.7)
    axes.set_yticks(
        range(len(shown)), [f"{e['lever']} {e['change']}" for e in shown], fontsize=7.5
    )
    axes.axvline(0.0, color=BLACK, linewidth=0.8)
    reach = max([1.0, *(abs(gain) for gain in gains)])
    axes.set_xlim(-1.35 * reach, 1.35 * reach)
    for place, gain in enumerate(gains):
        axes.annotate(
            f"{gain:+.1f}",
            (gain, place),
            xytext=(3 if gain >= 0 else -3, 0),
            textcoords="offset points",
            va="center",
            ha="left" if gain >= 0 else "right",
            fontsize=7.5,
        )
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("change of the highest rate (%)")
