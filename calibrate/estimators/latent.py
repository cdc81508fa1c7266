"""A whole layer of latent attention (MLA): its projections and its attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.roofline import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]


class _Latent(KernelEstimator, ABC):
    """Latent attention of decodes and prefills: projections and a token's latent."""

    curve = (
        *("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
        *("qk_rope_head_dim", "v_head_dim", "num_heads", "kv_itemsize"),
        *("weight_bits", "dtype"),
    )
    keys = curve
    reach = 1.0
    batch = "batch"

    def _sizes(self, columns: Columns) -> list[Floats]:
        return [columns[key].astype(float) for key in self.curve[:7]]

    def _weights(self, columns: Columns) -> Floats:
        """Return the elements of the projections on this rank."""
        hidden, query, latent, nope, rope, value, heads = self._sizes(columns)
        down = hidden * (query + latent + rope)
        up = heads * (query * (nope + rope) + latent * (nope + value))
        found: Floats = down + up + heads * value * hidden
        return found

    @abstractmethod
    def _tokens(self, columns: Columns) -> Floats: ...

    @abstractmethod
    def _attended(self, columns: Columns) -> tuple[Floats, Floats]:
        """Return keys that are read, and FLOPs of attention."""

    def work(self, columns: Columns) -> Work:
        _, _, latent, _, rope, _, heads = self._sizes(columns)
        tokens, weights = self._tokens(columns), self._weights(columns)
        keys, flops = self._attended(columns)
        bits, device = columns["weight_bits"].astype(float), self.device
        peak = np.where(bits == 8, device.flops_8bit_per_s, device.flops_per_s)
        read = keys * (latent + rope) * columns["kv_itemsize"]
        return Work(
            bytes=weights * bits / 8.0 + read,
            flops_s=2.0 * weights * tokens / peak + flops / device.flops_per_s,
            units=columns[self.batch].astype(float) * heads,
        )

    def floor(self, columns: Columns) -> Floats:
        """Return half of the seconds of the FLOPs.

        The weights of one layer may stay in the cache, where it was timed alone.
        """
        found: Floats = self.work(columns).flops_s / 2.0
        return found

    def features(self, columns: Columns) -> Floats:
        work = self.work(columns)
        keys, flops = self._attended(columns)
        values = [
            columns["num_heads"],
            columns[self.batch],
            columns[self.long],
            self._tokens(columns),
            keys,
            flops,
            work.bytes,
            work.flops_s * 1e12,
        ]
        plain = [columns[key] for key in ("kv_itemsize", "weight_bits", "dtype")]
        return np.stack([*map(np.log2, values), *plain], axis=1)


class LatentDecode(_Latent):
    """One query token a sequence, attending to the latent itself (absorbed)."""

    operation = "latent_decode"
    columns = (*_Latent.curve, "batch", "context")
    long = "context"
    lines = ("batch", "context")

    def _tokens(self, columns: Columns) -> Floats:
        tokens: Floats = columns["batch"].astype(float)
        return tokens

    def _attended(self, columns: Columns) -> tuple[Floats, Floats]:
        _, _, latent, _, rope, _, heads = self._sizes(columns)
        keys = columns["batch"].astype(float) * columns["context"]
        return keys, 2.0 * keys * heads * (2.0 * latent + rope)


class LatentPrefill(_Latent):
    """Prompts without a past, their keys and values expanded from the latent."""

    operation = "latent_prefill"
    columns = (*_Latent.curve, "batch", "query")
    long = "query"
    lines = ("batch", "query")

    def _tokens(self, columns: Columns) -> Floats:
        tokens: Floats = columns["batch"].astype(float) * columns["query"]
        return tokens

    def _attended(self, columns: Columns) -> tuple[Floats, Floats]:
        _, _, _, nope, rope, value, heads = self._sizes(columns)
        query, tokens = columns["query"].astype(float), self._tokens(columns)
        pairs = tokens * (query + 1.0) / 2.0
        return tokens, 2.0 * pairs * heads * (nope + rope + value)
