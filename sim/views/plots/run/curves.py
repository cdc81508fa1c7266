"""Values of each step that figures draw, gathered in one pass.

To draw another value, name it in `step_values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from sim.costs.base import STEP_PARTS
from sim.views.plots.binning import Envelope, Medians, StepColumns, StepMeans, with_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sim.results.tables.steps import StepTable
    from sim.views.plots.binning import Floats, Placed

NUM_PIXEL_COLUMNS = 1400
"""About one column a pixel of the plotted area."""

NUM_BINS = 200
"""Columns that are averaged on purpose: medians and shares."""

PARTS = STEP_PARTS
"""Columns of the parts of a step's latency."""

_Kind: TypeAlias = Literal["state", "pixels", "bins", "medians", "step_means"]


@dataclass(frozen=True, slots=True)
class StepValue:
    """A number of every step that a figure draws."""

    columns: tuple[str, ...]
    """Columns of the steps table from which it is computed."""
    of: Callable[..., Floats]
    """From those columns, as float64, to one number a step."""
    kept: tuple[_Kind, ...] = ()
    """Attributes of `Curves` that gather it; its total is gathered anyway."""


def step_values(block_size: float) -> dict[str, StepValue]:
    physical, blocks = "num_physical_tokens", "num_physical_blocks"
    logical, prefill = "num_logical_tokens", "num_prefill_tokens"

    def room(num_blocks: Floats) -> Floats:
        tokens: Floats = num_blocks * block_size
        return tokens

    values = {
        "kv_cache_usage_percent": StepValue(("kv_cache_usage",), _percent, ("state",)),
        "cpu_cache_usage_percent": StepValue(
            ("cpu_cache_usage",), _percent, ("state",)
        ),
        "num_swapped_out_blocks": StepValue(("num_swapped_out_blocks",), _itself),
        "num_running": StepValue(("num_running",), _itself, ("state",)),
        "num_swapped": StepValue(("num_swapped",), _itself, ("state",)),
        "num_waiting": StepValue(("num_waiting",), _itself, ("state",)),
        "capacity_tokens": StepValue((blocks,), room, ("state",)),
        physical: StepValue((physical,), _itself, ("state",)),
        logical: StepValue((logical,), _itself, ("state",)),
        "is_shared": StepValue((logical, physical), _differ),
        "empty_percent": StepValue(
            (physical, blocks),
            lambda part, num_blocks: _missing_percent(part, room(num_blocks)),
            ("pixels",),
        ),
        "saved_percent": StepValue((physical, logical), _missing_percent, ("pixels",)),
        "latency_ms": StepValue(
            ("latency_s",), lambda latency_s: 1e3 * latency_s, ("pixels", "medians")
        ),
        "prefill_tokens": StepValue((prefill,), _itself, ("step_means",)),
        "decode_tokens": StepValue(
            ("num_batched_tokens", prefill), _rest, ("step_means",)
        ),
    }
    shares = {part: StepValue((part, "latency_s"), _share, ("bins",)) for part in PARTS}
    return values | shares


def _itself(values: Floats) -> Floats:
    return values


def _percent(share: Floats) -> Floats:
    percent: Floats = 100.0 * share
    return percent


def _rest(whole: Floats, part: Floats) -> Floats:
    return np.maximum(whole - part, 0.0)


def _differ(one: Floats, other: Floats) -> Floats:
    return np.not_equal(one, other).astype(np.float64)


def _share(part_s: Floats, latency_s: Floats) -> Floats:
    """Return the percentage of the latency, 0 where there is none."""
    share = np.zeros_like(part_s)
    np.divide(part_s, latency_s, out=share, where=latency_s > 0.0)
    return 100.0 * share


def _missing_percent(part: Floats, whole: Floats) -> Floats:
    """Return ``1 - part / whole``, no less than 0, and 0 where there is no whole."""
    filled = np.ones_like(whole)
    np.divide(part, whole, out=filled, where=whole > 0.0)
    return 100.0 * np.maximum(1.0 - filled, 0.0)


@dataclass(slots=True)
class Total:
    """A value over all steps; without steps, 0."""

    num_steps: int = 0
    low: float = np.inf
    high: float = 0.0
    sum: float = 0.0
    over_time: float = 0.0
    """Sum of value times the time for which each step holds."""
    time_s: float = 0.0
    """Sum of those times."""

    def add(self, values: Floats, spans: Floats) -> None:
        self.num_steps += values.size
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self.sum += float(values.sum())
        # Not `@`, whose sum depends on the number of cores.
        self.over_time += float((values * spans).sum())
        self.time_s += float(spans.sum())

    @property
    def mean(self) -> float:
        return self.sum / self.num_steps if self.num_steps else 0.0

    @property
    def mean_over_time(self) -> float:
        return self.over_time / self.time_s if self.time_s else 0.0


class Curves:
    """Values of the steps over simulated time, by name as in `step_values`.

    `fine` columns are about a pixel wide, `coarse` ones wide enough to average over.
    `state` belongs to the engine and is empty while it is idle (fine); `pixels` (fine)
    and `bins` (coarse) belong to steps; `medians`, `step_means` count each step once.
    """

    def __init__(self, stop_s: float) -> None:
        self.fine = StepColumns(stop_s, NUM_PIXEL_COLUMNS)
        self.coarse = StepColumns(stop_s, NUM_BINS)
        self.totals: dict[str, Total] = {}
        self.state: dict[str, Envelope] = {}
        self.pixels: dict[str, Envelope] = {}
        self.bins: dict[str, Envelope] = {}
        self.medians: dict[str, Medians] = {}
        self.step_means: dict[str, StepMeans] = {}


class _Gatherer(Protocol):
    columns: StepColumns

    def add(self, placed: Placed, values: Floats) -> None: ...


def curves_of(steps: StepTable, stop_s: float, block_size: float) -> Curves:
    """Gather all values of `step_values` in one pass over the steps."""
    pass_ = _Pass(Curves(stop_s), step_values(block_size))
    for batch, end_s in with_ends(steps, pass_.columns):
        pass_.add(batch, end_s)
    return pass_.curves


class _Pass:
    def __init__(self, curves: Curves, values: Mapping[str, StepValue]) -> None:
        self.curves = curves
        self._values = values
        self._gatherers: dict[str, list[_Gatherer]] = {}
        for name, value in values.items():
            curves.totals[name] = Total()
            self._gatherers[name] = [self._gatherer(kind, name) for kind in value.kept]

    def _gatherer(self, kind: _Kind, name: str) -> _Gatherer:
        """Make the gatherer of a value, and note it in the curves."""
        curves = self.curves
        match kind:
            case "state":
                state = Envelope(curves.fine, idle_is_zero=True)
                return curves.state.setdefault(name, state)
            case "pixels":
                return curves.pixels.setdefault(name, Envelope(curves.fine))
            case "bins":
                return curves.bins.setdefault(name, Envelope(curves.coarse))
            case "medians":
                return curves.medians.setdefault(name, Medians(curves.coarse))
        return curves.step_means.setdefault(name, StepMeans(curves.coarse))

    @property
    def columns(self) -> list[str]:
        used = {name for value in self._values.values() for name in value.columns}
        return sorted(used | {"start_s", "latency_s"})

    def add(self, batch: Mapping[str, Floats], end_s: Floats) -> None:
        columns = (self.curves.fine, self.curves.coarse)
        placed = {each: each.place(batch["start_s"], end_s) for each in columns}
        for name, value in self._values.items():
            values = value.of(*(batch[column] for column in value.columns))
            self.curves.totals[name].add(values, end_s - batch["start_s"])
            padded = np.append(values, 0.0)
            for gatherer in self._gatherers[name]:
                gatherer.add(placed[gatherer.columns], padded)
