"""From the folders of results to a page on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.errors import OutputError, ResultsError
from sim.results.folder import kind_of
from sim.results.output import write_whole
from sim.studies.planning.answer.file import read_plan
from sim.views.report.html import Markup, element, paragraph
from sim.views.report.looks import tag
from sim.views.report.page import Figures, page
from sim.views.report.plotly_charts import PlotlyFigures, plotly_script
from sim.views.report.sections import FLEET_SECTIONS, RUN_SECTIONS
from sim.views.report.sections.plan import PLAN_SECTIONS
from sim.views.report.sections.sweep import SWEEP_SECTIONS, load_sweep
from sim.views.report.source import load_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sim.views.report.page import Part, Section

    OnSection = Callable[[str, int, int], None]


def build_page(
    directories: Sequence[Path],
    *,
    is_static: bool = False,
    on_section: OnSection | None = None,
) -> str:
    """Return a page: of one run or several compared, of a sweep, or of a plan.

    The same results give the same bytes. `on_section` is told the section that is made,
    how many are done, and how many there are.
    """
    if not directories:
        raise ResultsError("nothing to report on; give the --out of 'kvsim run'")
    kinds = [kind_of(path) for path in directories]
    for path, kind in zip(directories, kinds, strict=True):
        if kind != "run" and len(directories) > 1:
            raise ResultsError(
                f"'{path}' holds a {kind}, which has a page of its own; give it alone, "
                f"or runs only"
            )
    figures = _figures(is_static=is_static)
    if kinds[0] == "run":
        return _of_runs(directories, figures, on_section)
    path = directories[0]
    if kinds[0] == "plan":
        plan = read_plan(path)
        under = paragraph(f"Plan in {path}", class_="under")
        parts = _parts(PLAN_SECTIONS, plan, on_section)
        return page(f"Plan: {plan['traffic']['title']}", under, parts, figures)
    sweep = load_sweep(path)
    under = paragraph(f"Sweep in {path}", class_="under")
    parts = _parts(SWEEP_SECTIONS, sweep, on_section)
    return page(f"Sweep: {sweep.title}", under, parts, figures)


def _figures(*, is_static: bool) -> Figures:
    script = None if is_static else plotly_script()
    if script is not None:
        return PlotlyFigures(script)
    from sim.views.report.svg_charts import SvgFigures  # noqa: PLC0415  # slow to import

    return SvgFigures()


def _parts(
    sections: Sequence[Section], found: object, on_section: OnSection | None
) -> list[Part]:
    parts = []
    for done, each in enumerate(sections):
        if on_section is not None:
            on_section(each.title, done, len(sections))
        parts.append(each.of(found))
    return parts


def _of_runs(
    directories: Sequence[Path], figures: Figures, on_section: OnSection | None
) -> str:
    runs = load_runs(directories)
    of_kind = FLEET_SECTIONS if any(run.is_fleet for run in runs) else RUN_SECTIONS
    sections = [
        each for each in of_kind if each.is_needed is None or each.is_needed(runs)
    ]
    parts = _parts(sections, runs, on_section)
    title = str(runs[0].summary.get("title", runs[0].label))
    if len(runs) == 1:
        under = paragraph(f"Run in {runs[0].path}", class_="under")
        return page(title, under, parts, figures)
    named = (
        element("li", tag(run), f": {run.summary.get('title', '')} ({run.path})")
        for run in runs
    )
    under = Markup(element("ul", *named, class_="runs under"))
    return page(f"{len(runs)} runs compared", under, parts, figures)


def check_page(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that must not or cannot be written, before anything is read."""
    if path.is_dir():
        raise OutputError(f"'{path}' is a directory; give --out a file, such as x.html")
    if path.exists() and not overwrite:
        raise OutputError(
            f"'{path}' exists already; choose another --out or add --overwrite"
        )
    if not path.parent.is_dir():
        raise OutputError(
            f"there is no directory '{path.parent}'; make it, or choose another --out"
        )


def write_page(text: str, path: Path, *, overwrite: bool) -> None:
    """Write a page; an older one stays until the new one is complete."""
    check_page(path, overwrite=overwrite)
    try:
        write_whole(path.resolve(), text.encode())
    except OSError as error:
        raise OutputError(
            f"'{path}' cannot be written: {error.strerror or error}; make room or "
            f"choose another --out"
        ) from error
