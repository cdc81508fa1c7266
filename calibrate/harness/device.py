"""A device as the harness sees it: a clock, operations, and tasks that yield times.

`calibrate.harness.dry_run` is such a device on a fake clock, `calibrate.gpu` the real
one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrate.harness.geometry import Geometry
    from calibrate.harness.grid import Choice, Limits
    from calibrate.measurement import Curve, Point
    from sim.hardware.gpus import GpuSpec


class MissingError(UserError):
    """Calibration lacks something here: the message names it and the remedy."""


class UnsupportedPointError(RuntimeError):
    """A variant cannot take this shape; the point is left out, with the reason."""


class DeviceFaultError(RuntimeError):
    """The device failed, and answers nothing more in this process."""


_PATH = re.compile(r"(?<![\w.])(?:/[\w.+@~-]+)+/(?=[\w.+~-])")


def said(error: BaseException) -> str:
    """Return an error as one line for a profile: its kind and text, without folders.

    Compilers and engines name files; a profile is passed on, and must not.
    """
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return _PATH.sub("", line)[:300]


@dataclass(frozen=True, slots=True)
class Physics:
    """Limits that no honest time is below, in units a second."""

    memory_bytes_per_s: float
    flops_per_s: float
    """Of 16-bit matrix products, dense."""
    flops_8bit_per_s: float
    host_bytes_per_s: float
    """Between host and device, in one direction."""
    link_bytes_per_s: float
    """GPU to GPU, in one direction."""

    @classmethod
    def of_sheet(cls, sheet: GpuSpec) -> Physics:
        """Return a datasheet's."""
        return cls(
            memory_bytes_per_s=sheet.memory_bandwidth_bytes_per_s,
            flops_per_s=sheet.bf16_flops_per_s,
            flops_8bit_per_s=sheet.fp8_flops_per_s or sheet.bf16_flops_per_s,
            host_bytes_per_s=sheet.host_bytes_per_s,
            link_bytes_per_s=sheet.interconnect_bytes_per_s,
        )


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of the correctness gate."""

    error: float
    """Relative error against high precision; infinite for a poisoned value."""
    tolerance: float
    reason: str = ""
    """Why the variant could not be run at all."""

    @property
    def passed(self) -> bool:
        """Whether the variant may be timed."""
        return not self.reason and self.error <= self.tolerance


class Task(Protocol):
    """One point, set up to be timed."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that can be timed, the leading one first."""

    def repeats(self, metric: str) -> int:
        """Return the calls that one sample takes."""

    def sample(self, metric: str, count: int) -> list[float]:
        """Return `count` samples, in seconds a call."""

    def close(self) -> None:
        """Give back the memory that the task holds."""


class Device(Protocol):
    """Something that runs operations, and the clock beside it."""

    @property
    def physics(self) -> Physics:
        """Peak rates."""

    @property
    def limits(self) -> Limits:
        """Bytes that fit."""

    def facts(self) -> dict[str, Any]:
        """Return provenance of device, host and software, without names or paths."""

    def clocks(self) -> dict[str, Any]:
        """Return clock rates and throttling now; read, never set."""

    def now_s(self) -> float:
        """Return seconds of a clock that never goes back."""

    def date(self) -> str:
        """Return the time of day in UTC, ISO 8601, to the second."""

    def choices(self, backend: str, operations: Sequence[str]) -> list[Choice]:
        """Return how each operation can be timed here, the best variant first."""

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        """Hold a variant against high precision on small shapes of its curve."""

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        """Set a point up: memory, a random block table, a captured graph.

        `UnsupportedPointError` means that the variant cannot take the shape,
        `DeviceFaultError` that it broke the device; sampling may find out, too.
        """

    def overlap(
        self, points: Mapping[str, Point], backends: Mapping[str, str], seed: int
    ) -> dict[str, list[float]]:
        """Time the points "step" and "transfer" alone and together.

        Seconds of "step_alone", "step_with", "transfer_alone", "transfer_with".
        """
