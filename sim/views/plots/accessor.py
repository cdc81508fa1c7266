"""``found.plot``: the figures of a run, a plan or a validation by their names.

Ranks and engines of a run are drawn as runs that are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes

from sim.config.plug import did_you_mean
from sim.errors import ConfigError
from sim.results.fleet.ranks import parts_of, tables_of_rank
from sim.results.fleet.summary import places_there, usage_while_there
from sim.views.plots import FIGURES, Tables
from sim.views.plots.compared.overlays import OVERLAYS
from sim.views.plots.compared.runs import MAX_RUNS, Run
from sim.views.plots.run.drafts import drafts, has_drafts
from sim.views.plots.run.fleets import (
    engines_figure,
    has_changes,
    has_pools,
    pools_figure,
    replicas_figure,
)
from sim.views.plots.run.tiers import has_tier, tier, tier_ttft

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from sim.results.run import Results

    AxesLike: TypeAlias = Axes | Sequence[Axes] | NDArray[np.object_]


class Drawer:
    """One figure of one run, or of its engines: call it to draw."""

    def __init__(self, draw: Callable[..., Figure], found: Any) -> None:
        self._draw = draw
        self._found = found
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
            The figure of the axes; a notebook shows it.

        Raises
        ------
        ConfigError
            If there are more or fewer axes than panels, or the run is of several
            engines or ranks, whose figures are drawn whole.
        """
        if ax is None:
            return self._draw(self._found)
        if not isinstance(self._found, Tables):
            raise ConfigError(
                "ax: of several engines or ranks each figure is drawn on axes of its "
                "own; leave it out"
            )
        axes = [ax] if isinstance(ax, Axes) else list(np.ravel(np.asarray(ax)))
        return self._draw(self._found, axes)


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

    def _drawer(self, name: str) -> Drawer:
        return Drawer(self._figures[name], self._found)


def figures_of(results: Results) -> tuple[Mapping[str, Callable[[Any], Figure]], Any]:
    """Return the figures of a run, and the runs that they draw: a curve a rank.

    A fleet has one more, of all its engines, one of pools that prefill and decode, and
    one of replicas that come and go.
    A run whose steps verify drafts has one more, and one with a tier behind its pool
    has two; of several engines they are of all together.
    """
    part, ranks = parts_of(results.summary)
    if not ranks:
        tables = Tables.of(results)
        more = {"drafts": drafts} if has_drafts(tables) else {}
        more |= {"tier": tier, "tier_ttft": tier_ttft} if has_tier(tables) else {}
        return FIGURES | more, tables
    drawn = [*range(len(ranks))]
    if part == "engine":
        drawn = places_there(results.summary)
    if len(drawn) > MAX_RUNS:
        places = np.linspace(0, len(drawn) - 1, MAX_RUNS).round().astype(int)
        drawn = [drawn[place] for place in places]
    told = ""
    if len(drawn) < len(ranks):
        told = f"{len(drawn)} of {len(ranks)} {part}s are drawn"
    runs = []
    for rank in drawn:
        found = tables_of_rank(results.recording, rank)
        usage = {"kv_cache_usage_mean": usage_while_there(ranks[rank])}
        tables = Tables(
            found.step_table,
            found.request_table,
            found.preemption_table,
            {**results.summary, **ranks[rank], **usage},
            found.group_table,
            tree=found.tree_table,
        )
        runs.append(Run(f"{part} {rank}", tables, told))
    figures: dict[str, Callable[[Any], Figure]] = {**OVERLAYS}
    whole = Tables.of(results)
    if has_drafts(whole):
        figures |= {"drafts": lambda _: drafts(whole)}
    if has_tier(whole):
        figures |= {
            "tier": lambda _: tier(whole),
            "tier_ttft": lambda _: tier_ttft(whole),
        }
    if part == "engine":
        figures |= {"engines": lambda _: engines_figure(results)}
        if has_pools(results):
            figures |= {"pools": lambda _: pools_figure(results)}
        if has_changes(results):
            figures |= {"replicas": lambda _: replicas_figure(results)}
    return figures, runs
