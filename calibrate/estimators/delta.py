"""The mixers of a gated delta net but for their projections: convolution and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import numpy as np

from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.roofline import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]

_TOGETHER: Final = 64
"""Tokens of a prompt that are multiplied together."""
_STATE_ITEMSIZE: Final = 4


class _Delta(KernelEstimator, ABC):
    """Mixers of decodes and prompts: heads of one rank, and their widths."""

    curve = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    keys = curve
    reach = 1.0
    batch = "batch"

    @abstractmethod
    def _tokens(self, columns: Columns) -> Floats: ...

    def _head_flops(self, columns: Columns) -> Floats:
        """Return FLOPs of a value head and a token."""
        key, value = self._widths(columns)
        found: Floats = 6.0 * key * value
        return found

    def _widths(self, columns: Columns) -> tuple[Floats, Floats]:
        return (
            columns["key_head_dim"].astype(float),
            columns["value_head_dim"].astype(float),
        )

    def work(self, columns: Columns) -> Work:
        key, value = self._widths(columns)
        heads = columns["num_value_heads"].astype(float)
        batch, tokens = columns[self.batch].astype(float), self._tokens(columns)
        channels = 2.0 * columns["num_key_heads"] * key + heads * value
        states = 2.0 * batch * heads * key * value * _STATE_ITEMSIZE
        flops = tokens * heads * self._head_flops(columns)
        return Work(
            bytes=states + 2.0 * 2.0 * channels * tokens,
            flops_s=flops / self.device.flops_per_s,
            units=batch * heads,
        )

    def floor(self, columns: Columns) -> Floats:
        """Return half of the seconds of the FLOPs: states may stay in the cache."""
        found: Floats = self.work(columns).flops_s / 2.0
        return found

    def features(self, columns: Columns) -> Floats:
        work = self.work(columns)
        waves = work.units / self.device.num_sms
        values = [
            *(columns[key] for key in self.columns),
            *(self._tokens(columns), work.bytes, work.flops_s * 1e12, work.units),
        ]
        return np.stack([*map(np.log2, values), waves / np.ceil(waves)], axis=1)


class DeltaDecode(_Delta):
    """One token a sequence: its state is read and written."""

    operation = "delta_decode"
    columns = (*_Delta.curve, "batch")
    lines = ("batch",)

    def _tokens(self, columns: Columns) -> Floats:
        tokens: Floats = columns["batch"].astype(float)
        return tokens


class DeltaPrefill(_Delta):
    """Prompts of `query` tokens each, scanned head by head."""

    operation = "delta_prefill"
    columns = (*_Delta.curve, "batch", "query")
    long = "query"
    lines = ("batch", "query")

    def _tokens(self, columns: Columns) -> Floats:
        tokens: Floats = columns["batch"].astype(float) * columns["query"]
        return tokens

    def _head_flops(self, columns: Columns) -> Floats:
        key, value = self._widths(columns)
        found: Floats = 6.0 * key * value + _TOGETHER * (3.0 * key + 2.0 * value)
        return found
