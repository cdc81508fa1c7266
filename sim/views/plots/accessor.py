"""``found.plot``: the figures of a run, a plan or a validation by their names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes

from sim.config.plug import did_you_mean
from sim.views.plots import FIGURES, Tables
from sim.views.plots.ranks import figures_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from sim.results.run import Results
    from sim.views.plots import RunFigure

    AxesLike: TypeAlias = Axes | Sequence[Axes] | NDArray[np.object_]


class Drawer:
    """One figure of one run: call it to draw."""

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
class NamedFigures:
    """Figures, each a method named as its file in ``figures/``.

    Examples
    --------
    >>> figures = NamedFigures({"states": "a figure of {}".format}, "a run")
    >>> figures.states()
    'a figure of a run'
    >>> [name for name in dir(figures) if not name.startswith("_")]
    ['states']
    """

    _figures: Mapping[str, Callable[[Any], Figure]]
    _found: Any

    def __getattr__(self, name: str) -> Callable[..., Figure]:
        if name.startswith("_"):  # asked by copy and pickle before there are fields
            raise AttributeError(name)
        if name not in self._figures:
            hint = did_you_mean(name, self._figures)
            raise AttributeError(
                f"there is no figure '{name}'{hint} (there are: "
                f"{', '.join(self._figures)})"
            )
        return self._drawer(name)

    def _drawer(self, name: str) -> Callable[..., Figure]:
        return partial(self._figures[name], self._found)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._figures]


class RunPlots(NamedFigures):
    """The figures of a run, each a method named as its file in ``figures/``.

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

    def __init__(self, results: Results) -> None:
        super().__init__(*figures_of(results))

    def _drawer(self, name: str) -> Any:
        if not isinstance(self._found, Tables):  # ranks, drawn over each other
            return super()._drawer(name)
        return Drawer(FIGURES[name], self._found)
