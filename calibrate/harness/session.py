"""A calibration from the correctness gate to the last block.

The plan is a pure function of the arguments and of what was measured: on resuming,
blocks of the checkpoint are taken in the place of measuring, and everything after them
follows as if nothing had happened.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calibrate.harness.device import Check, UnsupportedPointError
from calibrate.harness.grid import PRESETS, build_grid
from calibrate.harness.plan import ordered_blocks, refine, seed_of, sentinels
from calibrate.harness.timing import visit
from calibrate.measurement import Measurement, leading_metric, median, quantiles
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from calibrate.harness.checkpoint import Checkpoint
    from calibrate.harness.device import Device
    from calibrate.harness.geometry import Geometry
    from calibrate.harness.plan import Block
    from calibrate.measurement import Curve, Point

ADAPTIVE_PHASES = 2
"""Times that the grid is refined."""
SENTINEL_SAMPLES = 5


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
    """What is asked of a calibration."""

    geometry: Geometry
    preset: str
    backend: str
    operations: tuple[str, ...]
    seed: int


@dataclass(slots=True)
class Outcome:
    """What a calibration found."""

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


@dataclass(slots=True)
class _Collected:
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
        """Return one measurement a point, sorted by key."""
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
        """Return the leading metric's median of each point."""
        return {
            point: median(by_metric[leading_metric(by_metric)])
            for point, by_metric in self.samples.items()
        }


class Session:
    """One calibration on one device.

    Parameters
    ----------
    device
        What is timed.
    settings
        What is asked.
    checkpoint
        Where finished blocks go.
    progress
        Called after every visit.
    """

    def __init__(
        self,
        device: Device,
        settings: Settings,
        checkpoint: Checkpoint,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._device = device
        self._settings = settings
        self._checkpoint = checkpoint
        self._progress = progress
        self._choices = device.choices(settings.backend, settings.operations)
        # without those that the gate refuses
        self._sound = self._choices
        if not self._choices:
            raise UserError(
                f"nothing to time: no backend here offers"
                f" {', '.join(settings.operations)}"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be the same for a checkpoint to go on."""
        settings = self._settings
        geometry = {
            name: getattr(settings.geometry, name)
            for name in settings.geometry.__slots__
        }
        return {
            "geometry": geometry,
            "preset": settings.preset,
            "backend": settings.backend,
            "operations": list(settings.operations),
            "seed": settings.seed,
            "choices": [
                f"{choice.operation}/{choice.variant}: {choice.backend}"
                for choice in self._choices
            ],
            "limits": [
                self._device.limits.kv_tokens_bytes,
                self._device.limits.transfer_bytes,
                self._device.limits.pool_bytes,
            ],
            **self._device.facts(),
        }

    def run(self, resume: bool) -> Outcome:
        """Calibrate, from the start or from the checkpoint.

        Raises
        ------
        UserError
            When the checkpoint is another calibration's, or no variant passes.
        """
        finished: list[dict[str, Any]] = []
        if resume:
            resumed = self._checkpoint.resume(self.fingerprint())
            started, finished = resumed.started, resumed.blocks
        else:
            started = self._device.date()
            self._checkpoint.begin(self.fingerprint(), started)
        records = iter(finished)
        grid = self._grid()
        gate = self._taken_or("gate", records, lambda: self._gate(grid))
        checks = {
            key: Check(verdict["error"], verdict["tolerance"], verdict["reason"])
            for key, verdict in gate["checks"].items()
        }
        passed = [point for point in grid if checks[point.curve.key].passed]
        sound = {(point.curve.operation, point.curve.variant) for point in passed}
        self._sound = [c for c in self._choices if (c.operation, c.variant) in sound]
        if not passed:
            raise UserError(f"no variant is correct here: {_first_failure(checks)}")
        collected = _Collected(duration_s=gate["duration_s"])
        for block in self._blocks(passed, collected):
            measure = functools.partial(self._measure, block)
            collected.add(block, self._taken_or(block.name, records, measure))
        overlap = self._taken_or("overlap", records, self._overlap)
        return Outcome(
            measurements=collected.measurements(),
            checks=checks,
            backends={f"{c.operation}/{c.variant}": c.backend for c in self._choices},
            sentinels=collected.sentinels,
            interference=overlap["interference"],
            skipped=collected.skipped,
            clocks=collected.clocks,
            started=started,
            duration_s=collected.duration_s + overlap["duration_s"],
        )

    def _grid(self) -> list[Point]:
        settings = self._settings
        return build_grid(
            PRESETS[settings.preset],
            settings.geometry,
            self._device.limits,
            self._choices,
        )

    def _blocks(self, grid: Sequence[Point], collected: _Collected) -> Iterator[Block]:
        """Yield the blocks of the grid, then of what the measurements ask for."""
        preset = PRESETS[self._settings.preset]
        most = int(preset.adaptive_share * len(grid)) // ADAPTIVE_PHASES
        total = done = 0
        points = list(grid)
        for phase in range(1 + ADAPTIVE_PHASES):
            name = f"refinement {phase}" if phase else "grid"
            total += preset.rounds * len(points)
            for block in ordered_blocks(
                name, points, preset.rounds, self._settings.seed
            ):
                self._progress(Progress(name, done, total))
                yield block
                done += len(block.points)
            self._progress(Progress(name, done, total))
            points = refine(collected.medians(), most)
            if not points:
                return

    def _taken_or(
        self,
        name: str,
        records: Iterator[dict[str, Any]],
        measure: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the checkpoint's next block, or measure and record it."""
        record = next(records, None)
        if record is None:
            start_s = self._device.now_s()
            record = {"block": name, **measure()}
            # to the microsecond: differences of a clock depend on where it stands
            record["duration_s"] = round(self._device.now_s() - start_s, 6)
            self._checkpoint.append(record)
        elif record["block"] != name:
            raise UserError(
                f"'{self._checkpoint.path}' holds the block {record['block']!r} where"
                f" {name!r} belongs; start without --resume"
            )
        return record

    def _backend(self, at: Curve) -> str:
        return next(
            choice.backend
            for choice in self._choices
            if (choice.operation, choice.variant) == (at.operation, at.variant)
        )

    def _gate(self, grid: Sequence[Point]) -> dict[str, Any]:
        """Hold every curve's variant against high precision, once."""
        verdicts: dict[str, dict[str, Any]] = {}
        for at in dict.fromkeys(point.curve for point in grid):
            check = self._device.check(self._settings.geometry, at, self._backend(at))
            verdicts[at.key] = {
                # JSON has no infinity
                "error": min(check.error, 1e300),
                "tolerance": check.tolerance,
                "reason": check.reason,
            }
        return {"checks": verdicts}

    def _measure(self, block: Block) -> dict[str, Any]:
        visits = {point.key: self._visit(point, block) for point in block.points}
        watched = sentinels(self._settings.geometry, self._device.limits, self._sound)
        medians: dict[str, float] = {}
        for operation, (point, choice) in watched.items():
            seed = seed_of(self._settings.seed, block.name)
            try:
                task = self._device.prepare(point, choice.backend, seed)
            except UnsupportedPointError:
                continue
            try:
                metric = task.metrics[0]
                task.sample(metric, 2)
                medians[operation] = median(task.sample(metric, SENTINEL_SAMPLES))
            finally:
                task.close()
        clocks = self._device.clocks()
        return {"visits": visits, "sentinels": medians, "clocks": clocks}

    def _visit(self, point: Point, block: Block) -> dict[str, Any]:
        preset = PRESETS[self._settings.preset]
        seed = seed_of(self._settings.seed, block.round)
        try:
            task = self._device.prepare(point, self._backend(point.curve), seed)
        except UnsupportedPointError as error:
            return {"skipped": str(error)}
        try:
            found = visit(task, preset.samples)
        finally:
            task.close()
        return {"samples": found.samples, "settled": found.settled}

    def _overlap(self) -> dict[str, Any]:
        """Time a decode step and a transfer alone and together, where both exist."""
        watched = sentinels(self._settings.geometry, self._device.limits, self._sound)
        if not {"decode_attention", "swap"} <= watched.keys():
            return {"interference": []}
        step, transfer = watched["decode_attention"], watched["swap"]
        times = self._device.overlap(
            {"step": step[0], "transfer": transfer[0]},
            {"step": step[1].backend, "transfer": transfer[1].backend},
            seed_of(self._settings.seed, "overlap"),
        )
        medians = {name: median(samples) for name, samples in times.items()}
        found = {
            "step": step[0].to_dict(),
            "transfer": transfer[0].to_dict(),
            "step_slowdown": medians["step_with"] / medians["step_alone"],
            "transfer_slowdown": medians["transfer_with"] / medians["transfer_alone"],
            "n": len(times["step_with"]),
        }
        return {"interference": [found]}


def _first_failure(checks: dict[str, Check]) -> str:
    key, check = next(iter(checks.items()))
    why = check.reason or f"error {check.error:.2g}, at most {check.tolerance:.2g}"
    return f"{key}: {why}"
