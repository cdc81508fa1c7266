"""The settings, the progress and the outcome of a calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calibrate.measurement import Measurement, leading_metric, median, quantiles

if TYPE_CHECKING:
    from calibrate.harness.device import Check
    from calibrate.harness.geometry import Geometry
    from calibrate.harness.plan import Block
    from calibrate.measurement import Point


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a calibration is."""

    phase: str
    done: int
    """Visits."""
    total: int
    """Visits of the phases so far."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A calibration as it is asked for."""

    geometry: Geometry
    preset: str
    backend: str
    operations: tuple[str, ...]
    seed: int
    time_limit_s: float = math.inf
    """Seconds after which no further block is begun."""


@dataclass(slots=True)
class Visits:
    """How much of the grid was visited: points times rounds."""

    asked: int = 0
    done: int = 0
    """Those of refinements too."""
    are_all: bool = True


@dataclass(slots=True)
class Outcome:
    """Times and verdicts that a calibration found."""

    measurements: list[Measurement]
    checks: dict[str, Check]
    """The gate's verdicts by curve."""
    backends: dict[str, str]
    """Backend of each "operation/variant"."""
    sentinels: dict[str, list[float]]
    """Median seconds of each sentinel, block after block."""
    interference: list[dict[str, Any]]
    skipped: dict[str, str]
    """Points that a variant could not take, and why."""
    clocks: list[dict[str, Any]]
    started: str
    duration_s: float
    visits: Visits = field(default_factory=Visits)


@dataclass(slots=True)
class Collected:
    """Samples of all visits so far."""

    samples: dict[Point, dict[str, list[float]]] = field(default_factory=dict)
    unsettled: set[Point] = field(default_factory=set)
    sentinels: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    clocks: list[dict[str, Any]] = field(default_factory=list)
    duration_s: float = 0.0

    def add(self, block: Block, record: dict[str, Any]) -> None:
        """Take a finished block in, measured just now or read from a checkpoint."""
        for point in block.points:
            found = record["visits"][point.key]
            if "skipped" in found:
                self.skipped[point.key] = found["skipped"]
                continue
            mine = self.samples.setdefault(point, {})
            for metric, samples in found["samples"].items():
                mine.setdefault(metric, []).extend(samples)
            if not found["settled"]:
                self.unsettled.add(point)
        for name, seconds in record["sentinels"].items():
            self.sentinels.setdefault(name, []).append(seconds)
        self.clocks.append(record["clocks"])
        self.duration_s += record["duration_s"]

    def measurements(self) -> list[Measurement]:
        return [
            Measurement(
                point,
                {metric: quantiles(times) for metric, times in by_metric.items()},
                point not in self.unsettled,
            )
            for point, by_metric in sorted(
                self.samples.items(), key=lambda item: item[0].key
            )
        ]

    def medians(self) -> dict[Point, float]:
        return {
            point: median(by_metric[leading_metric(by_metric)])
            for point, by_metric in self.samples.items()
        }
