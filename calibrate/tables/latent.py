"""Latent attention (MLA) as tables, from layers that were timed with projections.

A layer's time is taken apart: its *projections* are the least time that a layer with as
many tokens took, however they are spread over sequences; what a shape takes beyond that
is attention. So both stand in the tables where they stand for other models, and a step
with decodes and chunks reads the projections once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.importers.geometry import LATENT_SIZES, latent_sizes
from calibrate.precisions import DTYPES_OF_BITS
from calibrate.tables.fits import nodes, predicted, product, rounded
from sim.costs.measured.geometry import weight_bits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibrate.tables.fits import Fits
    from sim.hardware.models.architecture import ModelArchitecture

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

_LEAST_S: Final = 1e-6
"""Attention of one layer takes no less, however short the context."""
Table = dict[str, Any]


class LatentTables:
    """Tables of one layer on so many ranks with a KV cache of one precision.

    `itemsize` is in bytes an element of the cache.
    """

    def __init__(
        self, fits: Fits, model: ModelArchitecture, ranks: int, itemsize: int
    ) -> None:
        self.fits = fits
        self.model = model
        self.ranks = ranks
        self.itemsize = itemsize
        decodes = self._layers("latent_decode", "context")
        prefills = self._layers("latent_prefill", "query")
        self._decodes, self._prefills = decodes, prefills
        # (sequences, tokens of each), all sequences of a decode have one
        once = [batch for batch, _, _, _ in decodes]
        tokens = [*once, *(batch * query for batch, query, _, _ in prefills)]
        seconds = [row[2] for row in (*decodes, *prefills)]
        self.tokens, self.seconds = _envelope(np.array(tokens), np.array(seconds))

    def projections_s(self, tokens: Integers) -> tuple[Floats, NDArray[np.bool_]]:
        """Return seconds of a layer's projections, and where none were measured."""
        found = np.interp(tokens, self.tokens, self.seconds)
        last, before = self.tokens[-1], self.tokens[-2]
        slope = (self.seconds[-1] - self.seconds[-2]) / (last - before)
        found += slope * np.maximum(tokens - last, 0)
        return found, (tokens < self.tokens[0]) | (tokens > last)

    def tables(self) -> Table:
        """Return the attention tables of an entry of a profile's `fit`."""
        return {
            "decode": {"0": self._table(self._decodes, is_decode=True)},
            "prefill": {"0": self._table(self._prefills, is_decode=False)},
        }

    def _table(
        self, rows: list[tuple[int, int, float, bool]], *, is_decode: bool
    ) -> Table:
        counts = sorted({row[0] for row in rows})
        amounts = sorted({row[1] for row in rows})
        shape = len(counts), len(amounts)
        batch = np.array([row[0] for row in rows])
        length = 1 if is_decode else np.array([row[1] for row in rows])
        projections_s, outside = self.projections_s(batch * length)
        seconds = np.array([row[2] for row in rows]) - projections_s
        beyond = np.array([row[3] for row in rows]) | outside
        grid = np.maximum(seconds, _LEAST_S).reshape(shape)
        return {
            "counts": counts,
            "amounts": amounts,
            "time_s": rounded(grid),
            "beyond": beyond.astype(int).reshape(shape).tolist(),
        }

    def _layers(self, operation: str, long: str) -> list[tuple[int, int, float, bool]]:
        """Return sequences, length, seconds and flag of every node of an operation."""
        points = self.fits.points[operation]
        axes = product(
            batch=nodes(points.columns["batch"]), long=nodes(points.columns[long])
        )
        dtypes = points.codes["dtype"]
        bits = weight_bits_of(self.model)
        sizes = latent_sizes(self.model) or ()
        columns: dict[str, Any] = dict(zip(LATENT_SIZES, sizes, strict=True)) | {
            "num_heads": self.model.num_attention_heads // self.ranks,
            "kv_itemsize": self.itemsize,
            "weight_bits": bits,
            "dtype": next(
                (dtypes.index(d) for d in DTYPES_OF_BITS[bits] if d in dtypes), 0
            ),
            "batch": axes["batch"],
            long: axes["long"],
        }
        found = predicted(
            self.fits.estimators[operation], columns, len(axes["batch"]), points=points
        )
        return list(
            zip(
                axes["batch"].tolist(),
                axes["long"].tolist(),
                found["time_s"],
                map(bool, found["beyond"]),
                strict=True,
            )
        )


def _envelope(tokens: Integers, seconds: Floats) -> tuple[Integers, Floats]:
    """Return the least seconds for each number of tokens, rising with it."""
    distinct, places = np.unique(tokens, return_inverse=True)
    least = np.full(len(distinct), np.inf)
    np.minimum.at(least, places, seconds)
    return distinct, np.minimum.accumulate(least[::-1])[::-1]
