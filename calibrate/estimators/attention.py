"""Attention of one layer: decodes, prefills, and both in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.points import octaves
from calibrate.estimators.roofline import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]

_NO_WINDOW = 1 << 40
_TILE = 128
"""Query rows of a tile of FlashAttention."""


class _Attention(KernelEstimator):
    """Attention of decode and prefill: heads, window and the bytes of a key."""

    curve = ("num_heads", "num_kv_heads", "head_dim", "kv_itemsize", "window")
    keys = curve
    reach = 1.0
    batch = "batch"

    def _window(self, columns: Columns) -> Floats:
        """Return the keys that a query sees at most; window 0 means all."""
        window = columns["window"]
        seen: Floats = np.where(window > 0, window, _NO_WINDOW).astype(np.float64)
        return seen

    def _key_bytes(self, columns: Columns) -> Floats:
        """Return bytes of K and V of one token on this rank."""
        size = columns["num_kv_heads"] * columns["head_dim"] * columns["kv_itemsize"]
        num_bytes: Floats = 2.0 * size.astype(np.float64)
        return num_bytes

    def _common(self, columns: Columns) -> list[Floats]:
        heads, kv_heads = columns["num_heads"], columns["num_kv_heads"]
        window = self._window(columns)
        return [
            np.log2(columns["batch"].astype(float)),
            np.log2(heads.astype(float)),
            np.log2(kv_heads.astype(float)),
            np.log2(heads / kv_heads),
            columns["head_dim"].astype(float),
            columns["kv_itemsize"].astype(float),
            np.log2(window),
        ]


class DecodeAttention(_Attention):
    """One query token a sequence; every sequence of the batch has the same context.

    Bytes are the KV that is read, ``batch x seen x 2 x KV heads x head_dim x
    itemsize``: the sum of contexts decides, the longest comes second.

    KV heads work apart: a sequence with more of them than any that was measured is
    asked for as several sequences with a part of its heads each. Published tables end
    at eight, a model with as many KV heads as query heads has 32 and more.
    """

    operation = "decode_attention"
    columns = (*_Attention.curve, "batch", "context")
    long = "context"
    lines = ("batch", "context")

    def _fit_points(self, columns: Columns, time_s: Floats) -> None:
        super()._fit_points(columns, time_s)
        self.most_kv_heads_ = int(columns["num_kv_heads"].max())

    def predict(self, columns: Columns) -> Floats:
        return super().predict(self.divided(columns))

    def extrapolated(self, columns: Columns) -> NDArray[np.bool_]:
        return super().extrapolated(self.divided(columns))

    def divided(self, columns: Columns) -> Columns:
        """Return shapes of no more KV heads than were measured, of the same work."""
        kv_heads, heads = columns["num_kv_heads"], columns["num_heads"]
        parts = np.ones_like(kv_heads)
        for count in np.unique(kv_heads[kv_heads > self.most_kv_heads_]).tolist():
            divisors = range(2, count + 1)
            least = (n for n in divisors if not count % n)
            parts[kv_heads == count] = next(
                n for n in least if count // n <= self.most_kv_heads_
            )
        return {
            **columns,
            "num_kv_heads": kv_heads // parts,
            "num_heads": heads // parts,
            "batch": columns["batch"] * parts,
        }

    def growth(self, columns: Columns) -> Floats:
        seen: Floats = np.minimum(
            columns["context"].astype(float), self._window(columns)
        )
        return seen

    def work(self, columns: Columns) -> Work:
        keys = columns["batch"] * self.growth(columns)
        flops = 4.0 * keys * columns["num_heads"] * columns["head_dim"]
        return Work(
            bytes=keys * self._key_bytes(columns),
            flops_s=flops / self.device.flops_per_s,
            units=columns["batch"].astype(float) * columns["num_kv_heads"],
        )

    def features(self, columns: Columns) -> Floats:
        batch = columns["batch"].astype(float)
        context = columns["context"].astype(float)
        work = self.work(columns)
        columns_of = [
            *self._common(columns),
            np.log2(context),
            np.log2(self.growth(columns)),
            np.log2(work.bytes),
            np.log2(work.flops_s),
            np.log2(work.units),
            np.log2(batch * columns["num_heads"]),
            np.log2(batch * context * self._key_bytes(columns)),
        ]
        return np.stack(columns_of, axis=1)


class PrefillAttention(_Attention):
    """Causal attention of chunks with `query` tokens over `past` tokens before them."""

    # Head sizes with few points, whose kernels are others, are learned from neighbours:
    # two forests that err differently know them better than one.
    forests = (("squared_error", 1.0), ("squared_error", 0.5))
    operation = "prefill_attention"
    columns = (*_Attention.curve, "batch", "query", "past")
    long = "query"
    lines = ("batch", "query")

    def growth(self, columns: Columns) -> Floats:
        """Return the query-key pairs of a sequence, as the window allows."""
        query, past = columns["query"].astype(float), columns["past"].astype(float)
        window = self._window(columns)
        # rows whose context is still below the window, then rows that see it all
        ramp = np.clip(window - past, 0.0, query)
        ramp_pairs = ramp * past + ramp * (ramp + 1.0) / 2.0
        pairs: Floats = ramp_pairs + (query - ramp) * np.minimum(window, past + query)
        return pairs

    def work(self, columns: Columns) -> Work:
        batch, query = columns["batch"].astype(float), columns["query"].astype(float)
        heads, head_dim = columns["num_heads"], columns["head_dim"]
        seen = np.minimum(query + columns["past"], query + self._window(columns))
        flops = 4.0 * batch * self.growth(columns) * heads * head_dim
        rows = 2.0 * 2.0 * batch * query * heads * head_dim
        return Work(
            bytes=batch * seen * self._key_bytes(columns) + rows,
            flops_s=flops / self.device.flops_per_s,
            units=batch * np.ceil(query / _TILE) * heads,
        )

    def shape_features(self, columns: Columns) -> Floats:
        """Return octaves of the columns, with the context in the place of the past.

        A past below the chunk's own length hardly matters, and kernels that walk keys
        one after the other take a time that the context alone decides.
        """
        plain = octaves(columns, (*self.curve, self.batch))
        query = columns["query"].astype(float)
        context = query + columns["past"]
        return np.hstack([plain, np.log2(np.stack([query, context], axis=1))])

    def features(self, columns: Columns) -> Floats:
        query = columns["query"].astype(float)
        work = self.work(columns)
        waves = work.units / self.device.num_sms
        columns_of = [
            *self._common(columns),
            np.log2(query),
            np.log2(1.0 + columns["past"]),
            np.log2(np.minimum(query, self._window(columns))),
            np.log2(work.bytes),
            np.log2(work.flops_s),
            np.log2(work.units),
            waves / np.ceil(waves),
            np.log2(columns["batch"] * query),
        ]
        return np.stack(columns_of, axis=1)


class MixedAttention(KernelEstimator):
    """`query` tokens over `past` tokens beside `num_decodes` of `decode_context` keys.

    Either half may be absent (zeros).
    """

    operation = "mixed_attention"
    columns = (
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "kv_itemsize",
        "query",
        "past",
        "num_decodes",
        "decode_context",
    )
    keys = ("num_heads", "num_kv_heads", "head_dim", "kv_itemsize")

    def _parts(self, columns: Columns) -> tuple[Floats, Floats]:
        """Return query-key pairs of the chunk, and keys of the decodes."""
        query, past = columns["query"].astype(float), columns["past"].astype(float)
        pairs = query * past + query * (query + 1.0) / 2.0
        keys = columns["num_decodes"].astype(float) * columns["decode_context"]
        return pairs, keys

    def work(self, columns: Columns) -> Work:
        pairs, keys = self._parts(columns)
        heads = columns["num_heads"].astype(float) * columns["head_dim"]
        kv_bytes = (
            2.0
            * columns["num_kv_heads"]
            * columns["head_dim"]
            * columns["kv_itemsize"].astype(float)
        )
        chunk = np.where(columns["query"] > 0, columns["past"] + columns["query"], 0)
        return Work(
            bytes=kv_bytes * (chunk + keys),
            flops_s=4.0 * heads * (pairs + keys) / self.device.flops_per_s,
            units=columns["num_decodes"].astype(float) * columns["num_kv_heads"],
        )

    def features(self, columns: Columns) -> Floats:
        pairs, keys = self._parts(columns)
        query, past = columns["query"].astype(float), columns["past"].astype(float)
        decodes = columns["num_decodes"].astype(float)
        plain = self.shape_features(columns)
        more = [
            np.log2(1.0 + pairs),
            np.log2(1.0 + keys),
            np.log2(1.0 + query + decodes),
            np.log2(1.0 + past + query + keys),
            np.log2(1.0 + np.where(query > 0, keys, 0.0)),
        ]
        return np.hstack([plain, np.stack(more, axis=1)])
