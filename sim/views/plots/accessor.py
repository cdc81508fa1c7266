"""``results.plot``: the figures of a run by their names, for notebooks and scripts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from matplotlib.axes import Axes

from sim.config.plug import did_you_mean
from sim.views.plots import FIGURES, Tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from sim.results.run import Results
    from sim.views.plots import RunFigure

    AxesLike: TypeAlias = Axes | Sequence[Axes] | NDArray[np.object_]


class Drawer:
    """One figure of one run: call it to draw.

    Parameters
    ----------
    draw
        The figure, one of `sim.views.plots.FIGURES`.
    tables
        The run.
    """

    def __init__(self, draw: RunFigure, tables: Tables) -> None:
        self._draw = draw
        self._tables = tables
        self.__doc__ = draw.__doc__

    def __call__(self, ax: AxesLike | None = None) -> Figure:
        """Draw the figure.

        Parameters
        ----------
        ax
            Axes to draw on, as many as the figure has panels, such as those of
            ``plt.subplots(2)``; a figure of its own unless given.

        Returns
        -------
        Figure
            What holds the axes; a notebook shows it.

        Raises
        ------
        ConfigError
            If there are more or fewer axes than panels.
        """
        if ax is None:
            return self._draw(self._tables)
        axes = [ax] if isinstance(ax, Axes) else list(np.ravel(np.asarray(ax)))
        return self._draw(self._tables, axes)


@dataclass(frozen=True)
class RunPlots:
    """The figures of a run, each a method named as its file in ``figures/``.

    Parameters
    ----------
    results
        The run.

    Examples
    --------
    >>> from kvsim import load_config, simulate
    >>> config = load_config("examples/demo.yaml", {"workload.preset.duration_s": 30})
    >>> plot = simulate(config).plot
    >>> [name for name in dir(plot) if not name.startswith("_")]  # doctest: +ELLIPSIS
    ['fragmentation', 'kv_cache_usage', 'latency_cdfs', 'preemptions', 'queues', ...]
    >>> len(plot.queues().axes)
    2
    """

    _results: Results

    @cached_property
    def _tables(self) -> Tables:
        return Tables.of(self._results)

    def __getattr__(self, name: str) -> Drawer:
        if name not in FIGURES:
            hint = did_you_mean(name, FIGURES)
            raise AttributeError(
                f"there is no figure '{name}'{hint} (there are: {', '.join(FIGURES)})"
            )
        return Drawer(FIGURES[name], self._tables)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *FIGURES]
