"""Predicted against measured: step by step, by kind, and added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from calibrate.replay.log import KINDS, kind_of
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.costs.base import StepCost
    from sim.scheduler.batch import BatchShape

GATES: Final = {
    "decode": 5.0,
    "mixed": 10.0,
    "prefill": 10.0,
    "swap": 10.0,
    "copy": 10.0,
}
"""Median absolute errors that a kind of step may have, in percent."""
MAKESPAN_GATE: Final = 5.0
NUM_WORST: Final = 10


class Timing(NamedTuple):
    """Seconds of a step; medians of several executions."""

    wall_s: float
    """By the host, from the upload of its inputs until the sampled tokens are there."""
    device_s: float
    """Between events of the device: moves, forward pass and sampling."""
    moves_s: float
    """The part of `device_s` that swaps and copies take."""

    @property
    def host_s(self) -> float:
        """Seconds that the host adds before the device begins."""
        return self.wall_s - self.device_s


@dataclass(frozen=True, slots=True)
class Row:
    """One step: a line of ``replay.csv``. Seconds."""

    step: int
    start_s: float
    """In the simulation."""
    kind: str
    num_decodes: int
    decode_context_tokens: int
    num_prefills: int
    prefill_tokens: int
    num_moved_blocks: int
    """Swapped and copied."""
    predicted_s: float
    lo_s: float
    hi_s: float
    predicted_device_s: float
    predicted_moves_s: float
    wall_s: float
    device_s: float
    moves_s: float
    extrapolated: bool

    @property
    def error(self) -> float:
        """Of the whole step, relative to what was measured."""
        return self.predicted_s / self.wall_s - 1.0

    @property
    def device_error(self) -> float:
        return self.predicted_device_s / self.device_s - 1.0


def row_of(
    number: int,
    start_s: float,
    shape: BatchShape,
    costs: tuple[StepCost, StepCost],
    timing: Timing,
) -> Row:
    """Return the row of a step; `costs` are those of `Prediction.whole`, `.device`."""
    whole, device = costs
    return Row(
        step=number,
        start_s=start_s,
        kind=kind_of(shape),
        num_decodes=shape.num_decodes,
        decode_context_tokens=shape.num_decode_context_tokens,
        num_prefills=shape.num_prefills,
        prefill_tokens=shape.num_prefill_tokens,
        num_moved_blocks=sum(shape[6:]),
        predicted_s=whole.total_s,
        lo_s=whole.lo_s,
        hi_s=whole.hi_s,
        predicted_device_s=device.total_s,
        predicted_moves_s=device.swap_s + device.copy_s,
        wall_s=timing.wall_s,
        device_s=timing.device_s,
        moves_s=timing.moves_s,
        extrapolated=whole.extrapolated,
    )


@dataclass(frozen=True, slots=True)
class Errors:
    """Of a number of steps, in percent."""

    median: float
    p90: float
    bias: float
    """Median of the signed errors: below zero, steps take longer than predicted."""


@dataclass(frozen=True, slots=True)
class OfKind:
    """Steps of one kind."""

    kind: str
    num_executed: int
    num_recorded: int
    """In the schedule."""
    whole: Errors
    device: Errors
    predicted_s: float
    """Sums over the executed steps."""
    measured_s: float
    predicted_device_s: float
    device_s: float
    host_p50_s: float
    """Median of what the host adds before the device begins."""
    extrapolated_share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All steps of a replay."""

    rows: tuple[Row, ...]
    kinds: tuple[OfKind, ...]
    judges_whole: bool
    """Whether whole steps are held to the gates, or the device's part of them."""

    def judged(self, of_kind: OfKind) -> Errors:
        """Return the errors that are held to the gate."""
        return of_kind.whole if self.judges_whole else of_kind.device

    def passes(self, of_kind: OfKind) -> bool:
        """Whether a kind's median error is within its gate."""
        return self.judged(of_kind).median <= GATES[of_kind.kind]

    def makespan(self) -> tuple[float, float]:
        """Return seconds predicted and measured of the whole schedule.

        Where a sample was executed, each kind stands for all of its steps.
        """
        predicted_s = measured_s = 0.0
        for of in self.kinds:
            weight = of.num_recorded / of.num_executed
            pair = (
                (of.predicted_s, of.measured_s)
                if self.judges_whole
                else (of.predicted_device_s, of.device_s)
            )
            predicted_s += weight * pair[0]
            measured_s += weight * pair[1]
        return predicted_s, measured_s

    @property
    def makespan_error(self) -> float:
        predicted_s, measured_s = self.makespan()
        return 100.0 * (predicted_s / measured_s - 1.0)

    def error_of(self, row: Row) -> float:
        return row.error if self.judges_whole else row.device_error

    def worst(self, count: int = NUM_WORST) -> list[Row]:
        return sorted(self.rows, key=lambda row: -abs(self.error_of(row)))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison without its rows, JSON-ready."""
        predicted_s, measured_s = self.makespan()
        return {
            "judged": "whole steps" if self.judges_whole else "the device's part",
            "kinds": [
                asdict(of) | {"gate": GATES[of.kind], "passes": self.passes(of)}
                for of in self.kinds
            ],
            "makespan": {
                "predicted_s": predicted_s,
                "measured_s": measured_s,
                "error": self.makespan_error,
                "gate": MAKESPAN_GATE,
                "passes": abs(self.makespan_error) <= MAKESPAN_GATE,
            },
            "worst": [
                asdict(row) | {"error": self.error_of(row)} for row in self.worst()
            ],
        }


def compare(
    rows: Iterable[Row], recorded: Mapping[str, int], judges_whole: bool
) -> Comparison:
    """Return the comparison of executed steps."""
    kept = tuple(rows)
    executed = Counter(row.kind for row in kept)
    kinds = tuple(
        _of_kind(kind, [row for row in kept if row.kind == kind], recorded[kind])
        for kind in KINDS
        if executed[kind]
    )
    return Comparison(kept, kinds, judges_whole)


def _of_kind(kind: str, rows: Sequence[Row], num_recorded: int) -> OfKind:
    return OfKind(
        kind=kind,
        num_executed=len(rows),
        num_recorded=num_recorded,
        whole=_errors([row.error for row in rows]),
        device=_errors([row.device_error for row in rows]),
        predicted_s=added(row.predicted_s for row in rows),
        measured_s=added(row.wall_s for row in rows),
        predicted_device_s=added(row.predicted_device_s for row in rows),
        device_s=added(row.device_s for row in rows),
        host_p50_s=float(np.median([row.wall_s - row.device_s for row in rows])),
        extrapolated_share=sum(row.extrapolated for row in rows) / len(rows),
    )


def _errors(relative: Sequence[float]) -> Errors:
    percent = 100.0 * np.array(relative)
    apart = np.abs(percent)
    return Errors(
        median=float(np.median(apart)),
        p90=float(np.quantile(apart, 0.9)),
        bias=float(np.median(percent)),
    )
