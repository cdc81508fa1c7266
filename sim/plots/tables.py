"""The tables of one run, as the figures read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.plots.binning import StepColumns

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from sim.plots.binning import Floats

NUM_PIXEL_COLUMNS = 1400
"""About one column a pixel of the plotted area."""

NUM_BINS = 200
"""Columns of what is averaged on purpose: medians and shares."""


def column(frame: pd.DataFrame, name: str) -> Floats:
    """Return a column as float64; no values where an empty table lacks it."""
    if name not in frame and frame.empty:
        return np.zeros(0)
    return frame[name].to_numpy(dtype=np.float64)


def singular(text: str, number: float) -> str:
    """Return `text` without its plural s where `number` is one of something."""
    is_plural = number == 1.0 and text[-2:-1].isalpha() and text.endswith("s")
    return text.removesuffix("s") if is_plural else text


@dataclass(frozen=True)
class Tables:
    """Result tables of one run and its summary, see `sim.schema`."""

    steps: pd.DataFrame
    requests: pd.DataFrame
    preemptions: pd.DataFrame
    summary: Mapping[str, Any]

    def step(self, name: str) -> Floats:
        """Return a column of the steps table."""
        return column(self.steps, name)

    def number(self, key: str) -> float | None:
        """Return a finite number of the summary, or None where there is none."""
        value = self.summary.get(key)
        if value is None or not math.isfinite(value):
            return None
        return float(value)

    def facts(self, **formats: str) -> str:
        """Return the numbers of the summary that exist, comma-separated.

        Parameters
        ----------
        **formats
            Key of the summary and the format of its number, such as
            ``num_preemptions="{:,.0f} preemptions"``.
        """
        numbers = {key: self.number(key) for key in formats}
        return ", ".join(
            singular(formats[key].format(number), number)
            for key, number in numbers.items()
            if number is not None
        )

    @cached_property
    def stop_s(self) -> float:
        """Right end of the time axis in seconds: the last thing that happened."""
        ends = self.step("start_s")[-1:] + self.step("latency_s")[-1:]
        times = np.concatenate([ends, column(self.preemptions, "time_s")])
        last = float(times.max(initial=0.0))
        return last or self.number("duration") or 1.0

    @cached_property
    def pixels(self) -> StepColumns:
        """What belongs to steps, in columns as fine as the screen."""
        return self._columns(NUM_PIXEL_COLUMNS)

    @cached_property
    def state(self) -> StepColumns:
        """What belongs to the engine, which is empty while it is idle, as fine."""
        return self._columns(NUM_PIXEL_COLUMNS, idle_is_zero=True)

    @cached_property
    def bins(self) -> StepColumns:
        """What belongs to steps, in columns coarse enough to average over."""
        return self._columns(NUM_BINS)

    def _columns(self, num_columns: int, *, idle_is_zero: bool = False) -> StepColumns:
        return StepColumns(
            self.step("start_s"),
            self.step("latency_s"),
            self.stop_s,
            num_columns,
            idle_is_zero=idle_is_zero,
        )
