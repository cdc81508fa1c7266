"""Routed experts of one layer, as fused kernels compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.roofline import Work
from sim.costs.experts.routed import touched_experts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]

_TILES: Final = (16, 32, 64, 128)
"""Rows of a tile of one expert."""


class Moe(KernelEstimator):
    """Gate, up and down projection of the experts that one rank holds.

    `tokens` are those of all ranks that share the experts, each of which goes to
    `top_k` of `num_experts`; `num_ranks` divide the experts (expert parallelism) and
    `inter_size` is a rank's share of their width. `activated_experts` is how many the
    rank computes, 0 for what uniform routing touches on average. `routing` and
    `dtype` are small integers that name how tokens were routed and the precision.
    """

    operation = "moe"
    columns = (
        *("tokens", "activated_experts", "hidden_size", "inter_size", "num_experts"),
        *("top_k", "num_ranks", "routing", "weight_bits", "dtype"),
    )
    keys = (
        *("num_experts", "top_k", "num_ranks", "routing", "weight_bits"),
        "dtype",
    )
    lines = ("tokens",)

    def _activated(self, columns: Columns) -> Floats:
        """Return the experts that the rank computes, at least one."""
        experts = columns["num_experts"].astype(float)
        touched = touched_experts(
            experts, np.minimum(columns["top_k"], experts), columns["tokens"]
        )
        given = columns["activated_experts"].astype(float)
        found = np.where(given > 0.0, given, touched / columns["num_ranks"])
        return np.maximum(found, 1.0)

    def _rows(self, columns: Columns) -> Floats:
        """Return the rows that the rank multiplies: its tokens, once an expert."""
        rows = columns["tokens"].astype(float) * columns["top_k"]
        # where the computed experts are named, all tokens go to them
        ranks = np.where(columns["activated_experts"] > 0, 1, columns["num_ranks"])
        return np.maximum(rows / ranks, 1.0)

    def work(self, columns: Columns) -> Work:
        activated, rows = self._activated(columns), self._rows(columns)
        hidden, inter = (
            columns[k].astype(float) for k in ("hidden_size", "inter_size")
        )
        bits = columns["weight_bits"].astype(float)
        device = self.device
        peak = np.where(bits == 8, device.flops_8bit_per_s, device.flops_per_s)
        weights = 3.0 * hidden * inter
        return Work(
            bytes=activated * weights * bits / 8.0 + rows * (hidden + inter) * 4.0,
            flops_s=2.0 * rows * weights / peak,
            units=activated + rows / 64.0,
        )

    def floor(self, columns: Columns) -> Floats:
        """Return the seconds of what must be done, whatever the tokens chose.

        One expert may serve all tokens, and what was read before may be in the cache.
        """
        work = self.work(columns)
        tolerance = 2.0
        found: Floats = work.flops_s / tolerance
        return found

    def features(self, columns: Columns) -> Floats:
        activated, rows = self._activated(columns), self._rows(columns)
        work = self.work(columns)
        hidden, inter = (
            columns[k].astype(float) for k in ("hidden_size", "inter_size")
        )
        local = columns["num_experts"] / columns["num_ranks"]
        each = rows / activated
        found = [
            np.log2(columns["tokens"].astype(float)),
            np.log2(hidden),
            np.log2(inter),
            np.log2(local),
            np.log2(columns["top_k"].astype(float)),
            np.log2(columns["num_ranks"].astype(float)),
            columns["routing"].astype(float),
            columns["dtype"].astype(float),
            np.log2(activated),
            np.log2(rows),
            np.log2(each),
            np.log2(work.bytes),
            np.log2(work.flops_s),
            np.log2(work.flops_s / work.bytes),
        ]
        for tile in _TILES:
            tiles = activated * np.ceil(each / tile)
            waves = tiles * np.ceil(2.0 * inter / 128.0) / self.device.num_sms
            found += [np.log2(waves), waves / np.ceil(waves)]
        return np.stack(found, axis=1)
