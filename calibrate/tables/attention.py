"""Attention of one layer as tables: decodes, fresh chunks, chunks with a past, both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.tables.fits import (
    BATCHES,
    CONTEXTS,
    QUERIES,
    filled,
    nodes,
    octaves,
    predicted,
    product,
    rounded,
)
from calibrate.tables.latent import LatentTables
from sim.costs import RooflineCost
from sim.hardware.gpus import load_gpu
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from calibrate.tables.fits import Fits
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

_FULL: Final = 0
_MOST_QUERIES: Final = 32
_FAR: Final = 2
"""Windows from which on the times of tables do not change with the context."""
_ITEMSIZES: Final = {2: "auto", 1: "fp8"}
Table = dict[str, Any]


class AttentionTables:
    """Tables of one model on so many ranks with a KV cache of one precision.

    An operation that was not measured comes from the datasheet; `itemsize` is in bytes
    an element of the cache.
    """

    def __init__(
        self,
        fits: Fits,
        model: ModelArchitecture,
        ranks: int,
        itemsize: int,
        gpu: GpuSpec | None,
    ) -> None:
        self.fits = fits
        self.model = model
        self.ranks = ranks
        self.itemsize = itemsize
        self.gpu = gpu
        self.latent: LatentTables | None = None
        if model.kv_lora_rank:
            self.latent = LatentTables(fits, model, ranks, itemsize)

    @property
    def windows(self) -> list[int]:
        """Keys that layers of the model see at most; 0 for all of them."""
        model = self.model
        sliding = model.sliding_window and model.num_sliding_layers
        return [_FULL, model.sliding_window or 0] if sliding else [_FULL]

    def tables(self) -> Table:
        """Return the attention tables of an entry of a profile's `fit`."""
        if self.latent is not None:
            return self.latent.tables()
        found: Table = {
            "decode": {str(w): self._decode(w) for w in self.windows},
            "prefill": {str(w): self._prefill(w) for w in self.windows},
        }
        if self._has_past():
            found["prefill_past"] = {str(w): self._past(w) for w in self.windows}
        if "mixed_attention" in self.fits.estimators and self.windows == [_FULL]:
            found["mixed"] = {str(_FULL): self._mixed()}
        return found

    def rest(self) -> RooflineCost:
        """Return the datasheet's times."""
        return RooflineCost(
            model=self.model,
            gpu=self.gpu or load_gpu(self.fits.device.name),
            tensor_parallel_size=self.ranks,
            kv_cache_dtype=_ITEMSIZES[self.itemsize],
        )

    def estimated(self) -> list[str]:
        """Return the operations whose tables come from the datasheet."""
        if self.latent is not None:
            return []
        wanted = ("decode_attention", "prefill_attention")
        return [name for name in wanted if name not in self.fits.estimators]

    def _columns(self, window: int | None, **axes: Any) -> dict[str, Any]:
        model = self.model
        columns = {
            "num_heads": model.num_attention_heads // self.ranks,
            "num_kv_heads": model.kv_heads_per_rank(self.ranks),
            "head_dim": model.head_dim,
            "kv_itemsize": self.itemsize,
        }
        if window is not None:
            columns["window"] = window
        return columns | axes

    def _measured(self, operation: str, axis: str) -> Any:
        """Return the measured values of an axis; none where nothing was measured."""
        points = self.fits.points.get(operation)
        return np.empty(0, np.int64) if points is None else points.columns[axis]

    def _fitted(
        self, operation: str, shape: tuple[int, ...], window: int | None, **axes: Any
    ) -> Table:
        return predicted(
            self.fits.estimators[operation],
            self._columns(window, **axes),
            *shape,
            points=self.fits.points[operation],
        )

    def _decode(self, window: int) -> Table:
        operation = "decode_attention"
        batches = nodes(self._measured(operation, "batch"), BATCHES)
        contexts = nodes(self._measured(operation, "context"), CONTEXTS)
        axes = product(batch=batches, context=contexts)
        shape = len(batches), len(contexts)
        head = {"counts": batches, "amounts": contexts}
        if operation in self.fits.estimators:
            if window and window in self._measured(operation, "window"):
                # far beyond the window a decode reads no more, however long it is
                axes["context"] = np.minimum(axes["context"], _FAR * window)
            return head | self._fitted(operation, shape, window, **axes)

        def one(batch: int, context: int) -> BatchShape:
            return BatchShape(batch, batch * context, 0, 0, 0, 0)

        return head | self._datasheet(one, "decode_attention_s", axes, shape)

    def _prefill(self, window: int) -> Table:
        operation = "prefill_attention"
        batches = nodes(self._measured(operation, "batch"), BATCHES[:9])
        queries = nodes(self._measured(operation, "query"), QUERIES)
        axes = product(batch=batches, query=queries)
        shape = len(batches), len(queries)
        head = {"counts": batches, "amounts": queries}
        if operation in self.fits.estimators:
            table = self._fitted(operation, shape, window, **axes, past=0)
            if self._measured(operation, "batch").max() == 1:
                table["time_s"] = _several(table["time_s"][0], batches)
            return head | table

        def one(batch: int, query: int) -> BatchShape:
            tokens = batch * query
            pairs = batch * query * (query + 1) // 2
            return BatchShape(0, 0, batch, tokens, tokens, pairs)

        return head | self._datasheet(one, "prefill_attention_s", axes, shape)

    def _datasheet(
        self,
        one: Callable[[int, int], BatchShape],
        part: str,
        axes: dict[str, Any],
        shape: tuple[int, int],
    ) -> Table:
        """Return a part of the roofline, every node of it extrapolated."""
        cost = self.rest()
        rows = zip(*(values.tolist() for values in axes.values()), strict=True)
        layers = self.model.num_hidden_layers
        seconds = [getattr(cost.step(one(*row)), part) / layers for row in rows]
        # kernels take a while to start, which the roofline has elsewhere
        grid = np.maximum(np.array(seconds), 1e-6).reshape(shape)
        return {"time_s": rounded(grid), "beyond": np.ones(shape, int).tolist()}

    def _has_past(self) -> bool:
        return bool((self._measured("prefill_attention", "past") > 0).any())

    def _past(self, window: int) -> Table:
        operation = "prefill_attention"
        queries = _above(self._measured(operation, "query"), 1)
        pasts = filled({0, *octaves(self._measured(operation, "past"))})
        shape = len(queries), len(pasts)
        axes = product(query=queries, past=pasts)
        table = self._fitted(operation, shape, window, batch=1, **axes)
        return {"queries": queries, "pasts": pasts} | table

    def _mixed(self) -> Table:
        """Return seconds of one chunk beside decodes, only where both are there."""
        operation = "mixed_attention"
        axes = {
            # kernels change their tiles between powers of two
            "queries": _above(self._measured(operation, "query"), 1),
            "pasts": octaves(self._measured(operation, "past")),
            "num_decodes": octaves(self._measured(operation, "num_decodes"), first=1),
            "contexts": octaves(self._measured(operation, "decode_context"), first=1),
        }
        grid = product(**axes)
        names = ("query", "past", "num_decodes", "decode_context")
        values = dict(zip(names, grid.values(), strict=True))
        shape = tuple(len(nodes_of) for nodes_of in axes.values())
        return axes | self._fitted(operation, shape, None, **values)


def _several(one_s: list[float], counts: list[int]) -> list[list[float]]:
    """Return seconds of several equal chunks where only one at a time was measured.

    The kernel starts once, and computes each: exact where arithmetic decides. What
    starting takes is the time of the shortest chunk.
    """
    start_s = min(one_s)
    times = start_s + np.outer(counts, np.array(one_s) - start_s)
    found: list[list[float]] = rounded(times)
    return found


def _above(measured: Any, least: int) -> list[int]:
    """Return the measured values of an axis above `least`, at most a few dozen."""
    return nodes(measured[measured > least], most=_MOST_QUERIES)
