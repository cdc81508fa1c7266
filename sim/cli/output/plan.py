"""Output of ``kvsim plan``: its phases as they go, and the plan as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from sim.cli.console import WIDTH, output_console, table_or_lines
from sim.cli.output.size import verdict_parts
from sim.studies.planning.answer.file import labels
from sim.studies.planning.answer.verdict import verdicts_of
from sim.studies.planning.phases.outcome import is_noise, is_unclear, shown_confidence
from sim.studies.planning.phases.sensitivity import RESOURCE_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from rich.console import RenderableType

    from sim.cli.console import ShowProgress

_STATUS = {
    "does_not_fit": "does not fit",
    "misses_idle": "too slow, even idle",
    "rejects": "cannot serve all",
    "too_many": "too many replicas",
    "not_searched": "costs more, roughly",
}
_BOUNDS = {"high": ">= ", "low": "< "}
"""Before a rate at which the search ended because the plan bounds it."""
_TOP = 3


def plan_reporter(show: ShowProgress) -> Callable[[str, int, int], None]:
    def update(phase: str, done: int, total: int) -> None:
        show(done, phase=phase, total=total)

    return update


def print_plan(plan: Mapping[str, Any], directory: Path, wall_s: float) -> None:
    console = output_console()
    for part in plan_lines(plan, console.width):
        console.print(part, soft_wrap=isinstance(part, Text))
    console.print(Text(f"found in {wall_s:.0f} s; results in {directory}"))


def plan_lines(plan: Mapping[str, Any], width: int = WIDTH) -> Iterator[RenderableType]:
    """Yield the output: the verdict, then tables, and lines between them."""
    names = labels(plan)
    traffic = plan["traffic"]
    yield Text(f"{traffic['title']}: {traffic['rate']:.4g} requests/s", style="bold")
    yield Text("; ".join(o["rule"] for o in plan["objectives"]))
    for verdict in verdicts_of(plan).values():
        yield from verdict_parts(verdict, plan["prices"])
    yield from _rates(plan, names, width)
    yield from _fleets(plan, names, width)
    for line in answers(plan):
        yield Text(line)


def _rates(
    plan: Mapping[str, Any], names: Mapping[str, str], width: int
) -> Iterator[RenderableType]:
    headings = [
        "one engine",
        "requests/s",
        f"{shown_confidence(plan):.0%} interval",
        "if steps off",
        "spread",
        "binds",
    ]
    rows = []
    for each in plan["candidates"]:
        if "rate" not in each:
            said = _STATUS.get(each["status"], each["status"])
            rows.append([names[each["name"]], "-", said, "", "", ""])
            continue
        rate, binding = each["rate"], each["binding"]
        rows.append(
            [
                names[each["name"]],
                f"{_BOUNDS.get(rate['at_bound'], '')}{rate['value']:.4g}",
                f"{rate['low']:.3g} to {rate['high']:.3g}",
                f"{rate['cost_low']:.3g} to {rate['cost_high']:.3g}",
                f"{rate['spread']:.1%}",
                _resource(binding["resource"]) if binding else "-",
            ]
        )
    yield from table_or_lines(headings, rows, ["one engine", "binds"], width)


def _resource(name: str) -> str:
    return "KV capacity" if name == "kv_capacity" else RESOURCE_WORDS.get(name, name)


def _fleets(
    plan: Mapping[str, Any], names: Mapping[str, str], width: int
) -> Iterator[RenderableType]:
    currency, latency = plan["prices"]["currency"], plan["pareto"]["latency"]
    headings = [
        "all traffic",
        "replicas",
        "GPUs",
        f"{currency}/h",
        f"{currency}/M output",
        latency,
        "",
    ]
    rows = []
    first = [
        router["router"]["kind"]
        for each in plan["candidates"]
        for router in each.get("routers", ())[:1]
    ]
    on_front = {
        (p["candidate"], p["replicas"])
        for p in plan["pareto"]["points"]
        if p["on_front"] and p.get("router") in (None, *first)
    }
    served = [each for each in plan["candidates"] if each.get("replicas")]
    for each in sorted(served, key=lambda e: (e["model"], e["cost_per_hour"])):
        fleet = next(f for f in each["fleets"] if f["replicas"] == each["replicas"])
        value = fleet["values"].get(latency)
        per_million = each["cost_per_million_output_tokens"]
        rows.append(
            [
                names[each["name"]],
                f"{each['replicas']:,}",
                f"{each['num_gpus']:,}",
                f"{each['cost_per_hour']:,.2f}",
                "-" if per_million is None else f"{per_million:,.2f}",
                "-" if value is None else f"{value['value']:,.0f}",
                "front" if (each["name"], each["replicas"]) in on_front else "",
            ]
        )
    if rows:
        yield from table_or_lines(headings, rows, ["all traffic"], width)


def answers(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plan's sentences beside its verdict."""
    for name, found in plan["sensitivity"].items():
        if found["verdict"]:
            yield f"{name}: {found['verdict']}"
        moves = _largest(found["effects"])
        if moves:
            yield f"  settings that move its rate most: {moves}"
        idle, unclear = _within_noise(found["effects"])
        if idle:
            yield f"  no effect beyond noise: {idle}"
        if unclear:
            yield f"  unclear with so few seeds: {unclear}"
    yield from (f"note: {note}" for note in plan["notes"])


def _largest(effects: list[dict[str, Any]]) -> str:
    """Return the settings, not the resources, with the largest effects."""
    known = [e for e in effects if e["rate_gain"] is not None and not e["resource"]]
    known.sort(key=lambda e: -abs(e["rate_gain"]))
    return "; ".join(
        f"{e['lever']} {e['change']} {e['rate_gain']:+.1%}"
        for e in known[:_TOP]
        if abs(e["rate_gain"]) >= 0.005 and not is_noise(e)
    )


def _within_noise(effects: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the settings whose changes did nothing, and those that may have."""
    known = [e for e in effects if e["rate_gain"] is not None and not e["resource"]]
    moved = {e["lever"] for e in known if not is_noise(e)}
    still = [e for e in known if e["lever"] not in moved]
    unclear = dict.fromkeys(e["lever"] for e in still if is_unclear(e))
    idle = dict.fromkeys(e["lever"] for e in still if e["lever"] not in unclear)
    return ", ".join(idle), ", ".join(unclear)
