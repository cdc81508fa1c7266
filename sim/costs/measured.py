"""Seconds of a step from tables of measured kernels: a profile, fitted for a model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable  # noqa: TC003 - `sim.plug` resolves annotations
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.architecture import ModelArchitecture  # noqa: TC001 - as above
from sim.cost import BOUNDS, EMPTY_SHAPE, BatchShape, Bound, StepCost
from sim.costs.measured_reading import (
    decode_surface,
    entry_of,
    kv_key_s,
    prefill_surface,
    token_curves,
)
from sim.costs.parts import FLAG, Memo, cost_columns, step_cost
from sim.costs.roofline import RooflineCost
from sim.costs.widths import ESTIMATE, HEAD, KERNELS, Widths, read_widths, wider
from sim.hardware import GpuSpec  # noqa: TC001 - as above
from sim.profile import read_profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]

_OTHER_KERNELS_S: Final = 12e-6
"""Seconds that a layer's norms, rotary embedding, activation and cache write spend on
starting: five of 2.4 us. Those of products and attention are in their measurements."""

_ESTIMATES: Final = Widths(ESTIMATE, ESTIMATE)
_TokenParts = tuple[float, float, float, bool, float, float]
"""Seconds of products, of collectives and of other kernels, whether the products were
extrapolated, and the squares of the width of all, down and up."""


class MeasuredCost:
    """Seconds of a step from measured kernels.

    ::

        gemm_s               table over tokens: the products of all layers
        decode_attention_s   table over (decodes, mean context), all layers
        prefill_attention_s  table over (chunks, mean query-key pairs), all layers,
                             at least KV bytes / bandwidth
        allreduce_s          table over tokens, all layers
        head_s, swap_s,      the datasheet's, as `RooflineCost` has them
        copy_s
        host_s               host a step and a request, and the kernels between

    Bounds: the errors of an operation are the same in every layer, those of different
    operations independent, so that half-widths add as squares. Each operation has the
    width of its own region, inside or beyond what was measured; host time has none. See
    `sim.costs.widths`.

    The sum of contexts decides what decodes cost, never the longest one. Tables hold
    no chunk with a past; such a chunk costs what a fresh one with as many query-key
    pairs costs, and says `extrapolated`, as do swaps, copies and everything outside
    the measured shapes. Times below the physical floor are raised to it when the
    tables are read.

    Parameters
    ----------
    profile
        Path of a kvprofile/1 file that was fitted for this model.
    model, gpu, tensor_parallel_size, block_size, kv_cache_dtype
        Injected from the engine's configuration.
    step_overhead_s, request_overhead_s
        Host seconds a step, and a request of the batch; null for what the profile
        says, or else for the roofline's.

    Raises
    ------
    ConfigError
        If the profile cannot be trusted, is of another GPU, or has no tables of this
        model on so many ranks in this precision.
    """

    def __init__(
        self,
        profile: str,
        *,
        model: ModelArchitecture,
        gpu: GpuSpec,
        tensor_parallel_size: int = 1,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        step_overhead_s: float | None = None,
        request_overhead_s: float | None = None,
    ) -> None:
        self.profile = read_profile(Path(profile))
        host = self.profile.fit.get("host") or {}
        overheads: dict[str, Any] = {
            key: value
            for key, given in (
                ("step_overhead_s", step_overhead_s),
                ("request_overhead_s", request_overhead_s),
            )
            if (value := host.get(key) if given is None else given) is not None
        }
        self._rest = RooflineCost(
            model=model,
            gpu=gpu,
            tensor_parallel_size=tensor_parallel_size,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            layer_latency_s=_OTHER_KERNELS_S,
            **overheads,
        )
        entry = entry_of(self.profile, self._rest)
        self._decode = decode_surface(entry["decode"], self._rest)
        self._prefill = prefill_surface(entry["prefill"], self._rest)
        self._key_s = kv_key_s(self._rest)
        self._gemm, self._allreduce = token_curves(entry["tokens"], self._rest)
        self._read_widths()
        one = BatchShape(0, 0, 0, 0, 0, 0, 1, 0, 1)
        moved = self._rest.step(one)
        self._swap_block_s, self._copy_block_s = moved.swap_s, moved.copy_s
        self._token_parts: Memo[_TokenParts] = Memo()
        self._row_parts: Memo[tuple[float, float, float, float]] = Memo()
        self._decode_totals: Memo[Callable[[int], float]] = Memo()

    def _read_widths(self) -> None:
        fit = self.profile.fit
        self._decode_widths = read_widths(fit, "decode_attention")
        self._prefill_widths = read_widths(fit, "prefill_attention")
        past = wider(self._prefill_widths.beyond, ESTIMATE)
        self._past_widths = Widths(past, past)
        is_dense = not self._rest.model.num_experts
        self._gemm_widths = read_widths(fit, "gemm") if is_dense else _ESTIMATES
        self._allreduce_widths = (
            _ESTIMATES if self._allreduce is None else read_widths(fit, "allreduce")
        )

    # -- one step ---------------------------------------------------------------

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step of this shape, in seconds."""
        num_decodes, decode_context, num_prefills, num_prefill_tokens = shape[:4]
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        gemm_s, allreduce_s, kernels_s, outside, down, up = self._token_parts.get(
            num_tokens
        ) or self._price_tokens(num_tokens)
        head_s, host_s, head_down, head_up = self._row_parts.get(
            num_rows
        ) or self._price_rows(num_rows)
        prefill_s = decode_s = swap_s = copy_s = 0.0
        if num_tokens:
            down += head_down
            up += head_up
        else:
            head_s = 0.0
        if num_prefills and num_tokens:
            prefill_s, beyond, more_down, more_up = self._chunks(*shape[2:6])
            down += more_down
            up += more_up
            outside = outside or beyond
        if num_decodes:
            decode_s, beyond = self._decode.at(num_decodes, decode_context)
            share_down, share_up = self._decode_widths[beyond]
            down += (decode_s * share_down) * (decode_s * share_down)
            up += (decode_s * share_up) * (decode_s * share_up)
            outside = outside or beyond
        if any(shape[6:]):
            swap_s, copy_s, more_down, more_up = self._moves(*shape[6:])
            down += more_down
            up += more_up
            outside = True
        return step_cost(
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            swap_s,
            copy_s,
            host_s + kernels_s,
            bool(outside),
            (down, up),
        )

    def _chunks(
        self, num_chunks: int, num_tokens: int, context: int, pairs: int
    ) -> tuple[float, bool, float, float]:
        """Return seconds of chunks, whether extrapolated, and squares of the width."""
        seconds, beyond = self._prefill.at(num_chunks, pairs)
        seconds = max(seconds, self._key_s * context)
        has_past = context != num_tokens
        widths = self._past_widths if has_past else self._prefill_widths
        return seconds, beyond or has_past, *widths[beyond].squares(seconds)

    def _moves(
        self, num_swapped_in: int, num_swapped_out: int, num_copied: int
    ) -> tuple[float, float, float, float]:
        """Return seconds of swaps and of copies, and squares of their width."""
        swap_s = self._swap_block_s * (num_swapped_in + num_swapped_out)
        copy_s = self._copy_block_s * num_copied
        swap_down, swap_up = ESTIMATE.squares(swap_s)
        copy_down, copy_up = ESTIMATE.squares(copy_s)
        return swap_s, copy_s, swap_down + copy_down, swap_up + copy_up

    def _price_tokens(self, num_tokens: int) -> _TokenParts:
        """Return what the tokens of a step decide."""
        parts: _TokenParts = 0.0, 0.0, 0.0, False, 0.0, 0.0
        if num_tokens:
            gemm_s, allreduce_s, kernels_s = self._rest.token_parts(num_tokens)
            outside, beyond = True, False  # experts are not in the tables
            if not self._rest.model.num_experts:
                gemm_s, outside = self._gemm.at(num_tokens)
            if self._allreduce is not None:
                allreduce_s, beyond = self._allreduce.at(num_tokens)
            down, up = self._gemm_widths[outside].squares(gemm_s)
            for width, seconds in (
                (self._allreduce_widths[beyond], allreduce_s),
                (KERNELS, kernels_s),
            ):
                more_down, more_up = width.squares(seconds)
                down += more_down
                up += more_up
            parts = gemm_s, allreduce_s, kernels_s, outside, down, up
        return self._token_parts.keep(num_tokens, parts)

    def _price_rows(self, num_rows: int) -> tuple[float, float, float, float]:
        """Return seconds of head and host, and the squares of the head's width."""
        head_s, host_s = self._rest.row_parts(num_rows)
        return self._row_parts.keep(num_rows, (head_s, host_s, *HEAD.squares(head_s)))

    # -- many steps -------------------------------------------------------------

    def batch_total(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_prefill_tokens: int,
        prefill_context: int,
        pairs: int,
    ) -> float:
        """Return ``total_s`` of a step that moves no blocks; see `StepPricer`."""
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        gemm_s, allreduce_s, kernels_s, *_ = self._token_parts.get(
            num_tokens
        ) or self._price_tokens(num_tokens)
        head_s, host_s, *_ = self._row_parts.get(num_rows) or self._price_rows(num_rows)
        prefill_s = decode_s = 0.0
        if not num_tokens:
            head_s = 0.0
        elif num_prefills:
            prefill_s, _ = self._prefill.at(num_prefills, pairs)
            prefill_s = max(prefill_s, self._key_s * prefill_context)
        if num_decodes:
            decode_s, _ = self._decode.at(num_decodes, decode_context)
        host_s += kernels_s
        return gemm_s + prefill_s + decode_s + head_s + allreduce_s + host_s

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        """Return ``total_s`` of steps of so many decodes, a function of their context.

        As `StepPricer.decode_total`.
        """
        total = self._decode_totals.get(num_decodes)
        if total is None:
            total = self._decode_totals.keep(
                num_decodes, self._price_decodes(num_decodes)
            )
        return total

    def _price_decodes(self, num_decodes: int) -> Callable[[int], float]:
        gemm_s, allreduce_s, kernels_s, *_ = self._price_tokens(num_decodes)
        head_s, host_s, *_ = self._price_rows(num_decodes)
        host_s += kernels_s
        if not num_decodes:
            return lambda _: host_s
        values, slopes, _ = self._decode.row(num_decodes)
        amounts = self._decode.amounts

        def total(context: int) -> float:
            j = bisect_right(amounts, context // num_decodes) - 1
            if j < 0:
                decode_s = values[0]
            else:
                decode_s = values[j] + slopes[j] * (context - num_decodes * amounts[j])
            return gemm_s + decode_s + head_s + allreduce_s + host_s

        return total

    def decode_bound(self, num_decodes: int, bound: Bound) -> Callable[[int], float]:
        """Return ``lo_s`` or ``hi_s`` of steps of so many decodes; see `StepPricer`."""
        total = self.decode_total(num_decodes)
        if not num_decodes:
            return total
        place = BOUNDS.index(bound)
        sign = -1.0 if bound == "lo" else 1.0
        *_, head_down, head_up = self._price_rows(num_decodes)
        fixed = self._price_tokens(num_decodes)[4 + place] + (head_down, head_up)[place]
        shares = [width[place] for width in self._decode_widths]
        seconds = self._decode.at

        def at_bound(context: int) -> float:
            decode_s, beyond = seconds(num_decodes, context)
            half_s = decode_s * shares[beyond]
            return total(context) + sign * sqrt(fixed + half_s * half_s)

        return at_bound

    def columns(self, shapes: Counts) -> Seconds:
        """Return `step` of each row of `shapes`; as `StepPricer.columns`."""
        if not len(shapes):
            return np.empty((0, len(StepCost._fields)))
        decodes, context, prefills, prefill_tokens, past, pairs, *moved = shapes.T
        num_tokens, num_rows = decodes + prefill_tokens, decodes + prefills
        gemm_s, allreduce_s, kernels_s, outside, *token_squares = self._token_columns(
            num_tokens
        )
        head_s, host_s, *head_squares = self._row_columns(num_rows)
        computes = num_tokens != 0
        squares = np.array(token_squares)
        squares += np.where(computes, head_squares, 0.0)
        prefill_s, prefill_beyond, more = self._chunk_columns(
            np.where(computes, prefills, 0), prefill_tokens, past, pairs
        )
        squares += more
        decode_s, flags = self._decode.column(decodes, context)
        decode_beyond = flags != 0
        squares += self._decode_widths.squares(decode_s, decode_beyond)
        swap_s, copy_s, more = self._move_columns(*moved)
        squares += more
        found = cost_columns(
            len(shapes),
            gemm_s,
            prefill_s,
            decode_s,
            np.where(computes, head_s, 0.0),
            allreduce_s,
            swap_s,
            copy_s,
            host_s + kernels_s,
            squares=squares,
        )
        found[:, FLAG] = (outside != 0) | prefill_beyond | decode_beyond
        found[shapes[:, 6:].any(axis=1), FLAG] = 1.0
        return found

    def _chunk_columns(
        self, chunks: Counts, num_tokens: Counts, context: Counts, pairs: Counts
    ) -> tuple[Seconds, NDArray[np.bool_], Seconds]:
        """Return `_chunks` of each row, the squares as (2, n); nothing without any."""
        seconds, flags = self._prefill.column(chunks, pairs)
        beyond = flags != 0
        read_s = np.where(chunks != 0, self._key_s * context, 0.0)
        seconds = np.maximum(seconds, read_s)
        has_past = (chunks != 0) & (context != num_tokens)
        squares = np.where(
            has_past,
            self._past_widths.squares(seconds, beyond),
            self._prefill_widths.squares(seconds, beyond),
        )
        return seconds, beyond | has_past, squares

    def _move_columns(
        self, swapped_in: Counts, swapped_out: Counts, copied: Counts
    ) -> tuple[Seconds, Seconds, Seconds]:
        """Return `_moves` of each row, the squares as (2, n)."""
        swap_s = np.asarray(self._swap_block_s * (swapped_in + swapped_out), np.float64)
        copy_s = np.asarray(self._copy_block_s * copied, np.float64)
        if not (swap_s.any() or copy_s.any()):
            return swap_s, copy_s, np.zeros((2, 1))
        nowhere = np.zeros(len(swap_s), dtype=np.bool_)
        squares = _ESTIMATES.squares(swap_s, nowhere)
        squares += _ESTIMATES.squares(copy_s, nowhere)
        return swap_s, copy_s, squares

    def _token_columns(self, counts: Counts) -> Seconds:
        distinct, places = np.unique(counts, return_inverse=True)
        parts = [
            self._token_parts.get(count) or self._price_tokens(count)
            for count in distinct.tolist()
        ]
        return np.array(parts, np.float64).T[:, places]

    def _row_columns(self, counts: Counts) -> Seconds:
        distinct, places = np.unique(counts, return_inverse=True)
        parts = [
            self._row_parts.get(count) or self._price_rows(count)
            for count in distinct.tolist()
        ]
        return np.array(parts, np.float64).T[:, places]

    def describe(self) -> dict[str, Any]:
        """Return parameters and sources, JSON-ready, for the results' provenance."""
        rest = self._rest.describe()
        empty = self._rest.step(EMPTY_SHAPE)
        keys = ("step_overhead_s", "request_overhead_s", "swap_efficiency")
        return rest | {
            "kind": "measured",
            "profile": self.profile.id,
            "source": self.profile.provenance.get("source"),
            "bounds": True,
            "intervals_percent": self.profile.fit.get("intervals", {}),
            "empty_step_s": empty.total_s,
            "parameters": {key: rest["parameters"][key] for key in keys},
        }
