"""``kvsim profile show --crossover``: swap or recompute, for a model on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrate.cli.output import print_json
from sim.costs.crossover import shown
from sim.errors import UserError
from sim.results.output import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from sim.costs.crossover import Crossover, CrossoverReport, Question

_NUM_ROWS = 14


def show_crossover(
    question: Question, *, out: Path | None, json: bool, quiet: bool
) -> int:
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"--out is a figure and must end in .png; got '{out}'")
    report = question.answer()
    if out is not None:
        _draw(report, out)
    if json:
        print_json({"question": report.title, **report.found.to_json()})
    elif quiet:
        for name, words in report.sentences.items():
            print(f"{name}: {words}")
    else:
        _print(report.found, report.title, out)
    return 0


def _print(found: Crossover, below: str, out: Path | None) -> None:
    print(below)
    again = "recompute*" if found.extrapolated else "recompute"
    names = [f"{n}*" if swap.extrapolated else n for n, swap in found.swaps.items()]
    print("ms".ljust(8), *(f"{name:>11}" for name in (again, *names)))
    for place in shown(found.num_tokens, _NUM_ROWS).tolist():
        bands = (found.recompute, *(swap.band for swap in found.swaps.values()))
        cells = (f"{1e3 * band.seconds[place]:>11,.2f}" for band in bands)
        print(f"{found.num_tokens[place]:<8,}", *cells)
    for name, words in found.sentences().items():
        print(f"{name}: {words}")
    if found.extrapolated or any(swap.extrapolated for swap in found.swaps.values()):
        print("* in part or whole an estimate, not measured in this shape")
    if out is not None:
        print(f"drawn in {out}")


def _draw(report: CrossoverReport, out: Path) -> None:
    from sim.views.plots.studies.crossover import swap_or_recompute
    from sim.views.plots.style import to_png

    pixels = to_png(swap_or_recompute(report.found, report.title))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, pixels)
    except OSError as error:
        raise UserError(
            f"--out: '{out}' cannot be written: {error.strerror}; give another path"
        ) from error
