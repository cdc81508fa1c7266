"""Attention of a whole step: one prefill chunk and some decodes in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.roofline import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]


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
