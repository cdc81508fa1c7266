"""The tables of one run, as the figures read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.tables.steps import FrameSteps
from sim.views.plots.binning import end_s
from sim.views.plots.run.curves import curves_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    import pandas as pd

    from sim.results.run import Results
    from sim.results.tables.steps import StepTable
    from sim.views.plots.binning import Floats
    from sim.views.plots.run.curves import Curves


def column(table: pd.DataFrame | Mapping[str, Any], name: str) -> Floats:
    """Return a column as float64; no values where an empty table lacks it."""
    return np.asarray(_values(table, name), dtype=np.float64)


def words(
    table: pd.DataFrame | Mapping[str, Any], name: str
) -> npt.NDArray[np.object_]:
    """Return a column of texts; no values where an empty table lacks it."""
    return np.asarray(_values(table, name), dtype=np.object_)


def _values(table: pd.DataFrame | Mapping[str, Any], name: str) -> Any:
    return () if len(table) == 0 and name not in table else table[name]


def singular(text: str, number: float) -> str:
    """Return `text` without its plural s where `number` is one of something."""
    is_plural = number == 1.0 and text[-2:-1].isalpha() and text.endswith("s")
    return text.removesuffix("s") if is_plural else text


@dataclass(frozen=True)
class Tables:
    """Result tables of one run and its summary, see `sim.results.schema`."""

    steps: StepTable | pd.DataFrame  # in memory or in batches
    # data frames, or columns by name; without columns where they are empty
    requests: pd.DataFrame | Mapping[str, Any]
    preemptions: pd.DataFrame | Mapping[str, Any]
    # keys of ``summary.json``, with ``title`` (one line) and ``block_size``
    # (tokens); a key that is missing is left out of the figures
    summary: Mapping[str, Any]
    # columns of ``kv_cache_groups.parquet``, where there is one
    groups: Mapping[str, Any] | None = None
    # columns of ``transfers.parquet`` and ``tier.parquet``, where there is a tier
    transfers: Mapping[str, Any] | None = None
    tier: Mapping[str, Any] | None = None
    # columns of ``prefix_tree.parquet``, where there is one
    tree: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, results: Results) -> Tables:
        found = results.recording
        tables = found.step_table, found.request_table, found.preemption_table
        tier = found.transfer_table, found.tier_table
        return cls(
            *tables, results.summary, found.group_table, *tier, tree=found.tree_table
        )

    @cached_property
    def step_table(self) -> StepTable:
        steps: Any = self.steps
        is_table = hasattr(steps, "batches")  # asked so that pandas need not be there
        table: StepTable = steps if is_table else FrameSteps(steps)
        return table

    @cached_property
    def has_steps(self) -> bool:
        return self.step_table.num_steps > 0

    def number(self, key: str) -> float | None:
        """Return a finite number of the summary, or None where there is none."""
        value = self.summary.get(key)
        if value is None or not math.isfinite(value):
            return None
        return float(value)

    @property
    def block_size(self) -> float | None:
        """Tokens of a block; None where that is not known, or depends on its group."""
        sizes = {kind["block_size"] for kind in self.summary.get("kv_cache_groups", ())}
        if len(sizes) > 1:
            return None
        return float(sizes.pop()) if sizes else self.number("block_size")

    def facts(self, **formats: str) -> str:
        """Return the numbers of the summary that exist, each in its format."""
        numbers = {key: self.number(key) for key in formats}
        return ", ".join(
            singular(formats[key].format(number), number)
            for key, number in numbers.items()
            if number is not None
        )

    @cached_property
    def stop_s(self) -> float:
        """Right end of the time axis in seconds: the last thing that happened."""
        last = float(column(self.preemptions, "time_s").max(initial=0.0))
        return max(last, end_s(self.step_table)) or self.number("duration") or 1.0

    @cached_property
    def curves(self) -> Curves:
        return curves_of(self.step_table, self.stop_s, self.block_size or 0.0)
