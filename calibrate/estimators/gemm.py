"""Matrix products ``(m, k) x (k, n)`` of the linear layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.roofline import SoftRoofline, Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]

_TILES: Final = ((64, 128), (128, 128), (128, 256))
"""Rows and columns of output tiles that libraries choose among."""
_STEPS: Final = (16, 64, 128, 256)
"""Multiples of m at which kernels jump."""


class Gemm(KernelEstimator):
    """``m`` tokens through weights of ``n`` rows and ``k`` columns.

    `dtype` is a small integer that names the precision and scaling scheme within one
    table; `weight_bits` its bits an element of the weights.
    """

    operation = "gemm"
    columns = ("m", "n", "k", "weight_bits", "dtype")
    forests = (
        ("squared_error", 1.0),
        ("absolute_error", 1.0),
        ("absolute_error", 0.5),
    )
    trees = 500

    def work(self, columns: Columns) -> Work:
        """Return bytes of weights, inputs and outputs, FLOP seconds, and tiles."""
        m, n, k = (columns[key].astype(float) for key in "mnk")
        bits = columns["weight_bits"].astype(float)
        device = self.device
        peak = np.where(bits < 16, device.flops_8bit_per_s, device.flops_per_s)
        peak = np.where(bits < 8, 2.0 * peak, peak)
        return Work(
            bytes=(m * k + n * k) * bits / 8.0 + 2.0 * m * n,
            flops_s=2.0 * m * n * k / peak,
            units=np.ceil(m / 128) * np.ceil(n / 128),
        )

    def floor(self, columns: Columns) -> Floats:
        """Return FLOPs at their peak, and bytes where they do not fit the L2 cache.

        Tables time one product again and again, so that small weights stay in the
        cache; a step reads them from memory, which a cost model asks for when it reads
        the tables.
        """
        work = self.work(columns)
        cached = work.bytes <= self.device.l2_bytes
        moved = replace(work, bytes=np.where(cached, 0.0, work.bytes))
        return SoftRoofline(self.device).floor(moved)

    def features(self, columns: Columns) -> Floats:
        """Return octaves of shape, bytes, FLOPs, and how full tiles and waves are."""
        m, n, k = (columns[key].astype(float) for key in "mnk")
        work = self.work(columns)
        found = [
            np.log2(m),
            np.log2(n),
            np.log2(k),
            columns["dtype"].astype(float),
            columns["weight_bits"].astype(float),
            np.log2(m * n),
            np.log2(n * k),
            np.log2(m * k),
            np.log2(work.flops_s),
            np.log2(work.bytes),
            np.log2(work.flops_s / work.bytes),
        ]
        for rows, width in _TILES:
            tiles = np.ceil(m / rows) * np.ceil(n / width)
            waves = tiles / self.device.num_sms
            found += [np.log2(tiles), waves / np.ceil(waves)]
        found += [m / (step * np.ceil(m / step)) for step in _STEPS]
        return np.stack(found, axis=1)
