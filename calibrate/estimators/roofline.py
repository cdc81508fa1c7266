"""A bounded soft roofline: how a kernel's time grows outside the measured grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from scipy.optimize import least_squares

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.device import DeviceFacts

    Floats = NDArray[np.float64]

_MAX_POINTS: Final = 4096
"""Points that the five parameters are fitted to; more change nothing."""
_TOLERANCE: Final = 1.1
"""Share over the datasheet's peak that a clock's boost may reach."""

# t0 s, t1 s a unit, efficiency of bandwidth, efficiency of compute, sharpness
_LOWER: Final = np.array([5e-7, 1e-13, 0.05, 0.02, 1.0])
_UPPER: Final = np.array([1e-3, 1e-5, 1.0, 1.0, 8.0])
_START: Final = np.array([8e-6, 5e-9, 0.8, 0.6, 2.0])


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes, FLOPs and pieces of calls of a kernel, one entry a call."""

    bytes: Floats
    """Bytes that must cross the memory bus."""
    flops_s: Floats
    """Seconds of its FLOPs at the peak of its precision."""
    units: Floats
    """Independent pieces of fixed cost, such as tiles or sequences x KV heads."""


class SoftRoofline:
    """``((t0 + t1 units)^p + (bytes/(e bw))^p + (flops_s/f)^p)^(1/p)``, five bounds.

    Bounds are mandatory: efficiencies are shares of the datasheet and the sharpness `p`
    lies in [1, 8]; without them such fits diverge outside their points. t0 is no more
    than `launch_s`, the seconds that a call was seen to take at least.

    Attributes
    ----------
    parameters_
        (5,) t0 in seconds, t1 in seconds a unit, e, f, p.
    """

    def __init__(self, device: DeviceFacts, launch_s: float | None = None) -> None:
        self.device = device
        self.launch_s = launch_s

    def fit(self, work: Work, time_s: Floats) -> SoftRoofline:
        """Fit the parameters to the logarithms of measured seconds.

        Points count by how rare their scale is no more than others; a fixed stride
        keeps at most 4,096 of them.
        """
        stride = max(1, -(-len(time_s) // _MAX_POINTS))
        part = Work(*(x[::stride] for x in (work.bytes, work.flops_s, work.units)))
        log_time = np.log(time_s[::stride])
        # sharpness as it is, everything else by its logarithm: scales differ by 1e7
        most = _UPPER.copy()
        if self.launch_s is not None:
            most[0] = min(max(self.launch_s, 1.01 * _LOWER[0]), most[0])
        start = np.clip(_START, _LOWER, 0.99 * most)
        lower, upper = _inner(_LOWER), _inner(most)

        def error(inner: Floats) -> Floats:
            return np.log(self._seconds(part, _outer(inner))) - log_time

        found = least_squares(
            error, _inner(start), bounds=(lower, upper), loss="soft_l1", f_scale=0.3
        )
        self.parameters_ = np.clip(_outer(found.x), _LOWER, most)
        return self

    def predict(self, work: Work) -> Floats:
        return self._seconds(work, self.parameters_)

    def floor(self, work: Work) -> Floats:
        """Return the seconds that physics asks for, with a tenth for boosted clocks."""
        bus_s = work.bytes / self.device.bandwidth_bytes_per_s
        return np.maximum(bus_s, work.flops_s) / _TOLERANCE

    def _seconds(self, work: Work, parameters: Floats) -> Floats:
        t0, t1, bandwidth, compute, sharpness = parameters
        bus_s = work.bytes / (bandwidth * self.device.bandwidth_bytes_per_s)
        terms = np.stack([t0 + t1 * work.units, bus_s, work.flops_s / compute])
        # relative to the largest, so that no power overflows
        top = terms.max(axis=0)
        total: Floats = top * ((terms / top) ** sharpness).sum(axis=0) ** (
            1 / sharpness
        )
        return total


def _inner(parameters: Floats) -> Floats:
    return np.append(np.log(parameters[:4]), parameters[4])


def _outer(inner: Floats) -> Floats:
    return np.append(np.exp(inner[:4]), inner[4])
