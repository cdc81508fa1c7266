"""Where a figure is drawn: panels of its own, or axes of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.errors import ConfigError
from sim.views.plots.style import new_figure, set_time_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.tables import Tables

_TITLE_PAD = 22.0
"""Points above axes of the user's, where the legend is."""


@dataclass(frozen=True, slots=True)
class Panels:
    """Where a figure is drawn: panels of its own, or axes of the user's."""

    figure: Figure  # what holds them
    axes: Sequence[Axes]  # top to bottom, or left to right

    def set_time_axes(self, stop_s: float) -> None:
        """Make x simulated time: of the last panel, and of those not tied to it."""
        last = self.axes[-1]
        for each in self.axes:
            if each is last or not last.get_shared_x_axes().joined(each, last):
                set_time_axis(each, stop_s)


def new_panels(
    tables: Tables,
    title: str,
    heights: Sequence[float] = (1.0,),
    *,
    right: float = 0.98,
    on: Sequence[Axes] | None = None,
) -> Panels:
    """Return a panel per height: those of a new figure, or the user's own axes."""
    if on is None:
        figure = new_figure(tables, title, heights, right=right)
        return Panels(figure, figure.axes)
    panels = given_panels(on, len(heights))
    panels.axes[0].set_title(title, loc="left", pad=_TITLE_PAD, fontsize="medium")
    return panels


def given_panels(on: Sequence[Axes], num_panels: int) -> Panels:
    if len(on) != num_panels:
        raise ConfigError(
            f"ax: this figure has {num_panels} panels, got {len(on)} axes; give those "
            f"of plt.subplots({num_panels}), or none"
        )
    figure = on[0].get_figure(root=True)
    assert figure is not None
    return Panels(figure, on)
