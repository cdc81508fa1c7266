"""A plan's page: candidates, capacity curves, the Pareto front, what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.studies.planning.answer.file import labels
from sim.studies.planning.answer.verdict import verdicts_of
from sim.studies.planning.phases.outcome import noise_word, shown_confidence
from sim.views.plots.studies.plans import load_points
from sim.views.report import charts
from sim.views.report.html import (
    Markup,
    bullets,
    count,
    data,
    decimal,
    details,
    element,
    paragraph,
    percent,
    plural,
    table,
)
from sim.views.report.looks import run_colour
from sim.views.report.page import Section
from sim.views.report.sections.latency import value_axis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_OUT_OF_SIGHT: Final = 6.0
"""Values beyond so many times the limit tell nothing more."""

Plan = dict[str, Any]


def _found(plan: Plan) -> list[Plan]:
    return [each for each in plan["candidates"] if "rate" in each]


def _summary(plan: Plan) -> Iterator[Markup | charts.Chart]:
    traffic = plan["traffic"]
    rules = ", ".join(each["rule"] for each in plan["objectives"])
    rate = data(decimal(traffic["rate"]), traffic["rate"], "rate", "traffic")
    verdicts = verdicts_of(plan)
    for verdict in verdicts.values():
        yield paragraph(element("strong", verdict.answer), class_="lead")
        said = [verdict.one_engine, *verdict.margin, verdict.binds]
        said += [*verdict.alternatives, *verdict.routers, *verdict.host_memory]
        said += [*verdict.fleets, *verdict.changes, verdict.confidence]
        yield element("div", bullets(filter(None, said)), class_="lead")
    yield paragraph(rate, f" requests/s, {rules}.")
    best = set(plan["cheapest"].values())
    others = [e for e in _found(plan) if e["binding"] and e["name"] not in best]
    lines = [f"{each['name']}: {each['binding']['sentence']}." for each in others]
    if lines:
        yield element("div", bullets(lines))
    if plan.get("stopped_in"):
        yield paragraph(
            f"Interrupted in: {plan['stopped_in']}; what had been found is here.",
            class_="warn",
        )


def _candidates(plan: Plan) -> Iterator[Markup | charts.Chart]:
    rows, said = [], labels(plan)
    for each in _found(plan):
        rate, name = each["rate"], each["name"]
        rows.append(
            [
                said[name],
                data(decimal(rate["value"]), rate["value"], "rate", name),
                f"{decimal(rate['low'])} to {decimal(rate['high'])}",
                _off(rate),
                percent(rate["spread"]),
                count(each["num_gpu_blocks"]),
                (each["binding"] or {}).get("resource", "-").replace("_", " "),
            ]
        )
    head = [
        "candidate",
        "requests/s",
        f"{shown_confidence(plan):.0%} interval",
        "if steps are off",
        "spread",
        "KV blocks",
        "binds",
    ]
    yield table("Highest rate of one engine", head, rows, left=(6,))
    yield from _curves(plan)
    left = [each for each in plan["candidates"] if "rate" not in each]
    if left:
        told = [(said[e["name"]], e["status"], e["reason"] or "") for e in left]
        head = ["candidate", "status", "why"]
        yield table("Candidates without a rate", head, told, class_="texts")


def _off(rate: Mapping[str, Any]) -> str:
    low, high = rate.get("cost_low"), rate.get("cost_high")
    return "-" if low is None or high is None else f"{decimal(low)} to {decimal(high)}"


def _curves(plan: Plan) -> Iterator[charts.Chart]:
    """Yield a chart of each objective at growing rates."""
    panels = []
    for objective in plan["objectives"]:
        series: list[charts.Series] = []
        values, rates = [float(objective["limit"])], [0.0]
        for place, each in enumerate(_found(plan)):
            points = load_points(each, objective["name"])
            x = np.array([load * each["rate"]["value"] for load in points])
            y = np.array([float(np.median(found)) for found in points.values()])
            if not x.size:
                continue
            look = run_colour(place + 1)
            dash, symbol = charts.DASHES[place % 4], charts.SYMBOLS[place % 4]
            series.append(charts.Line(each["name"], look, x, y, dash, symbol=symbol))
            values += y.tolist()
            rates += x.tolist()
        if not series:
            continue
        series.append(charts.Level(objective["rule"], float(objective["limit"])))
        top = min(max(values), _OUT_OF_SIGHT * float(objective["limit"]))
        axis = value_axis(objective["name"], [min(value, top) for value in values])
        x_axis = charts.Axis(
            "requests/s of one engine", low=0.0, high=1.05 * max(rates)
        )
        panels.append(charts.Panel(axis, tuple(series), x=x_axis))
    if panels:
        yield charts.Chart(
            "capacity-curves",
            "What the objectives come to at growing rates: medians of seeds; dashed: "
            "what is promised.",
            tuple(panels),
            height_px=400,
        )


def _fleets(plan: Plan) -> Iterator[Markup | charts.Chart]:
    currency = plan["prices"]["currency"]
    rows, said = [], labels(plan)
    for each in _found(plan):
        if each["replicas"] is None:
            continue
        name = each["name"]
        cost, output = each["cost_per_hour"], each["cost_per_million_output_tokens"]
        rows.append(
            [
                said[name],
                data(str(each["replicas"]), each["replicas"], "replicas", name),
                str(each["num_gpus"]),
                "-"
                if cost is None
                else data(f"{cost:,.2f}", cost, "cost_per_hour", name),
                "-" if output is None else f"{output:.3g}",
            ]
        )
    head = ["candidate", "replicas", "GPUs", f"{currency} an hour"]
    head.append(f"{currency} per million output tokens")
    yield table("All of the traffic", head, rows)
    points = [p for p in plan["pareto"]["points"] if p["cost_per_hour"] is not None]
    if points:
        yield _pareto(points, [_name_of(each, said) for each in points], plan)
    commands = (
        details(each["name"], element("pre", _to_serve(each), tabindex="0"))
        for each in _found(plan)
    )
    yield element("h3", "To run it")
    yield from commands


def _to_serve(each: Plan) -> str:
    missing = each["not_in_the_command"]
    said = f"\n# The command does not say: {', '.join(missing)}" if missing else ""
    return f"{each['serve_command']}{said}"


def _pareto(points: Sequence[Plan], said: Sequence[str], plan: Plan) -> charts.Chart:
    """Return the chart of fleets, each by its name in `said`."""
    currency, latency = plan["prices"]["currency"], plan["pareto"]["latency"]
    series: list[charts.Series] = []
    front = sorted(
        (p for p in points if p["on_front"]), key=lambda p: float(p["cost_per_hour"])
    )
    for model in dict.fromkeys(point["model"] for point in front):
        of_model = [point for point in front if point["model"] == model]
        x = np.array([float(point["cost_per_hour"]) for point in of_model])
        y = np.array([float(point["latency_ms"]) for point in of_model])
        series.append(charts.Line(f"front of {model}", "muted", x, y, "dot"))
    for place, name in enumerate(dict.fromkeys(said)):
        of_name = [p for p, its in zip(points, said, strict=True) if its == name]
        series.append(
            charts.Points(
                name,
                run_colour(place + 1),
                np.array([float(point["cost_per_hour"]) for point in of_name]),
                np.array([float(point["latency_ms"]) for point in of_name]),
                charts.SYMBOLS[place % 4],
                tuple(
                    f"{plural(p['replicas'], 'replica')} of {name}\n"
                    f"{p['cost_per_hour']:,.2f} {currency} an hour\n"
                    f"{latency} {p['latency_ms']:,.4g} ({p['latency_low_ms']:,.4g} to "
                    f"{p['latency_high_ms']:,.4g})"
                    for p in of_name
                ),
                size=10,
            )
        )
    values = [float(point["latency_ms"]) for point in points]
    dearest = max(float(point["cost_per_hour"]) for point in points)
    return charts.Chart(
        "pareto",
        "Cost against latency of every fleet that serves the traffic; dotted: those "
        "that no other one of the model beats.",
        (charts.Panel(value_axis(latency, values), tuple(series)),),
        x=charts.Axis(f"{currency} an hour", low=0.0, high=1.08 * dearest),
        height_px=380,
    )


def _name_of(point: Plan, said: Mapping[str, str]) -> str:
    behind = f", {point['router']}" if "router" in point else ""
    return f"{said[point['candidate']]}{behind}"


def _sensitivity(plan: Plan) -> Iterator[Markup | charts.Chart]:
    for place, (name, found) in enumerate(plan["sensitivity"].items()):
        yield element("h3", name)
        yield paragraph(f"{found['verdict'][:1].upper()}{found['verdict'][1:]}.")
        known = [e for e in found["effects"] if e["rate_gain"] is not None]
        known.sort(key=lambda effect: -effect["rate_gain"])
        if known:
            yield _tornado(f"sensitivity-{place + 1}", name, known)
        left = [e for e in found["effects"] if e["rate_gain"] is None]
        if left:
            rows = [(f"{e['lever']} {e['change']}", e["reason"]) for e in left]
            yield table("Not tried", ["change", "why"], rows, class_="texts")
    if not plan["sensitivity"]:
        yield paragraph("Not asked for.", class_="note")


def _comma(word: str) -> str:
    return f", {word}" if word else ""


def _tornado(key: str, name: str, effects: Sequence[Plan]) -> charts.Chart:
    gain = np.array([100.0 * float(effect["rate_gain"]) for effect in effects])
    ticks = tuple(f"{effect['lever']} {effect['change']}" for effect in effects)
    places = np.arange(gain.size, dtype=np.float64)
    texts = tuple(
        f"{label}\nhighest rate {value:+.1f} %{_comma(noise_word(effect))}"
        for label, value, effect in zip(ticks, gain.tolist(), effects, strict=True)
    )
    bars: charts.Series = charts.Bars(
        "highest rate",
        "run-1",
        0.0 * gain,
        gain,
        places,
        is_horizontal=True,
        texts=texts,
    )
    y = charts.Axis("", low=gain.size - 0.5, high=-0.5, ticks=ticks)
    return charts.Chart(
        key,
        f"What each change does to the highest rate of {name}.",
        (charts.Panel(y, (bars,)),),
        x=charts.Axis("change of the highest rate (%)"),
        height_px=120 + 22 * gain.size,
    )


def _provenance(plan: Plan) -> Iterator[Markup | charts.Chart]:
    notes: list[object] = [*plan["notes"]]
    for each in _found(plan):
        notes += [f"{each['name']}: {told}" for told in each["extrapolated"]]
    if notes:
        yield element("div", bullets(notes), class_="box")
    prices = plan["prices"]
    dated = f", {prices['date']}" if prices["date"] else ""
    note = f": {prices['note']}" if prices["note"] else ""
    caption = f"Prices, {prices['currency']} an hour{dated}{note}"
    rows = [(gpu, f"{price:,.2f}") for gpu, price in prices["per_gpu_hour"].items()]
    if host := prices.get("per_host_gib_hour"):
        rows.append(("GiB of host memory", f"{host:,.4f}"))
    if link := prices.get("per_link_gb_s_hour"):
        rows.append(("GB/s of its link", f"{link:,.4f}"))
    yield table(caption, ["GPU", "price"], rows)
    versions = [*plan["versions"].items(), ("seed", plan["seed"])]
    yield table("Versions", ["package", "version"], versions, class_="texts")


PLAN_SECTIONS: Final = (
    Section("summary", "What matters first", _summary),
    Section("candidates", "How much one engine holds", _candidates),
    Section("fleets", "What it costs", _fleets),
    Section("sensitivity", "What would help", _sensitivity),
    Section("provenance", "What this rests on", _provenance),
)
"""In the order of the page."""
