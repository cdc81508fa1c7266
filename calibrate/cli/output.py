"""The output of ``kvsim profile``, and the comparison of two profiles by point."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.writing import write_profile
from sim.cli.console import progress_bar
from sim.costs.measured.profile import DRY_RUN
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from calibrate.fit_report import FitReport
    from calibrate.side_by_side import ShowFits
    from sim.cli.console import ShowProgress
    from sim.costs.measured.profile import OpTable, Profile
    from sim.costs.measured.profile_checks import Problem

_SAME = 0.05
"""Medians may differ by so much and still count as the same measurement."""
_SHOWN: Final = 12
"""Lines of problems that do not make a profile unusable."""
_PARTS: Final = {
    "elementwise": "element-wise kernels",
    "head": "head",
    "sampler": "sampler",
    "prefill_past": "chunks with a past",
}
"""Parts of an entry of `fit` to what stands on the datasheet without them."""
_WHOLE: Final = {"transfers": "swaps", "copy": "copies"}
_HEADINGS: Final = (
    "n",
    "mape_inside",
    "p90_inside",
    "mape_beyond",
    "p90_beyond",
    "bias",
    "floor",
)


@contextmanager
def fits_bar(quiet: bool) -> Iterator[ShowFits | None]:
    """Open a bar of fits on stderr, where that is a terminal and it is wanted."""
    with progress_bar(_showing_fits, 1, "fits", shown=not quiet) as show:
        yield show


def _showing_fits(show: ShowProgress) -> ShowFits:
    show(0, phase="fitting", total=1)

    def fits(done: int, total: int) -> None:
        if done == 0:
            show(0, phase="fitting", total=total)
        else:
            show(done)

    return fits


@dataclass(frozen=True, slots=True)
class TableDiff:
    """How the shared points of one table differ, right over left."""

    num_left: int
    num_right: int
    num_shared: int
    median_ratio: float | None
    p10_ratio: float | None
    p90_ratio: float | None

    @property
    def differs(self) -> bool:
        """Whether the shared points differ by more than 5 % in the median."""
        return self.median_ratio is not None and abs(self.median_ratio - 1.0) > _SAME

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"differs": self.differs}


def diff_profiles(left: Profile, right: Profile) -> dict[str, TableDiff]:
    """Return the differences by table (operation, variant, data type)."""
    before, after = _by_table(left), _by_table(right)
    return {
        name: _diff(before.get(name, {}), after.get(name, {}))
        for name in sorted(before.keys() | after.keys())
    }


def _by_table(profile: Profile) -> dict[str, dict[tuple[Any, ...], float]]:
    found: dict[str, dict[tuple[Any, ...], float]] = {}
    for table in profile.ops:
        name = f"{table.operation} {table.variant} {table.dtype}"
        found.setdefault(name, {}).update(_points(table))
    return found


def _points(table: OpTable) -> dict[tuple[Any, ...], float]:
    # a time beside the points, such as `launch_s`, is measured and names no shape
    constants = tuple(
        sorted(
            (key, str(value))
            for key, value in table.constants.items()
            if not key.endswith("_s")
        )
    )
    axes = sorted(table.axes)
    rows = zip(*(table.axes[axis] for axis in axes), strict=True)
    seconds = table.quantiles["p50_s"]
    return {
        (constants, tuple(axes), row): value
        for row, value in zip(rows, seconds, strict=True)
    }


def _diff(
    before: dict[tuple[Any, ...], float], after: dict[tuple[Any, ...], float]
) -> TableDiff:
    shared = before.keys() & after.keys()
    ratios = [after[key] / before[key] for key in shared]
    low, middle, high = (
        np.quantile(ratios, [0.1, 0.5, 0.9]).tolist() if ratios else (None,) * 3
    )
    return TableDiff(len(before), len(after), len(shared), middle, low, high)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, sort_keys=True))


def overview(profile: Profile) -> dict[str, Any]:
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
        "fit": fit_overview(profile),
    }


def fit_overview(profile: Profile) -> dict[str, Any]:
    """Return the fit that a cost model takes from a profile, as plain data."""
    fit = profile.fit
    if not fit:
        return {}
    models: dict[str, set[int]] = {}
    for entry in fit.get("models") or ():
        ranks = models.setdefault(entry["model"], set())
        ranks.add(entry["geometry"]["tensor_parallel_size"])
    entries = fit.get("models") or ()
    return {
        "models": {name: sorted(ranks) for name, ranks in sorted(models.items())},
        "variants": fit.get("variants") or {},
        "intervals_percent": fit.get("intervals") or {},
        "host": fit.get("host"),
        "step_correction": fit.get("step_correction"),
        "from_datasheet": _from_datasheet(profile),
        "measured_parts": sorted({key for e in entries for key in e} & _PARTS.keys()),
    }


def _from_datasheet(profile: Profile) -> list[str]:
    """Return the parts of a step that stand on the datasheet alone."""
    fit, entries = profile.fit, (profile.fit.get("models") or ())
    missing = {name for entry in entries for name in entry.get("estimated", ())}
    missing |= {
        text for key, text in _PARTS.items() if any(key not in e for e in entries)
    }
    missing |= {text for key, text in _WHOLE.items() if key not in fit}
    return sorted(missing)


def fit_lines(profile: Profile) -> list[str]:
    found = fit_overview(profile)
    if not found:
        return ["no tables yet: kvsim profile fit FILE --model M --out OUT makes them"]
    lines = [
        f"tables of {name} on {', '.join(map(str, ranks))} ranks"
        for name, ranks in found["models"].items()
    ]
    several = ", ".join(
        f"{name} {'/'.join(names)}" for name, names in sorted(found["variants"].items())
    )
    if several:
        lines.append(f"variants: {several}")
    widths = ", ".join(
        f"{name} {inside:.3g} ({beyond:.3g} beyond)"
        for name, (inside, beyond) in sorted(found["intervals_percent"].items())
    )
    lines.append(f"nine of ten times lie within, in percent: {widths or 'not judged'}")
    host = found["host"]
    lines.append(
        "host time: the datasheet's default, as no whole steps were measured"
        if host is None
        else f"host time: {host['step_overhead_s'] * 1e3:.3g} ms a step and "
        f"{host['request_overhead_s'] * 1e6:.3g} us a request, fitted to whole steps"
    )
    lines.append(_correction(found["step_correction"]))
    if found["from_datasheet"]:
        lines.append(f"from the datasheet: {', '.join(found['from_datasheet'])}")
    return lines


def _correction(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "step correction: none, as no whole steps were measured"
    text = f"step correction: kernels x {found['factor']:.4g}, of {found['num_steps']}"
    before, after = found.get("before_percent"), found.get("after_percent")
    if before is None or after is None:
        return f"{text} steps"
    return f"{text} steps; median error {before:.3g} % before, {after:.3g} % with it"


def print_overview(profile: Profile) -> None:
    if profile.kind == DRY_RUN:
        print(
            "kvsim: warning: of a dry run: the times are made up, and no cost model "
            "takes them",
            file=sys.stderr,
        )
    print(f"{profile.id}\n{profile.kind}, {profile.body['format']}")
    for key, value in sorted(profile.provenance.items()):
        plain = json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
        print(f"  {key}: {plain}")
    for line in fit_lines(profile):
        print(f"  {line}")
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
    rows = report.to_json()
    width = max([len("operation"), *map(len, rows)])
    if headings:
        print(
            "errors in percent on points held out: a fifth at random (inside), the "
            "longest eighth of the lengths (beyond); floor: what two measurements of "
            "one shape differ by"
        )
        print("operation".ljust(width), *(f"{key:>11}" for key in _HEADINGS))
    for name, row in rows.items():
        cells = (f"{_cell(row[key]):>11}" for key in _HEADINGS)
        print(name.ljust(width), *cells)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def check_out(out: Path, overwrite: bool) -> None:
    """Check that a profile can be written, before the work is done."""
    if out.is_dir():
        raise UserError(f"--out '{out}' is a folder; give the path of a file")
    if out.exists() and not overwrite:
        raise UserError(
            f"'{out}' exists: give --overwrite to replace it, or another --out"
        )
    place = next((p for p in out.absolute().parents if p.exists()), out)
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"--out '{out}' cannot be written: '{place}' is not writable")


def tell(text: str, quiet: bool) -> None:
    """Say on a terminal what is being done, as it may take minutes."""
    if not quiet and sys.stderr.isatty():
        print(f"kvsim: {text} ...", file=sys.stderr, flush=True)


def write_and_tell(profile: Profile, out: Path, quiet: bool) -> int:
    write_profile(profile, out)
    if not quiet:
        points = sum(table.num_points for table in profile.ops)
        operations = sorted({table.operation for table in profile.ops})
        print(f"{out}: {points} points of {', '.join(operations)}; {profile.id[:19]}")
        if not profile.fit:
            print("no model's tables: steps are priced by those of a --model")
    return 0
