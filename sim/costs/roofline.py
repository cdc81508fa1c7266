"""GPU datasheet times model architecture: seconds of a step without a calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from sim.costs.parts import (
    Count,
    FormulaCost,
    Line,
    Memo,
    Seconds,
    SteadyDecodes,
    larger,
    looked_up,
    smaller,
    where,
)
from sim.costs.roofline_constants import RooflineConstants

if TYPE_CHECKING:
    from sim.costs.base import BatchShape
    from sim.costs.parts import Parts, Rest


@dataclass(slots=True, kw_only=True, eq=False)
class RooflineCost(RooflineConstants, FormulaCost):
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

    # -- what counts decide ------------------------------------------------------

    def counted(
        self, num_decodes: Count, num_prefills: Count, num_prefill_tokens: Count
    ) -> tuple[Seconds, Seconds, Seconds, Seconds, Seconds]:
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        if num_tokens.__class__ is ndarray:
            of_tokens: Any = looked_up(self.token_parts, num_tokens)
            of_rows: Any = looked_up(self.row_parts, num_rows)
        else:
            of_tokens = self._token_parts.get(num_tokens) or self.token_parts(
                num_tokens
            )
            of_rows = self._row_parts.get(num_rows) or self.row_parts(num_rows)
        gemm_s, allreduce_s, kernels_s = of_tokens
        head_s, host_s = of_rows
        return gemm_s, head_s, allreduce_s, host_s + kernels_s, kernels_s

    def token_parts(self, num_tokens: int) -> tuple[float, float, float]:
        """Return seconds of GEMMs, of collectives and of kernels outside both."""
        kept = self._token_parts.get(num_tokens)
        if kept is not None:
            return kept
        parts = 0.0, 0.0, 0.0
        if num_tokens:
            parts = (
                self._gemm_s(num_tokens),
                self._collectives_s + self._collective_token_s * num_tokens,
                self._kernels_s + self._elementwise_token_s * num_tokens,
            )
        return self._token_parts.keep(num_tokens, parts)

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

    def row_parts(self, num_rows: int) -> tuple[float, float]:
        """Return seconds of the head and of the host for so many requests."""
        kept = self._row_parts.get(num_rows)
        if kept is not None:
            return kept
        projection_s, sampler_s = self.head_parts(num_rows)
        head_s = projection_s + sampler_s
        host_s = self.step_overhead_s + self.request_overhead_s * num_rows
        return self._row_parts.keep(num_rows, (head_s, host_s))

    def head_parts(self, num_rows: int) -> tuple[float, float]:
        """Return seconds of the output projection and of the sampler."""
        memory_s = self._head_s + self._head_row_memory_s * num_rows
        compute_s = self._head_row_compute_s * num_rows
        projection_s = sqrt(memory_s * memory_s + compute_s * compute_s)
        return projection_s, self._sampler_row_s * num_rows

    # -- attention -----------------------------------------------------------------

    def decode_attention_s(
        self, num_decodes: Count, num_context_tokens: Count, num_prefills: Count
    ) -> Seconds:
        tokens = num_context_tokens
        if self._sliding_share:
            seen = smaller(tokens, num_decodes * self._window_tokens)
            tokens = self._full_share * tokens + self._sliding_share * seen
        decode_s = self._kv_token_s * tokens + self._decode_sequence_s * num_decodes
        if self._mixed_decode_key_s <= self._kv_token_s:
            # rounding keeps order: where a key takes longer to read, any number does
            return decode_s
        key_s = where(
            num_prefills, self._mixed_decode_key_s, self._decode_key_compute_s
        )
        return larger(decode_s, key_s * tokens)

    def steady_decodes(self, num_decodes: int) -> SteadyDecodes | None:
        if self._sliding_share or self._decode_key_compute_s > self._kv_token_s:
            return None
        sequences_s = self._decode_sequence_s * num_decodes
        return self.along(num_decodes, Line(0, sequences_s, self._kv_token_s))

    def prefill_attention_s(
        self,
        num_prefills: Count,
        num_tokens: Count,
        num_context_tokens: Count,
        num_pairs: Count,
    ) -> Seconds:
        if self._sliding_share:
            window, full, sliding = (
                self._window_tokens,
                self._full_share,
                self._sliding_share,
            )
            seen_pairs = smaller(num_pairs, num_tokens * window)
            # a chunk reaches back one window from its first token
            seen = smaller(num_context_tokens, num_prefills * window + num_tokens)
            num_pairs = full * num_pairs + sliding * seen_pairs
            num_context_tokens = full * num_context_tokens + sliding * seen
        compute_s = self._pair_s * (
            num_pairs + self.prefill_tile_tokens * num_context_tokens
        )
        return larger(compute_s, self._kv_token_s * num_context_tokens)

    # -- blocks --------------------------------------------------------------------

    def rest(self, shape: BatchShape, parts: Parts) -> Rest:
        num_loaded, num_stored, num_copied = shape[6:]
        swap_s = 0.0
        if num_loaded or num_stored:
            gemm_s, prefill_s, decode_s, head_s, allreduce_s, _, kernels_s = parts
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            swap_s = self._swaps.exposed_s(num_loaded, num_stored, gpu_s)
        return swap_s, self.copy_part_s(num_copied), False, 0.0, 0.0
