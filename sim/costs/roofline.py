"""GPU datasheet times model architecture: seconds of a step without a calibration."""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - `sim.config.plug` resolves annotations
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from sim.costs.base import DecodeEnds, StepCost, ends_by
from sim.costs.parts import Memo, cost_columns, step_cost
from sim.costs.roofline_constants import RooflineConstants

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.costs.base import BatchShape

    Parts = TypeVar("Parts", bound=tuple[float, ...])
    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class RooflineCost(RooflineConstants):
    """Seconds of a step from bytes over bandwidth and FLOPs over peak.

    ::

        T = num_decodes + num_prefill_tokens      R = num_decodes + num_prefills
        soft(a, b) = sqrt(a² + b²)                all volumes are those of one rank

        gemm_s               soft(weight and activation bytes / bandwidth,
                                  2 · parameters · T / peak)
                             + the same for the experts that T tokens touch
        decode_attention_s   KV bytes / bandwidth + sequences · KV heads · overhead,
                             at least FLOPs / peak; see below for mixed batches
        prefill_attention_s  4 · heads · head_dim · layers / peak
                             · (pairs + prefill_tile_tokens · context),
                             at least KV bytes / bandwidth
        head_s               soft(head bytes / bandwidth, 2 · head · R / peak)
                             + sampler passes over R · vocabulary logits
        allreduce_s          2 · layers · (latency + 2 (tp-1)/tp · bytes / link)
        swap_s               by variant, each way; see `sim.costs.transfers`
        copy_s               fixed + 2 · bytes / bandwidth
        host_s               host, requests, latency of kernels, element-wise kernels

    The soft maximum replaces the sharp one for GEMMs: near the ridge both limits
    bind, and measured times lie 15 % (h100) to 50 % (a100) above the sharp maximum.

    Experts are touched as if tokens chose them uniformly: of E experts, T tokens that
    take k each touch ``E · (1 - (1 - k/E)^T)`` on average. Real routers are skewed and
    touch fewer.

    A decode in a batch with prefill chunks costs more where the attention kernel is
    FlashAttention 2 (`mixed_decode_tile_tokens`): its queries are padded to a tile of
    which one row is used, and every query head reads the KV again.

    Layers with a sliding window see at most ``window`` keys a query, and ``window``
    keys before a chunk. The shape holds sums only, so the bounds are applied to sums:
    upper bounds where some contexts are longer than the window and some shorter.

    Not modelled: skew of contexts within a batch, tile quantisation of GEMMs, clocks
    under power limits, collectives of embedding and head, expert parallelism.

    Raises
    ------
    ConfigError
        If a parameter is out of range, the model cannot be divided over the ranks, or
        `kv_cache_dtype` or the model's quantisation is unknown.

    Notes
    -----
    The defaults are fitted once for all GPUs and are rounded; ``describe()`` names the
    source of each, ``sim/costs/README.md`` says how far they are off.

    Parameters are read once: what depends on the number of tokens or of requests alone
    is kept after the first step that has it. ``dataclasses.replace`` makes a model with
    another parameter. A subclass with another formula redefines `step`, `decode_total`
    and `columns`; see `sim.costs.base.pricer_of`.
    """

    _token_parts: Memo[tuple[float, float, float]] = field(
        init=False, repr=False, default_factory=Memo
    )
    _row_parts: Memo[tuple[float, float]] = field(
        init=False, repr=False, default_factory=Memo
    )
    _decode_ends: Memo[DecodeEnds] = field(init=False, repr=False, default_factory=Memo)
    _decode_totals: Memo[Callable[[int], float]] = field(
        init=False, repr=False, default_factory=Memo
    )

    # -- parts of a step, for models that measure the others -------------------------

    def token_parts(self, num_tokens: int) -> tuple[float, float, float]:
        """Return seconds of GEMMs, of collectives and of kernels outside both."""
        return self._token_parts.get(num_tokens) or self._price_tokens(num_tokens)

    def row_parts(self, num_rows: int) -> tuple[float, float]:
        """Return seconds of the head and of the host for so many requests."""
        return self._row_parts.get(num_rows) or self._price_rows(num_rows)

    # -- one step ---------------------------------------------------------------

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step of this shape, in seconds."""
        decodes, context, prefills, tokens, past, pairs, *_ = shape
        num_swapped_in, num_swapped_out, num_copied = shape[6:]
        gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s = self._parts(
            decodes, context, prefills, tokens, past, pairs
        )
        swap_s = 0.0
        if num_swapped_in or num_swapped_out:
            _, _, kernels_s = self.token_parts(decodes + tokens)
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            swap_s = self._swaps.exposed_s(num_swapped_in, num_swapped_out, gpu_s)
        return step_cost(
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            swap_s,
            self.copy_part_s(num_copied) if num_copied else 0.0,
            host_s,
        )

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
        gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s = self._parts(
            num_decodes,
            decode_context,
            num_prefills,
            num_prefill_tokens,
            prefill_context,
            pairs,
        )
        return gemm_s + prefill_s + decode_s + head_s + allreduce_s + host_s

    def _parts(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_prefill_tokens: int,
        prefill_context: int,
        pairs: int,
    ) -> tuple[float, float, float, float, float, float]:
        """Return the parts of a step that moves no blocks, without those."""
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        gemm_s, allreduce_s, kernels_s = self._token_parts.get(
            num_tokens
        ) or self._price_tokens(num_tokens)
        head_s, host_s = self._row_parts.get(num_rows) or self._price_rows(num_rows)
        prefill_s = decode_s = 0.0
        if not num_tokens:
            head_s = 0.0
        else:
            if num_prefills:
                prefill_s = self._prefill_s(
                    num_prefills, num_prefill_tokens, prefill_context, pairs
                )
            if num_decodes:
                decode_s = self._decode_s(num_decodes, decode_context, num_prefills)
        return gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s + kernels_s

    def _price_tokens(self, num_tokens: int) -> tuple[float, float, float]:
        """Return seconds of GEMMs, of collectives and of kernels outside both."""
        parts = 0.0, 0.0, 0.0
        if num_tokens:
            parts = (
                self._gemm_s(num_tokens),
                self._collectives_s + self._collective_token_s * num_tokens,
                self._kernels_s + self._elementwise_token_s * num_tokens,
            )
        return self._token_parts.keep(num_tokens, parts)

    def head_parts(self, num_rows: int) -> tuple[float, float]:
        """Return seconds of the output projection and of the sampler."""
        memory_s = self._head_s + self._head_row_memory_s * num_rows
        compute_s = self._head_row_compute_s * num_rows
        projection_s = sqrt(memory_s * memory_s + compute_s * compute_s)
        return projection_s, self._sampler_row_s * num_rows

    def _price_rows(self, num_rows: int) -> tuple[float, float]:
        """Return seconds of the head and of the host for so many requests."""
        projection_s, sampler_s = self.head_parts(num_rows)
        head_s = projection_s + sampler_s
        host_s = self.step_overhead_s + self.request_overhead_s * num_rows
        return self._row_parts.keep(num_rows, (head_s, host_s))

    def _gemm_s(self, num_tokens: int) -> float:
        memory_s = self._weights_s + self._gemm_token_memory_s * num_tokens
        compute_s = self._gemm_token_compute_s * num_tokens
        gemm_s = sqrt(memory_s * memory_s + compute_s * compute_s)
        if self._num_experts:
            # the share of experts that none of the tokens chose
            missed = self._expert_miss_share**num_tokens
            touched = self._num_experts * (1.0 - missed)
            memory_s = (
                self._expert_s * touched + self._expert_token_memory_s * num_tokens
            )
            compute_s = self._expert_token_compute_s * num_tokens
            gemm_s += sqrt(memory_s * memory_s + compute_s * compute_s)
        return gemm_s

    def _decode_s(
        self, num_decodes: int, context_tokens: float, num_prefills: int
    ) -> float:
        if self._sliding_share:
            seen = min(context_tokens, num_decodes * self._window_tokens)
            context_tokens = (
                self._full_share * context_tokens + self._sliding_share * seen
            )
        decode_s = (
            self._kv_token_s * context_tokens + self._decode_sequence_s * num_decodes
        )
        key_s = self._mixed_decode_key_s if num_prefills else self._decode_key_compute_s
        compute_s = key_s * context_tokens
        return compute_s if compute_s > decode_s else decode_s

    def _prefill_s(
        self, num_prefills: int, num_tokens: int, context_tokens: float, pairs: float
    ) -> float:
        if self._sliding_share:
            window = self._window_tokens
            seen_pairs = min(pairs, num_tokens * window)
            # a chunk reaches back one window from its first token
            seen = min(context_tokens, num_prefills * window + num_tokens)
            pairs = self._full_share * pairs + self._sliding_share * seen_pairs
            context_tokens = (
                self._full_share * context_tokens + self._sliding_share * seen
            )
        compute_s = self._pair_s * (pairs + self.prefill_tile_tokens * context_tokens)
        memory_s = self._kv_token_s * context_tokens
        return compute_s if compute_s > memory_s else memory_s

    # -- many steps -------------------------------------------------------------

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        """Return ``total_s`` of steps of so many decodes, a function of their context.

        As `StepPricer.decode_total`: what the context does not change is computed
        once, and the sums are those of `step` without the parts that are 0.
        """
        total = self._decode_totals.get(num_decodes)
        if total is None:
            total = self._decode_totals.keep(
                num_decodes, self._price_decodes(num_decodes)
            )
        return total

    def _price_decodes(self, num_decodes: int) -> Callable[[int], float]:
        gemm_s, allreduce_s, kernels_s = self._price_tokens(num_decodes)
        head_s, host_s = self._price_rows(num_decodes)
        if not num_decodes:
            return lambda _: host_s
        host_s += kernels_s
        sequence_s = self._decode_sequence_s * num_decodes
        key_s, key_compute_s = self._kv_token_s, self._decode_key_compute_s
        full, sliding = self._full_share, self._sliding_share
        limit = num_decodes * self._window_tokens

        def read(context: int) -> float:
            decode_s = key_s * context + sequence_s
            return gemm_s + decode_s + head_s + allreduce_s + host_s

        def read_or_compute(context: int) -> float:
            # without windows this is 1.0 * context + 0.0: the context itself
            tokens = full * context + sliding * (context if context < limit else limit)
            decode_s = key_s * tokens + sequence_s
            compute_s = key_compute_s * tokens
            decode_s = compute_s if compute_s > decode_s else decode_s
            return gemm_s + decode_s + head_s + allreduce_s + host_s

        return read if self._decodes_only_read else read_or_compute

    @property
    def _decodes_only_read(self) -> bool:
        # rounding keeps order: where a key takes longer to read, any number does
        is_slower = self._decode_key_compute_s > self._kv_token_s
        return not (self._sliding_share or is_slower)

    def decode_ends(self, num_decodes: int) -> DecodeEnds:
        """Return when steps of so many decodes end; see `sim.costs.base.DecodeEnds`."""
        ends = self._decode_ends.get(num_decodes)
        if ends is None:
            make = self._read_ends if self._decodes_only_read else self._other_ends
            ends = self._decode_ends.keep(num_decodes, make(num_decodes))
        return ends

    def _other_ends(self, num_decodes: int) -> DecodeEnds:
        return ends_by(self.decode_total(num_decodes), num_decodes)

    def _read_ends(self, num_decodes: int) -> DecodeEnds:
        """As `ends_by` of ``read`` above, whose call would cost as much as its sum."""
        gemm_s, allreduce_s, kernels_s = self._price_tokens(num_decodes)
        head_s, host_s = self._price_rows(num_decodes)
        host_s += kernels_s
        sequence_s = self._decode_sequence_s * num_decodes
        key_s = self._kv_token_s

        def ends(
            context: int, num_steps: int, now_s: float, until_s: float
        ) -> list[float]:
            ends_s: list[float] = []
            append = ends_s.append
            for tokens in range(
                context, context + num_steps * num_decodes, num_decodes
            ):
                decode_s = key_s * tokens + sequence_s
                end_s = now_s + (gemm_s + decode_s + head_s + allreduce_s + host_s)
                append(end_s)
                if not now_s < end_s < until_s:
                    break
                now_s = end_s
            return ends_s

        return ends

    def columns(self, shapes: Counts) -> Seconds:
        """Return `step` of each row of `shapes`; as `StepPricer.columns`."""
        if not len(shapes):
            return np.empty((0, len(StepCost._fields)))
        decodes, context, prefills, prefill_tokens, past, pairs, *moved = shapes.T
        num_tokens, num_rows = decodes + prefill_tokens, decodes + prefills
        gemm_s, allreduce_s, kernels_s = _looked_up(
            self._token_parts, self._price_tokens, num_tokens
        )
        head_s, host_s = _looked_up(self._row_parts, self._price_rows, num_rows)
        computes = num_tokens != 0
        prefill_s: Seconds | float = 0.0
        if prefills.any():
            prefill_s = self._prefill_column(prefills, prefill_tokens, past, pairs)
            prefill_s = np.where(computes & (prefills != 0), prefill_s, 0.0)
        decode_s = self._decode_column(decodes, context, prefills)
        head_s = np.where(computes, head_s, 0.0)
        swap_s: Seconds | float = 0.0
        if moved[0].any() or moved[1].any():
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            swap_s = self._swaps.column(moved[0], moved[1], gpu_s)
        return cost_columns(
            len(shapes),
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            swap_s,
            self._copy_column(moved[2]),
            host_s + kernels_s,
        )

    def _copy_column(self, copied: Counts) -> Seconds | float:
        if not copied.any():
            return 0.0
        seconds = self.copy_fixed_s + self._copy_block_s * copied
        return np.where(copied != 0, seconds, 0.0)

    def _decode_column(
        self, decodes: Counts, context: Counts, prefills: Counts
    ) -> Seconds:
        tokens: Counts | Seconds = context
        if self._sliding_share:
            seen = np.minimum(context, decodes * self._window_tokens)
            tokens = self._full_share * context + self._sliding_share * seen
        decode_s = self._kv_token_s * tokens + self._decode_sequence_s * decodes
        key_s = np.where(
            prefills != 0, self._mixed_decode_key_s, self._decode_key_compute_s
        )
        decode_s = np.maximum(decode_s, key_s * tokens)
        return np.where(decodes != 0, decode_s, 0.0)

    def _prefill_column(
        self, prefills: Counts, num_tokens: Counts, context: Counts, pairs: Counts
    ) -> Seconds:
        tokens: Counts | Seconds = context
        seen_pairs: Counts | Seconds = pairs
        if self._sliding_share:
            window = self._window_tokens
            full, sliding = self._full_share, self._sliding_share
            seen = np.minimum(context, prefills * window + num_tokens)
            tokens = full * context + sliding * seen
            seen_pairs = full * pairs + sliding * np.minimum(pairs, num_tokens * window)
        compute_s = self._pair_s * (seen_pairs + self.prefill_tile_tokens * tokens)
        return np.maximum(compute_s, self._kv_token_s * tokens)


_SPAN_PER_ROW = 8
"""A table of counts may be so many times as long as the rows that are looked up."""


def _looked_up(
    memo: Memo[Parts],
    price: Callable[[int], Parts],
    counts: Counts,
) -> Seconds:
    """Return the parts of each count, (parts, n): each distinct one is priced once.

    Python does the arithmetic: numpy's powers may differ in the last bit.
    """
    span = int(counts.max()) + 1
    if span <= _SPAN_PER_ROW * len(counts):
        # Marked in a table: several times quicker than sorted.
        is_there = np.zeros(span, dtype=np.bool_)
        is_there[counts] = True
        distinct = np.flatnonzero(is_there)
        places = (np.cumsum(is_there) - 1)[counts]
    else:
        distinct, places = np.unique(counts, return_inverse=True)
    parts = [memo.get(count) or price(count) for count in distinct.tolist()]
    return np.array(parts, np.float64).T[:, places]
