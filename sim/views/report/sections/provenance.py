"""The sections on the configuration, and on what the numbers rest on and leave out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from sim.results.summary.compared import flat
from sim.views.report.html import (
    Markup,
    bullets,
    datum,
    decimal,
    details,
    element,
    join,
    milliseconds,
    paragraph,
    percent,
    table,
)
from sim.views.report.looks import tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.views.report.source import Run


_MISSING = object()


def show_configuration(runs: Sequence[Run]) -> Iterator[Markup]:
    """Return the settings that differ, and each configuration in full."""
    if len(runs) > 1:
        yield _differences(runs)
    else:
        yield paragraph("Keys that are set; all others take their defaults.")
        yield _yaml(_set_keys(runs[0].config))
    for run in runs:
        whose = "" if len(runs) == 1 else f" of {run.label}"
        yield details(f"Complete configuration{whose}", _yaml(run.config))


def _yaml(config: Mapping[str, Any]) -> Markup:
    told = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return element("pre", told, tabindex="0")


def _set_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that are null, at any depth."""
    return {
        key: _set_keys(value) if isinstance(value, dict) and value else value
        for key, value in config.items()
        if value is not None
    }


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values are not all the same, and the values."""
    tables = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for each in tables for key in each)
    found = []
    for key in keys:
        values = [each.get(key, _MISSING) for each in tables]
        if any(value != values[0] for value in values[1:]):
            found.append((key, values))
    return found


def _differences(runs: Sequence[Run]) -> Markup:
    found = differences(runs)
    if not found:
        return paragraph("The configurations are the same.")
    head = ["key", *(tag(run) for run in runs)]
    rows = [(element("code", key), *map(_told, values)) for key, values in found]
    return table("Keys that differ", head, rows, class_="texts")


def _told(value: Any) -> str:
    if value is _MISSING:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_INTERVALS = (
    ("mean_ttft_ms", "mean TTFT"),
    ("p95_ttft_ms", "p95 TTFT"),
    ("p99_ttft_ms", "p99 TTFT"),
    ("mean_tpot_ms", "mean TPOT"),
    ("p95_tpot_ms", "p95 TPOT"),
    ("p99_tpot_ms", "p99 TPOT"),
    ("mean_e2el_ms", "mean E2E"),
    ("p95_e2el_ms", "p95 E2E"),
    ("p99_e2el_ms", "p99 E2E"),
    ("request_throughput", "requests/s"),
)


def show_provenance(runs: Sequence[Run]) -> Iterator[Markup]:
    for run in runs:
        heading = (element("h3", tag(run)),) if len(runs) > 1 else ()
        yield element("div", *heading, bullets(_honest(run)), class_="box")
    shown = [run for run in runs if _has_intervals(run)]
    for run in shown:
        yield _intervals(runs, run)
    yield _origins(runs)
    for run in runs:
        yield from _cost_model(runs, run)


def _honest(run: Run) -> Iterator[Markup]:
    s = run.summary
    kind = _kind(run)
    if s.get("profile"):
        yield join(
            ["Step times: cost model ", kind, ", from the profile ", _profile(s)]
        )
    else:
        yield join(
            [
                "Step times: cost model ",
                kind,
                ", no measured profile",
                _unmeasured(kind),
            ]
        )
    share = float(s.get("extrapolated_share") or 0.0)
    shown = datum(run, "extrapolated_share", percent(share), share)
    yield join([shown, " of the steps' time was extrapolated by the cost model."])
    reason = s.get("cost_intervals_reason")
    if reason is None:
        yield join(["Intervals: the run was repeated with every step at its bounds."])
    else:
        yield join(["No intervals of latencies: ", reason, "."])
    yield join([_sentence(str(s.get("scheduling", ""))), *_scheduling_note(s)])
    path = f"Computed on the {s.get('path')} path"
    why = f" ({s['path_reason']})" if s.get("path_reason") else ""
    yield join([f"{path}{why}; the same decisions either way."])
    if s.get("interrupted"):
        yield join(["Interrupted: what had not finished is not in the latencies."])
    for warning in s.get("warnings", ()):
        yield element("span", "Warning: ", warning, class_="warn")
    if outside := (s.get("capacity") or {}).get("extrapolated"):
        told = "; ".join(outside)
        yield join(["Number of KV blocks, outside of what was measured: ", told, "."])


def _kind(run: Run) -> str:
    """Return the cost model's kind; a user's own class need not name itself."""
    asked = (run.config.get("cost") or {}).get("kind")
    return str((run.summary.get("cost") or {}).get("kind") or asked)


def _profile(summary: Mapping[str, Any]) -> str:
    profile = summary["profile"]
    if isinstance(profile, dict):
        return ", ".join(f"{key} {value}" for key, value in profile.items())
    return str(profile)


def _unmeasured(kind: str) -> str:
    if kind == "roofline":
        return ": datasheet and architecture, with efficiencies that are listed below."
    return "."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _scheduling_note(summary: Mapping[str, Any]) -> tuple[str, ...]:
    if summary.get("scheduling") != "synchronous scheduling":
        return (".",)
    return (
        ": each step is scheduled after the one before has ended; engines that "
        "schedule ahead hide the host's part.",
    )


def _has_intervals(run: Run) -> bool:
    return any(run.summary.get(f"{key}_interval") for key, _ in _INTERVALS)


def _intervals(runs: Sequence[Run], run: Run) -> Markup:
    rows = []
    for key, label in _INTERVALS:
        found, value = run.summary.get(f"{key}_interval"), run.summary.get(key)
        if not found or value is None:
            continue
        show = milliseconds if key.endswith("_ms") else decimal
        low, high = found
        rows.append([label, datum(run, key, show(value)), show(low), show(high)])
    whose = f" ({run.label})" if len(runs) > 1 else ""
    caption = f"If the cost model is off{whose}: all steps at either bound"
    return table(caption, ["", "value", "from", "to"], rows)


def _origins(runs: Sequence[Run]) -> Markup:
    head = ["", *(tag(run) for run in runs)]
    packages = dict.fromkeys(
        name for run in runs for name in run.summary.get("versions", {})
    )
    rows: list[list[object]] = [
        ["directory", *(str(run.path) for run in runs)],
        ["seed", *(str(run.summary.get("seed")) for run in runs)],
    ]
    rows += [
        [name, *(str(run.summary.get("versions", {}).get(name, "-")) for run in runs)]
        for name in packages
    ]
    return table("Where it comes from", head, rows, class_="texts")


def _cost_model(runs: Sequence[Run], run: Run) -> Iterator[Markup]:
    """Yield the run's cost model and its constants, folded."""
    cost = dict(run.summary.get("cost") or {})
    parameters = cost.pop("parameters", None) or {}
    told = [(key, json.dumps(value)) for key, value in flat(cost).items()]
    rows = [
        (name, f"{each.get('value')} {each.get('unit', '')}", each.get("source", ""))
        for name, each in parameters.items()
        if isinstance(each, dict)
    ]
    whose = f" of {run.label}" if len(runs) > 1 else ""
    tables = [table("What it says of itself", ["key", "value"], told, class_="texts")]
    if rows:
        head = ["constant", "value", "source"]
        tables.append(table("Constants", head, rows, class_="texts"))
    yield details(f"Cost model{whose}", *tables)
