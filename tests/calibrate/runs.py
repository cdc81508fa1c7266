"""Calibrations on the fake device, whole or cut short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrate.harness.checkpoint import Checkpoint
from calibrate.harness.dry_run import DryRunDevice
from calibrate.harness.geometry import Geometry, geometry_of
from calibrate.harness.outcome import Settings
from calibrate.harness.output import profile_of
from calibrate.harness.session import Session
from calibrate.measurement import OPERATIONS
from sim.hardware.models.bundled import load_model

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from calibrate.harness.device import Task
    from calibrate.measurement import Point


LLAMA = "meta-llama/Llama-3.1-8B"


def geometry(model: str = LLAMA) -> Geometry:
    return geometry_of(load_model(model), 16, 1)


def settings(
    preset: str = "quick",
    operations: tuple[str, ...] = OPERATIONS,
    seed: int = 0,
    model: str = LLAMA,
) -> Settings:
    return Settings(geometry(model), preset, "auto", operations, seed)


def calibrated(
    path: Path, asked: Settings, device: DryRunDevice, resume: bool = False
) -> dict[str, Any]:
    outcome = Session(device, asked, Checkpoint(path)).run(resume)
    return profile_of(outcome, asked, device)


class Killed(BaseException):
    """Nothing catches this, as nothing catches a kill."""


class DyingDevice(DryRunDevice):
    """Is killed at its n-th visit."""

    def __init__(self, last_visit: int) -> None:
        super().__init__()
        self.visits_left = last_visit

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        self.visits_left -= 1
        if self.visits_left == 0:
            raise Killed
        return super().prepare(point, backend, seed)
