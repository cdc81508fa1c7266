"""Results with their figures, as the functions of `sim.api` return them."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from sim.costs import crossover as comparison
from sim.results import run
from sim.studies.planning import solve
from sim.studies.planning.answer.verdict import Verdict, verdicts_of
from sim.studies.prefixes import report as prefixes
from sim.studies.validation import run as validation

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from sim.views.plots.accessor import NamedFigures, RunPlots

Face = TypeVar("Face")


def with_figures(face: type[Face], found: Any) -> Face:
    """Return results as the class of this module that adds their figures."""
    return face(**{each.name: getattr(found, each.name) for each in fields(found)})


class Results(run.Results):
    """Results of a simulation, in memory or on disk.

    Parameters
    ----------
    config
        The configuration that was run.
    recording
        Its tables.
    summary
        JSON-ready numbers and provenance; no NaN, no wall time.

    Examples
    --------
    >>> from kvsim import load_config, simulate
    >>> config = load_config("examples/demo.yaml", {"workload.preset.duration_s": 60})
    >>> results = simulate(config)
    >>> results.summary["completed"], len(results.requests)
    (366, 366)
    >>> float(results.steps["kv_cache_usage"].max().round(3))
    0.52
    >>> round(results.summary["kv_cache_usage_max"], 3)
    0.52
    >>> figure = results.plot.kv_cache_usage()
    """

    @classmethod
    def load(cls, directory: Path | str) -> Results:
        """Read the results of ``kvsim run``; tables are read when they are asked for.

        Parameters
        ----------
        directory
            Holds ``config.yaml``, ``summary.json`` and the tables.

        Raises
        ------
        ResultsError
            If it does not, or another release wrote them.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> from kvsim import Results, load_config, simulate
        >>> config = load_config("examples/demo.yaml", ["workload.preset.duration_s=9"])
        >>> with TemporaryDirectory() as directory:
        ...     results = simulate(config)
        ...     results.write(directory)
        ...     again = Results.load(directory)
        ...     again.requests.equals(results.requests)
        True
        """
        return super().load(directory)

    @property
    def plot(self) -> RunPlots:
        """The figures, by name: ``results.plot.queues()``; `dir` lists them."""
        from sim.views.plots.accessor import RunPlots  # noqa: PLC0415 - matplotlib

        return RunPlots(self)

    def draw(self, directory: Path) -> list[Path]:
        """Draw all figures as PNG into `directory`; return their paths."""
        from sim.views.plots.accessor import figures_of  # noqa: PLC0415 - matplotlib
        from sim.views.plots.output import write_pngs  # noqa: PLC0415

        return write_pngs(*figures_of(self), directory)

    def _repr_html_(self) -> str:
        """Return the summary as a notebook shows it."""
        from sim.views.notebook import summary_html  # noqa: PLC0415 - notebooks only

        return summary_html(self.summary)


class PrefixReport(prefixes.PrefixReport):
    """A prefix curve with its figure."""

    def plot(self) -> Figure:
        """Draw the curve, its bound and the answer."""
        from sim.views.plots.studies.prefixes import prefix_hits  # noqa: PLC0415 - matplotlib

        return prefix_hits(self)


class PlanResult(solve.PlanResult):
    """Findings of a plan, with its figures."""

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdict by model: does one replica hold; which fleet to buy."""
        return verdicts_of(self.data)

    def _repr_html_(self) -> str:
        from sim.views.notebook import verdict_html  # noqa: PLC0415

        shown = [verdict_html(each.to_dict()) for each in self.verdicts.values()]
        return f"<div>{''.join(shown)}{self.table.to_html(index=False)}</div>"

    @property
    def plot(self) -> NamedFigures:
        """The figures by name: ``plot.capacity_curves()``; `dir` lists them."""
        from sim.views.plots.accessor import NamedFigures  # noqa: PLC0415 - matplotlib
        from sim.views.plots.studies.plans import PLAN_FIGURES  # noqa: PLC0415

        return NamedFigures(PLAN_FIGURES, self.data)

    def write(self, directory: Path, *, wall_s: float, figures: bool = False) -> None:
        super().write(directory, wall_s=wall_s)
        if figures:
            from sim.views.plots.output import write_pngs  # noqa: PLC0415
            from sim.views.plots.studies.plans import PLAN_FIGURES  # noqa: PLC0415

            write_pngs(PLAN_FIGURES, self.data, directory / "figures")


class CrossoverReport(comparison.CrossoverReport):
    """The answer of `crossover` with its figure."""

    def plot(self) -> Figure:
        """Draw the comparison; both axes logarithmic."""
        from sim.views.plots.studies.crossover import swap_or_recompute  # noqa: PLC0415 - matplotlib

        return swap_or_recompute(self.found, self.title)


class Validation(validation.Validation):
    """A measured run beside the simulated one, with figures."""

    @property
    def plot(self) -> NamedFigures:
        """The figures by name, such as ``plot.states()``; `dir` lists them."""
        from sim.views.plots.accessor import NamedFigures  # noqa: PLC0415 - matplotlib
        from sim.views.plots.studies.validation import figures_of  # noqa: PLC0415

        return NamedFigures(figures_of(self), self)
