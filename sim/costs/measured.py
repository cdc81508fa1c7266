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
from sim.costs.measured_chunks import mean_chunk, mean_chunks
from sim.costs.measured_reading import (
    beside_factor,
    corrected,
    decode_surface,
    entry_of,
    kv_key_s,
    past_factor,
    prefill_surface,
    read_correction,
    token_curves,
)
from sim.costs.measured_rest import MeasuredRest
from sim.costs.parts import FLAG, Memo, cost_columns, step_cost
from sim.costs.roofline import RooflineCost
from sim.costs.widths import ESTIMATE, Widths, read_widths, wider
from sim.generations import GraphRule, KvLayout, SwapRule, SwapVariant
from sim.hardware import GpuSpec  # noqa: TC001 - as above
from sim.profile import read_profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.costs.transfers import Transfer

    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]

_OTHER_KERNELS_S: Final = 12e-6
"""Seconds that a layer's norms, rotary embedding, activation and cache write spend on
starting: five of 2.4 us. Those of products and attention are in their measurements."""

_ESTIMATES: Final = Widths(ESTIMATE, ESTIMATE)
_TokenParts = tuple[float, float, float, bool, float, float]
"""Seconds of products, of collectives and of other kernels, whether the products were
extrapolated, and the squares of the width of all, down and up."""
_RowParts = tuple[float, float, float, float]
"""Seconds of head and host, and the squares of the head's width."""


class MeasuredCost:
    """Seconds of a step from measured kernels.

    ::

        gemm_s               table over tokens: the products of all layers
        decode_attention_s   table over (decodes, mean context), all layers
        prefill_attention_s  table over (chunks, mean query-key pairs), all layers,
                             at least KV bytes / bandwidth
        allreduce_s          table over tokens, all layers
        head_s               tables over requests: output projection, sampler
        swap_s, copy_s       tables over pieces and blocks; see `sim.costs.transfers`
        host_s               host a step and a request, and a table over tokens of the
                             kernels between; where kernels are launched one by one
                             and that takes longer than running them, what it is longer

    A table that the profile lacks is the datasheet's, as `RooflineCost` has it.

    Bounds: the errors of an operation are the same in every layer, those of different
    operations independent, so that half-widths add as squares. Each operation has the
    width of its own region, inside or beyond what was measured; host time has none. See
    `sim.costs.widths`.

    The sum of contexts decides what decodes cost, never the longest one. A chunk with
    a past costs what a fresh one with as many query-key pairs costs, times a factor
    where the profile has such chunks; where it has none it says `extrapolated`, as do
    swaps and copies without a table and attention and products outside the measured
    shapes (head and element-wise kernels only widen the bounds). Where attention of
    mixed batches was measured, a factor says what chunks and decodes do to each other;
    elsewhere their times add up. Times below the physical floor are raised to it when
    the tables are read. Where whole steps were measured, the profile's
    ``step_correction`` multiplies all operations of the GPU; `describe` tells it.

    Parameters
    ----------
    profile
        Path of a kvprofile/1 file that was fitted for this model.
    model, gpu, tensor_parallel_size, block_size, kv_cache_dtype, swap_rule, graph_rule
        Injected from the engine's configuration.
    swap_variant, swap_layout, swap_overlap
        As `RooflineCost` has them; null for what the engine does.
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
        swap_rule: SwapRule = SwapRule(),  # noqa: B008 - frozen
        graph_rule: GraphRule = GraphRule(),  # noqa: B008 - frozen
        swap_variant: SwapVariant | None = None,
        swap_layout: KvLayout | None = None,
        swap_overlap: bool | None = None,
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
            swap_rule=swap_rule,
            swap_variant=swap_variant,
            swap_layout=swap_layout,
            swap_overlap=swap_overlap,
            **overheads,
        )
        self._correction = read_correction(self.profile.fit)
        entry = corrected(entry_of(self.profile, self._rest), self._correction)
        self._decode = decode_surface(entry["decode"], self._rest)
        self._prefill = prefill_surface(entry["prefill"], self._rest)
        self._key_s = kv_key_s(self._rest)
        self._past = past_factor(entry, self._rest, self._prefill)
        self._beside = beside_factor(
            entry, self._rest, self._past, self._prefill, self._decode
        )
        self._gemm, self._allreduce = token_curves(entry["tokens"], self._rest)
        self._read_widths()
        self._other = MeasuredRest(
            self.profile.fit, entry, self._rest, graph_rule, self._correction
        )
        self._token_parts: Memo[_TokenParts] = Memo()
        self._row_parts: Memo[_RowParts] = Memo()
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
        scale, apart = 1.0, False
        if self._beside is not None and num_decodes and num_prefills:
            chunk = mean_chunk(num_prefills, shape[4], shape[5], 1)
            scale, apart = self._beside.at(*chunk, num_decodes, decode_context)
        if num_tokens:
            down += head_down
            up += head_up
        else:
            head_s = 0.0
        if num_prefills and num_tokens:
            prefill_s, beyond, more_down, more_up = self._chunks(
                *shape[2:6], scale, apart
            )
            down += more_down
            up += more_up
            outside = outside or beyond
        if num_decodes:
            decode_s, beyond = self._decode.at(num_decodes, decode_context)
            decode_s *= scale
            beyond = beyond or apart
            share_down, share_up = self._decode_widths[beyond]
            down += (decode_s * share_down) * (decode_s * share_down)
            up += (decode_s * share_up) * (decode_s * share_up)
            outside = outside or beyond
        if any(shape[6:]):
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            swap_s, copy_s, beyond, more_down, more_up = self._other.moves(shape, gpu_s)
            down += more_down
            up += more_up
            outside = outside or beyond
        host_s += kernels_s
        if self._other.launches_s:
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            host_s += self._other.late_s(num_tokens, num_prefills, gpu_s)
        return step_cost(
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            swap_s,
            copy_s,
            host_s,
            bool(outside),
            (down, up),
        )

    def _chunks(  # noqa: PLR0917 - four of `BatchShape`, and what decodes do
        self,
        num_chunks: int,
        num_tokens: int,
        context: int,
        pairs: int,
        scale: float,
        apart: bool,
    ) -> tuple[float, bool, float, float]:
        """Return seconds of chunks, whether extrapolated, and squares of the width."""
        seconds, beyond = self._chunk_s(num_chunks, num_tokens, context, pairs)
        seconds *= scale
        beyond = beyond or apart
        guessed = self._past is None and context != num_tokens
        widths = self._past_widths if guessed else self._prefill_widths
        return seconds, beyond or guessed, *widths[beyond].squares(seconds)

    def _chunk_s(
        self, num_chunks: int, num_tokens: int, context: int, pairs: int
    ) -> tuple[float, bool]:
        """Return seconds of chunks without decodes, and whether beyond the tables."""
        seconds, beyond = self._prefill.at(num_chunks, pairs)
        if self._past is not None and context != num_tokens:
            chunk = mean_chunk(num_chunks, context, pairs, num_chunks)
            factor, beyond = self._past.at(*chunk)
            seconds *= factor
        return max(seconds, self._key_s * context), beyond

    def _price_tokens(self, num_tokens: int) -> _TokenParts:
        """Return what the tokens of a step decide."""
        parts: _TokenParts = 0.0, 0.0, 0.0, False, 0.0, 0.0
        if num_tokens:
            gemm_s, allreduce_s, _ = (
                self._correction * part for part in self._rest.token_parts(num_tokens)
            )
            kernels_s, _, kernels_width = self._other.kernels(num_tokens)
            outside, beyond = True, False  # experts are not in the tables
            if not self._rest.model.num_experts:
                gemm_s, outside = self._gemm.at(num_tokens)
            if self._allreduce is not None:
                allreduce_s, beyond = self._allreduce.at(num_tokens)
            down, up = self._gemm_widths[outside].squares(gemm_s)
            for width, seconds in (
                (self._allreduce_widths[beyond], allreduce_s),
                (kernels_width, kernels_s),
            ):
                more_down, more_up = width.squares(seconds)
                down += more_down
                up += more_up
            parts = gemm_s, allreduce_s, kernels_s, outside, down, up
        return self._token_parts.keep(num_tokens, parts)

    def _price_rows(self, num_rows: int) -> _RowParts:
        """Return what the requests of a step decide."""
        _, host_s = self._rest.row_parts(num_rows)
        head_s = down = up = 0.0
        for seconds, _, width in self._other.head(num_rows):
            more_down, more_up = width.squares(seconds)
            head_s += seconds
            down += more_down
            up += more_up
        return self._row_parts.keep(num_rows, (head_s, host_s, down, up))

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
            prefill_s, _ = self._chunk_s(
                num_prefills, num_prefill_tokens, prefill_context, pairs
            )
        if num_decodes:
            decode_s, _ = self._decode.at(num_decodes, decode_context)
            if self._beside is not None and num_prefills:
                chunk = mean_chunk(num_prefills, prefill_context, pairs, 1)
                scale, _ = self._beside.at(*chunk, num_decodes, decode_context)
                prefill_s *= scale
                decode_s *= scale
        host_s += kernels_s
        if self._other.launches_s:
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            host_s += self._other.late_s(num_tokens, num_prefills, gpu_s)
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
        if self._other.launching_s(num_decodes, 0):
            return lambda context: self.batch_total(num_decodes, context, 0, 0, 0, 0)
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
        decodes, context, prefills, prefill_tokens = shapes[:, :4].T
        num_tokens, num_rows = decodes + prefill_tokens, decodes + prefills
        gemm_s, allreduce_s, kernels_s, outside, *token_squares = self._token_columns(
            num_tokens
        )
        head_s, host_s, *head_squares = self._row_columns(num_rows)
        computes = num_tokens != 0
        squares = np.array(token_squares)
        squares += np.where(computes, head_squares, 0.0)
        scale, apart = self._beside_columns(shapes)
        prefill_s, prefill_beyond, more = self._chunk_columns(shapes, scale, apart)
        squares += more
        decode_s, flags = self._decode.column(decodes, context)
        decode_s *= scale
        decode_beyond = (flags != 0) | apart
        squares += self._decode_widths.squares(decode_s, decode_beyond)
        head_s = np.where(computes, head_s, 0.0)
        flags = (outside != 0) | prefill_beyond | decode_beyond
        gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
        swap_s, copy_s, move_beyond, more = self._other.move_columns(shapes, gpu_s)
        squares += more
        found = cost_columns(
            len(shapes),
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            swap_s,
            copy_s,
            host_s + kernels_s + self._other.late_column(num_tokens, prefills, gpu_s),
            squares=squares,
        )
        found[:, FLAG] = flags | move_beyond
        return found

    def _beside_columns(self, shapes: Counts) -> tuple[Seconds, NDArray[np.bool_]]:
        """Return what chunks and decodes do to each other, and whether beyond."""
        scale = np.ones(len(shapes))
        apart = np.zeros(len(shapes), dtype=np.bool_)
        both = np.flatnonzero((shapes[:, 0] != 0) & (shapes[:, 2] != 0))
        if self._beside is not None and len(both):
            decodes, context, prefills, _, past, pairs = shapes[both, :6].T
            chunk = mean_chunks(prefills, past, pairs, 1)
            scale[both], apart[both] = self._beside.column(*chunk, decodes, context)
        return scale, apart

    def _chunk_columns(
        self, shapes: Counts, scale: Seconds, apart: NDArray[np.bool_]
    ) -> tuple[Seconds, NDArray[np.bool_], Seconds]:
        """Return `_chunks` of each row, the squares as (2, n); nothing without any."""
        decodes, _, prefills, num_tokens, context, pairs = shapes[:, :6].T
        chunks = np.where(decodes + num_tokens != 0, prefills, 0)
        seconds, flags = self._prefill.column(chunks, pairs)
        beyond = flags != 0
        has_past = (chunks != 0) & (context != num_tokens)
        own = np.flatnonzero(has_past)
        if self._past is not None and len(own):
            chunk = mean_chunks(chunks[own], context[own], pairs[own], chunks[own])
            factor, beyond[own] = self._past.column(*chunk)
            seconds[own] *= factor
        read_s = np.where(chunks != 0, self._key_s * context, 0.0)
        seconds = np.maximum(seconds, read_s) * scale
        beyond |= apart & (chunks != 0)
        guessed = has_past & (self._past is None)
        squares = np.where(
            guessed,
            self._past_widths.squares(seconds, beyond),
            self._prefill_widths.squares(seconds, beyond),
        )
        return seconds, beyond | guessed, squares

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

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        """Return the price of moving blocks by a variant; as the roofline's."""
        return self._other.transfer(variant, load=load, layout=layout)

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
            "step_correction": self.profile.fit.get("step_correction"),
            "intervals_percent": self.profile.fit.get("intervals", {}),
            "empty_step_s": empty.total_s,
            "parameters": {key: rest["parameters"][key] for key in keys},
            "rest": self._other.describe(),
        }
