"""All figures of a profile, written into one folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from calibrate.figures.coverage import NUM_PANELS, coverage, panels_of
from calibrate.figures.fitted import measured_and_fitted
from calibrate.figures.placement import roofline_placement
from calibrate.figures.subject import source_line, subjects
from calibrate.threads import one_thread
from sim.results.output import ResultFiles, output_directory, write_json
from sim.views.plots.style import to_png

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from calibrate.figures.subject import Subject
    from calibrate.side_by_side import ShowFits
    from sim.costs.measured.profile import Profile

FILES: Final = ResultFiles(
    "kvsim profile plot", "errors.json", frozenset({"errors.json", "figures"})
)


def draw_profile(
    profile: Profile,
    directory: Path,
    only: Sequence[str] = (),
    *,
    overwrite: bool,
    show: ShowFits | None = None,
) -> tuple[list[str], list[str]]:
    """Draw what a profile holds, and write the folder as a whole or not at all.

    `show` is told of fits that are done.

    Returns
    -------
    names, left_out
        Files below `directory`, and what was not drawn, with the reason.
    """
    found, left_out = subjects(profile, only, show)
    written = output_directory(directory, overwrite=overwrite, files=FILES)
    with one_thread(), written as partial:
        (partial / "figures").mkdir()
        names = []
        for name, figure in _figures(profile, found):
            names.append(f"figures/{name}.png")
            (partial / names[-1]).write_bytes(to_png(figure))
        write_json(partial / "errors.json", _errors(profile, found))
    return [*names, "errors.json"], left_out


def _figures(
    profile: Profile, found: Sequence[Subject]
) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure, one after the other: each is dropped once written."""
    source = source_line(profile)
    for subject in found:
        yield f"fitted_{subject.name}", measured_and_fitted(subject, source)
    yield "roofline", roofline_placement(profile, found, source)
    panels = panels_of(found)
    for first in range(0, len(panels), NUM_PANELS):
        name = "coverage" if not first else f"coverage_{first // NUM_PANELS + 1}"
        yield name, coverage(panels[first : first + NUM_PANELS], source)


def _errors(profile: Profile, found: Sequence[Subject]) -> dict[str, Any]:
    return {
        "profile": profile.id,
        "unit": "percent",
        "operations": {
            subject.name: {
                "num_points": len(subject.time_s),
                "mape_inside": subject.errors.mape(),
                "p90_inside": subject.errors.p90(),
                "mape_beyond": subject.errors.mape(beyond=True),
                "p90_beyond": subject.errors.p90(beyond=True),
            }
            for subject in found
        },
    }
