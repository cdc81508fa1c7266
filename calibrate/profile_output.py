"""What ``kvsim profile`` prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from calibrate.writing import write_profile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from calibrate.fit_report import FitReport
    from calibrate.profile_diff import TableDiff
    from sim.profile import Profile
    from sim.profile_checks import Problem

_SHOWN: Final = 12
"""Lines of problems that do not make a profile unusable."""
_HEADINGS: Final = (
    "n",
    "mape_inside",
    "p90_inside",
    "mape_beyond",
    "p90_beyond",
    "bias",
)


def print_json(content: Any) -> None:
    """Print plain data as JSON on stdout."""
    print(json.dumps(content, indent=2, sort_keys=True))


def overview(profile: Profile) -> dict[str, Any]:
    """Return what `show` prints, as plain data."""
    return {
        "id": profile.id,
        "format": profile.body["format"],
        "kind": profile.kind,
        "provenance": profile.provenance,
        "ops": [
            {
                "operation": table.operation,
                "variant": table.variant,
                "dtype": table.dtype,
                "constants": table.constants,
                "num_points": table.num_points,
                "axes": {
                    key: [min(values), max(values)]
                    for key, values in table.axes.items()
                    if values
                },
                "p50_s": [min(table.quantiles["p50_s"]), max(table.quantiles["p50_s"])],
            }
            for table in profile.ops
            if table.num_points
        ],
        "num_steps": len(profile.steps),
        "fit": sorted(profile.fit),
    }


def print_overview(profile: Profile) -> None:
    """Print an overview as text."""
    print(f"{profile.id}\n{profile.kind}, {profile.body['format']}")
    for key, value in sorted(profile.provenance.items()):
        plain = json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
        print(f"  {key}: {plain}")
    for op in overview(profile)["ops"]:
        constants = ", ".join(f"{k} {v}" for k, v in op["constants"].items())
        axes = ", ".join(f"{k} {low}..{high}" for k, (low, high) in op["axes"].items())
        low, high = (f"{value * 1e6:.4g}" for value in op["p50_s"])
        print(
            f"{op['operation']} ({op['variant']}, {op['dtype']}; {constants or '-'}): "
            f"{op['num_points']} points, {axes}; {low}..{high} us"
        )


def print_problems(
    name: str, problems: Sequence[Problem], *, json: bool, quiet: bool
) -> int:
    """Print what is wrong and return the exit status: 2 where it must not be used."""
    fatal = [problem for problem in problems if problem.fatal]
    notes = [problem for problem in problems if not problem.fatal]
    if json:
        print_json([asdict(problem) for problem in problems])
    else:
        for problem in fatal:
            print(f"{problem.rule}: {problem.message}", file=sys.stderr)
        if not quiet:
            for problem in notes[:_SHOWN]:
                print(f"note, {problem.rule}: {problem.message}")
            if len(notes) > _SHOWN:
                print(f"note: {len(notes) - _SHOWN} more like these; see --json")
            if not fatal:
                print(f"{name} is valid")
    return 2 if fatal else 0


def print_diff(found: Mapping[str, TableDiff]) -> None:
    """Print one line a table."""
    for name, row in found.items():
        if row.median_ratio is None:
            print(f"{name}: {row.num_left} and {row.num_right} points, none shared")
        else:
            print(
                f"{name}: {row.num_shared} points shared of {row.num_left} and "
                f"{row.num_right}, right over left {row.median_ratio:.3f} "
                f"(p10 {row.p10_ratio:.3f}, p90 {row.p90_ratio:.3f})"
            )


def print_fit(report: FitReport, *, headings: bool) -> None:
    """Print the errors as a table, in percent."""
    rows = report.to_json()
    width = max([len("operation"), *map(len, rows)])
    if headings:
        print(
            "errors in percent on points held out: a fifth at random (inside), the "
            "longest eighth of the lengths (beyond)"
        )
        print("operation".ljust(width), *(f"{key:>11}" for key in _HEADINGS))
    for name, row in rows.items():
        cells = (f"{_cell(row[key]):>11}" for key in _HEADINGS)
        print(name.ljust(width), *cells)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def write_and_tell(profile: Profile, out: Path, quiet: bool) -> int:
    """Write a profile and say what is in it."""
    write_profile(profile, out)
    if not quiet:
        points = sum(table.num_points for table in profile.ops)
        operations = sorted({table.operation for table in profile.ops})
        print(f"{out}: {points} points of {', '.join(operations)}; {profile.id[:19]}")
    return 0
