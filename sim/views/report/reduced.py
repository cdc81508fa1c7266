"""The steps of a run, reduced once for all sections: one pass, whatever their number.

What belongs to the engine, such as its queues, is kept in `NUM_FINE` columns of
simulated time with lowest, highest and mean value, so that a step that touches 100 %
is seen however long the run is; what is averaged on purpose, in `NUM_COARSE`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from sim.costs.base import STEP_PARTS
from sim.views.plots.binning import (
    Envelope,
    StepColumns,
    StepMeans,
    end_s,
    with_ends,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.results.tables.steps import StepTable
    from sim.views.plots.binning import Floats, Placed

    Batch = Mapping[str, Floats]

NUM_FINE: Final = 2000
"""Columns of states: more than a screen has, so that zooming in shows more."""

NUM_COARSE: Final = 200
"""Columns of averages."""

FULL: Final = 0.95
"""A cache that is used so far has little room for the next request."""

STATES: Final = (
    "kv_cache_usage",
    "cpu_cache_usage",
    "num_running",
    "num_waiting",
    "num_swapped",
)
AVERAGES: Final = (*STEP_PARTS, "latency_s", "num_prefill_tokens")
AVERAGED: Final = (*AVERAGES, "num_decode_tokens", "num_recomputed_tokens")
_SUMMED: Final = (*STEP_PARTS, "latency_s")
COLUMNS: Final = tuple(
    dict.fromkeys(
        ("start_s", *STATES, *AVERAGES, "num_batched_tokens", "num_recomputed_tokens")
    )
)
"""Columns of steps that a report reads."""


class Averaged(Protocol):
    """A value over time: its mean in each column."""

    @property
    def mean(self) -> Floats: ...


class Ranged(Averaged, Protocol):
    """A value over time: its extremes in each column, too."""

    @property
    def low(self) -> Floats: ...

    @property
    def high(self) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a batch: the most requests, and the most tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class Waits:
    """Request-seconds of waiting by resource; seconds at a full cache."""

    for_seqs_s: float = 0.0
    for_tokens_s: float = 0.0
    for_blocks_s: float = 0.0
    full_s: float = 0.0

    def add(self, batch: Batch, spans: Floats, limits: Limits) -> None:
        """Take a batch of steps.

        A step that runs as many requests as it may has the others wait for a place; one
        that has used its tokens, for the next step; else they wait for blocks.
        """
        waited_s = spans * batch["num_waiting"]
        at_seqs = batch["num_running"] >= limits.max_num_seqs
        at_tokens = batch["num_batched_tokens"] >= 0.99 * limits.max_num_batched_tokens
        at_tokens &= ~at_seqs
        self.for_seqs_s += float(waited_s[at_seqs].sum())
        self.for_tokens_s += float(waited_s[at_tokens].sum())
        self.for_blocks_s += float(waited_s[~(at_seqs | at_tokens)].sum())
        self.full_s += float(spans[batch["kv_cache_usage"] >= FULL].sum())

    @property
    def total_s(self) -> float:
        return self.for_seqs_s + self.for_tokens_s + self.for_blocks_s


@dataclass(slots=True)
class Reduced:
    """The steps reduced to values that figures draw and sentences count."""

    stop_s: float  # end of the time axis: the last thing that happened, in seconds
    num_steps: int = 0
    num_fine: int = NUM_FINE  # columns of states
    waits: Waits = field(default_factory=Waits)
    # by name as in `STATES`, in fine columns; empty while the engine is idle
    states: Mapping[str, Ranged] = field(default_factory=dict)
    # by name as in `AVERAGES`, and ``num_decode_tokens``,
    # ``num_recomputed_tokens``: means over the steps that start in each coarse
    # column
    averages: Mapping[str, Averaged] = field(default_factory=dict)
    # by name: parts of all steps together, and ``latency_s``
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def fine_s(self) -> float:
        return self.stop_s / self.num_fine

    @property
    def coarse_s(self) -> float:
        return self.stop_s / NUM_COARSE


def reduce_steps(
    steps: StepTable,
    limits: Limits,
    after_s: float = 0.0,
    *,
    num_fine: int = NUM_FINE,
) -> Reduced:
    stop_s = max(end_s(steps), after_s) or 1.0
    fine, coarse = StepColumns(stop_s, num_fine), StepColumns(stop_s, NUM_COARSE)
    reduced = Reduced(stop_s, steps.num_steps, num_fine)
    states = {name: Envelope(fine, idle_is_zero=True) for name in STATES}
    averages = {name: StepMeans(coarse) for name in AVERAGED}
    reduced.states, reduced.averages = states, averages
    reduced.seconds = dict.fromkeys(_SUMMED, 0.0)
    for batch, ends_s in with_ends(steps, COLUMNS):
        reduced.waits.add(batch, ends_s - batch["start_s"], limits)
        for name in _SUMMED:
            reduced.seconds[name] += float(batch[name].sum())
        of_decodes = batch["num_batched_tokens"] - batch["num_prefill_tokens"]
        values = {**batch, "num_decode_tokens": np.maximum(of_decodes, 0.0)}
        _gather(states, fine.place(batch["start_s"], ends_s), values)
        _gather(averages, coarse.place(batch["start_s"], ends_s), values)
    return reduced


def _gather(
    gatherers: Mapping[str, Envelope] | Mapping[str, StepMeans],
    placed: Placed,
    values: Batch,
) -> None:
    for name, gatherer in gatherers.items():
        gatherer.add(placed, np.append(values[name], 0.0))
