"""A calibration from the correctness gate to the last block.

The plan is a pure function of the arguments and of what was measured: on resuming,
blocks of the checkpoint are taken in the place of measuring, and everything after them
follows as if nothing had happened.
"""

from __future__ import annotations

import functools
import math
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from calibrate.harness.device import (
    Check,
    DeviceFaultError,
    UnsupportedPointError,
)
from calibrate.harness.grid import PRESETS, build_grid
from calibrate.harness.outcome import (
    Collected,
    Outcome,
    Progress,
    Settings,
    Visits,
)
from calibrate.harness.plan import ordered_blocks, refine, seed_of, sentinels
from calibrate.measurement import median
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from calibrate.harness.checkpoint import Checkpoint
    from calibrate.harness.device import Device, Task
    from calibrate.harness.grid import Choice, Preset
    from calibrate.harness.plan import Block
    from calibrate.measurement import Curve, Point

WARM_UP_SAMPLES = 5
"""Samples of one median of the warm-up, at most."""
WARM_UP_BUDGET_S = 0.05
"""Seconds that one median of the warm-up may take, where a sample takes less."""
WARM_UP_TOLERANCE = 1.02
"""Three successive medians must lie this close together."""
MAX_MEDIANS = 12
"""Medians after which a warm-up is given up, and the visit marked unsettled."""
MIN_SAMPLES = 5
BUDGET_S = 0.5
"""Seconds that the samples of one metric may take in a visit."""
ADAPTIVE_PHASES = 2
"""Times that the grid is refined."""
SENTINEL_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Visit:
    """The samples of one visit of a point, in seconds, by metric."""

    samples: dict[str, list[float]]
    settled: bool
    """Whether the warm-up ended by itself."""


def visit(task: Task, num_samples: int) -> Visit:
    """Warm a task up and sample each of its metrics.

    Slow calls get fewer samples, `MIN_SAMPLES` at least, so that a visit stays within
    seconds.
    """
    settled = warm_up(task)
    samples: dict[str, list[float]] = {}
    for metric in task.metrics:
        first = task.sample(metric, 1)[0]  # the first call after another is odd
        cost_s = first * task.repeats(metric)
        affordable = int(BUDGET_S / cost_s)
        count = max(min(MIN_SAMPLES, num_samples), min(num_samples, affordable))
        samples[metric] = task.sample(metric, count)
    return Visit(samples, settled)


def warm_up(task: Task) -> bool:
    """Run until three successive medians agree; return whether they ever did."""
    metric = task.metrics[0]
    cost_s = task.sample(metric, 1)[0] * task.repeats(metric)
    count = max(1, min(WARM_UP_SAMPLES, int(WARM_UP_BUDGET_S / cost_s)))
    medians: list[float] = []
    for _ in range(MAX_MEDIANS):
        medians.append(median(task.sample(metric, count)))
        last = medians[-3:]
        if len(last) == 3 and max(last) <= WARM_UP_TOLERANCE * min(last):
            return True
    return False


class _RecordsEndError(Exception):
    """The checkpoint holds no further block, and none is to be measured."""


class OutOfTimeError(Exception):
    """The time limit ended a calibration at the edge of a block; `--resume` goes on."""


class Session:
    """One calibration on one device; `progress` is called after every visit."""

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
        self._faults: dict[str, str] = {}
        self._begin_s = device.now_s()
        self._longest_s = 0.0
        self._is_finishing = False
        if not self._choices:
            raise UserError(
                f"nothing to time: no backend here offers"
                f" {', '.join(settings.operations)}"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that must be the same for a checkpoint to go on."""
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

    def run(self, resume: bool, finish: bool = False) -> Outcome:
        """Calibrate, from the start or from the checkpoint, or end with the checkpoint.

        Raises
        ------
        UserError
            When the checkpoint is another calibration's, no variant passes, the
            device failed, or a checkpoint to end with lacks points.
        OutOfTimeError
            When the next block would probably exceed the time limit.
        """
        finished: list[dict[str, Any]] = []
        self._is_finishing = finish
        if resume or finish:
            resumed = self._checkpoint.resume(self.fingerprint())
            started, finished = resumed.started, resumed.blocks
            self._faults = resumed.faults
        else:
            started = self._device.date()
            self._checkpoint.begin(self.fingerprint(), started)
        records = iter(finished)
        every = replace(PRESETS[self._settings.preset], num_attention_variants=99)
        curves = dict.fromkeys(p.curve for p in self._grid(every, self._choices))
        gate = self._taken_or("gate", records, lambda: self._gate(list(curves)))
        checks = {
            key: Check(verdict["error"], verdict["tolerance"], verdict["reason"])
            for key, verdict in gate["checks"].items()
        }
        right = {
            (at.operation, at.variant)
            for at in curves
            if at.key in checks and checks[at.key].passed
        }
        self._sound = [c for c in self._choices if (c.operation, c.variant) in right]
        grid = self._grid(PRESETS[self._settings.preset], self._sound)
        passed = [point for point in grid if checks[point.curve.key].passed]
        if not passed:
            raise UserError(f"no variant is correct here: {_first_failure(checks)}")
        collected = Collected(duration_s=gate["duration_s"])
        visits = Visits(asked=PRESETS[self._settings.preset].rounds * len(passed))
        overlap: dict[str, Any] = {"interference": [], "duration_s": 0.0}
        try:
            for block in self._blocks(passed, collected):
                measure = functools.partial(self._measure, block)
                collected.add(block, self._taken_or(block.name, records, measure))
                visits.done += len(block.points)
            overlap = self._taken_or("overlap", records, self._overlap)
        except _RecordsEndError:
            self._check_every_point(passed, collected)
            visits.are_all = False
        return Outcome(
            visits=visits,
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

    def _check_every_point(self, grid: Sequence[Point], collected: Collected) -> None:
        seen = collected.samples.keys()
        missing = [
            point
            for point in grid
            if point not in seen and point.key not in collected.skipped
        ]
        if missing:
            raise UserError(
                f"'{self._checkpoint.path}' lacks {len(missing)} of {len(grid)} points"
                f" of the grid, {missing[0].key} for one; go on with --resume on its"
                " GPU until each was visited once"
            )

    def _grid(self, preset: Preset, choices: Sequence[Choice]) -> list[Point]:
        geometry = self._settings.geometry
        return build_grid(preset, geometry, self._device.limits, choices)

    def _blocks(self, grid: Sequence[Point], collected: Collected) -> Iterator[Block]:
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
        if record is None and self._is_finishing:
            raise _RecordsEndError
        if record is None:
            start_s = self._device.now_s()
            self._mind_the_time(start_s)
            record = {"block": name, **measure()}
            # to the microsecond: differences of a clock depend on where it stands
            record["duration_s"] = round(self._device.now_s() - start_s, 6)
            self._longest_s = max(self._longest_s, record["duration_s"])
            self._checkpoint.append(record)
        elif record["block"] != name:
            raise UserError(
                f"'{self._checkpoint.path}' holds the block {record['block']!r} where"
                f" {name!r} belongs; start without --resume"
            )
        return record

    def _mind_the_time(self, now_s: float) -> None:
        """Stop where a block as long as the longest would end behind the limit.

        The first block of a process is always begun, or nothing would ever end.
        """
        limit_s = self._settings.time_limit_s
        spent_s = now_s - self._begin_s
        if self._longest_s and spent_s + self._longest_s > limit_s:
            raise OutOfTimeError(
                f"stopped {spent_s:.0f} s after the start, for the limit of"
                f" {limit_s:.0f} s; finished blocks are in {self._checkpoint.path}"
            )

    @contextmanager
    def _blaming(self, key: str) -> Iterator[None]:
        """Note in the checkpoint what broke the device: the next run leaves it out."""
        try:
            yield
        except DeviceFaultError as error:
            self._checkpoint.append({"fault": key, "reason": str(error)})
            raise UserError(
                f"the device failed in {key}: {error}; finished blocks are in"
                f" '{self._checkpoint.path}': go on with --resume, which leaves it out"
            ) from error

    def _backend(self, at: Curve) -> str:
        return next(
            choice.backend
            for choice in self._choices
            if (choice.operation, choice.variant) == (at.operation, at.variant)
        )

    def _gate(self, curves: Sequence[Curve]) -> dict[str, Any]:
        """Check the variants of each operation, those that will be timed."""
        most = PRESETS[self._settings.preset].num_attention_variants
        sound: dict[str, set[str]] = {at.operation: set() for at in curves}
        verdicts: dict[str, dict[str, Any]] = {}
        for number, at in enumerate(curves):
            self._progress(Progress("gate", number, len(curves)))
            taken = sound[at.operation]
            is_spare = at.variant not in taken and len(taken) >= most
            if at.operation.endswith("_attention") and is_spare:
                continue  # compiling it may take longer than timing the others
            check = self._checked(at)
            if check.passed:
                taken.add(at.variant)
            verdicts[at.key] = {
                # JSON has no infinity
                "error": min(check.error, 1e300),
                "tolerance": check.tolerance,
                "reason": check.reason,
            }
        return {"checks": verdicts}

    def _checked(self, at: Curve) -> Check:
        if at.key in self._faults:
            return Check(math.inf, 0.0, f"it broke the device: {self._faults[at.key]}")
        with self._blaming(at.key):
            return self._device.check(self._settings.geometry, at, self._backend(at))

    def _measure(self, block: Block) -> dict[str, Any]:
        visits = {point.key: self._visit(point, block) for point in block.points}
        watched = sentinels(self._settings.geometry, self._device.limits, self._sound)
        medians: dict[str, float] = {}
        for operation, (point, choice) in watched.items():
            seed = seed_of(self._settings.seed, block.name)
            times = self._watched(point, choice.backend, seed)
            if times:
                medians[operation] = median(times)
        clocks = self._device.clocks()
        return {"visits": visits, "sentinels": medians, "clocks": clocks}

    def _watched(self, point: Point, backend: str, seed: int) -> list[float]:
        """Return samples of a sentinel; none where the device cannot take it."""
        if point.key in self._faults:
            return []
        try:
            with (
                self._blaming(point.key),
                closing(self._device.prepare(point, backend, seed)) as task,
            ):
                metric = task.metrics[0]
                task.sample(metric, 2)
                return task.sample(metric, SENTINEL_SAMPLES)
        except UnsupportedPointError:
            return []

    def _visit(self, point: Point, block: Block) -> dict[str, Any]:
        if point.key in self._faults:
            return {"skipped": f"it broke the device: {self._faults[point.key]}"}
        preset = PRESETS[self._settings.preset]
        seed = seed_of(self._settings.seed, block.round)
        backend = self._backend(point.curve)
        try:
            with (
                self._blaming(point.key),
                closing(self._device.prepare(point, backend, seed)) as task,
            ):
                found = visit(task, preset.samples)
        except UnsupportedPointError as error:
            return {"skipped": str(error)}
        return {"samples": found.samples, "settled": found.settled}

    def _overlap(self) -> dict[str, Any]:
        """Time a decode step and a transfer alone and together, where both exist."""
        watched = sentinels(self._settings.geometry, self._device.limits, self._sound)
        if not {"decode_attention", "swap"} <= watched.keys() or (
            "overlap" in self._faults
        ):
            return {"interference": []}
        step, transfer = watched["decode_attention"], watched["swap"]
        try:
            with self._blaming("overlap"):
                times = self._device.overlap(
                    {"step": step[0], "transfer": transfer[0]},
                    {"step": step[1].backend, "transfer": transfer[1].backend},
                    seed_of(self._settings.seed, "overlap"),
                )
        except UnsupportedPointError:
            return {"interference": []}
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
