"""GPU datasheet times model architecture: seconds of a step without a calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from sim.costs.base import DecodeEnds  # noqa: TC001 - `sim.config.plug` resolves
from sim.costs.experts.exchange import Exchange, rank_tokens
from sim.costs.experts.routed import RoutedExperts
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
from sim.costs.rates.collectives import all_reduce_s
from sim.costs.rates.efficiencies import WeightProduct
from sim.costs.rates.unpacking import unpacked_bytes_per_s
from sim.costs.roofline.cascade_rule import ReadsOnce
from sim.costs.roofline.graphs import padded, pieces_s
from sim.costs.roofline.mixture import Mixture  # noqa: TC001 - `sim.config.plug` resolves them
from sim.costs.roofline.parameters import RooflineParameters
from sim.costs.roofline.volumes import (
    NO_GEMM,
    Volume,
    decode_key_flops,
    elementwise_elements,
    is_mixture,
    mixed_layers,
    multiplies_fp8,
    own_flops_per_s,
    pair_flops,
    state_layers,
)
from sim.costs.transfers import Batch, ByPageSize, CopyKernel, Loop, Swapping, pages_of
from sim.hardware.interconnects import Interconnect  # noqa: TC001 - see above
from sim.hardware.models.architecture import dtype_bytes
from sim.hardware.models.quantization import quantization_scheme
from sim.hardware.models.weights import weight_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.parts import Parts, Rest
    from sim.costs.transfers import Pages, Transfer
    from sim.hardware.models.quantization import QuantizationScheme
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.generation import KvLayout, SwapVariant


def _derived() -> Any:
    """Declare a constant that ``__post_init__`` computes, in seconds."""
    return field(init=False, repr=False, default=0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class RooflineCost(RooflineParameters, ReadsOnce, FormulaCost):
    """Seconds of a step from bytes over bandwidth and FLOPs over peak.

    ::

        T = num_decodes + num_prefill_tokens      R = num_decodes + num_prefills
        soft(a, b) = sqrt(a² + b²), or its fourth order; volumes are those of one rank

        gemm_s               soft(weight and activation bytes / bandwidth,
                                  2 · parameters · T / peak)
                             + the same for the experts that T tokens touch
        decode_attention_s   KV bytes / bandwidth + sequences · KV heads · overhead,
                             at least FLOPs / peak; see below for mixed batches
        prefill_attention_s  4 · heads · head_dim · layers / peak
                             · (pairs + prefill_tile_tokens · context),
                             at least KV bytes / bandwidth
        head_s               soft(head bytes / bandwidth, 2 · head · R / peak)
                             + sampler passes over R · vocabulary logits, filters
        allreduce_s          2 · layers · seconds by size and link; see
                             `sim.costs.rates.collectives`
        swap_s               by variant, each way; see `sim.costs.transfers`
        copy_s               fixed + 2 · bytes / bandwidth
        host_s               host, requests, latency of kernels, element-wise kernels

    The soft maximum replaces the sharp one for GEMMs: near the ridge both limits
    bind, and measured times lie 15 % (h100) to 50 % (a100) above the sharp maximum.

    Of E experts, T tokens that choose k each freely touch ``E · (1 - (1 - k/E)^T)`` on
    average; routers prefer some, and `moe_routing_correlation` says how many fewer
    these are (`sim.costs.experts.routed.touched_alike`).

    A decode in a batch with prefill chunks costs more where the attention kernel is
    FlashAttention 2 (`mixed_decode_tile_tokens`): its queries are padded to a tile of
    which one row is used, and every query head reads the KV again.

    A model whose layers are of several kinds has a term for each: a window or a chunk
    bounds what its layers read and multiply, layers with a state read and write it once
    a sequence and scan prompts; see `sim.costs.roofline.mixture`.

    Not modelled: skewed contexts, tiles, power limits, collectives of embedding, head.

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

    _dense: WeightProduct = field(init=False, repr=False)
    experts: RoutedExperts | None = field(init=False, repr=False, default=None)
    _kv_token_s: float = _derived()
    _decode_key_compute_s: float = _derived()
    _decode_sequence_s: float = _derived()
    _mixed_decode_key_s: float = _derived()
    _pair_s: float = _derived()
    _window_tokens: int = _derived()
    _is_bounded: bool = field(init=False, repr=False, default=False)
    mixture: Mixture | None = field(init=False, repr=False, default=None)
    _head: WeightProduct = field(init=False, repr=False)
    _sampler_row_s: float = _derived()
    _num_collectives: int = _derived()
    _link: Interconnect = field(init=False, repr=False)
    _exchange: Exchange = field(init=False, repr=False)
    _block_bytes: float = _derived()
    _swaps: Swapping = field(init=False, repr=False)
    _copy_block_s: float = _derived()
    _kernels_s: float = _derived()
    _elementwise_token_s: float = _derived()
    _token_parts: Memo[tuple[float, float, float]] = field(
        init=False, repr=False, default_factory=Memo
    )
    kept_ends: Memo[DecodeEnds] = field(
        init=False, repr=False, compare=False, default_factory=Memo
    )
    _row_parts: Memo[tuple[float, float]] = field(
        init=False, repr=False, default_factory=Memo
    )
    _reading: Memo[RooflineCost] = field(init=False, repr=False, default_factory=Memo)

    # -- the datasheet times the architecture, in seconds a unit -------------------

    def __post_init__(self) -> None:
        self.check()
        self._derive_gemm()
        self._derive_attention()
        self._derive_head()
        self._derive_collectives()
        self._derive_copies()
        self._derive_host()

    def _bandwidth(self, efficiency: float) -> float:
        return self.gpu.memory_bandwidth_bytes_per_s * efficiency

    def _peak(self, efficiency: float) -> float:
        # float32 runs on TF32 units at best, at half the rate of bf16
        halves = dtype_bytes(self.model.dtype) // 2
        return self.gpu.bf16_flops_per_s * efficiency / halves

    def _derive_gemm(self) -> None:
        scheme = quantization_scheme(self.model.quantization)
        products = self.products(has_fp8=multiplies_fp8(scheme, self.gpu))
        bandwidth = self._bandwidth(products.bandwidth)
        dense, experts = Volume(), Volume()
        tp, ranks = self.tensor_parallel_size, self.expert_ranks()
        for tensor in weight_tensors(self.model, tp, experts=ranks):
            volume = experts if tensor.num_groups > 1 else dense
            if tensor.role not in NO_GEMM:
                volume.add(tensor, self.model, scheme)
        itemsize = dtype_bytes(self.model.dtype)
        unpacked = unpacked_bytes_per_s(scheme, self.gpu)
        self._dense = WeightProduct(
            dense.read_s(bandwidth, unpacked),
            dense.activations * itemsize / bandwidth,
            self._compute_s(
                dense,
                scheme,
                self.products().compute,
                self.products(has_fp8=True).compute,
            ),
            products.sharpness,
        )
        if not experts.elements:
            return
        held, _ = ranks.of(self.model, tp)
        chosen = self.model.num_experts_per_tok / held
        reached = self.reached()
        bandwidth = self._bandwidth(reached["moe_bandwidth_efficiency"])
        compute = reached["moe_compute_efficiency"]
        traffic = experts.activations * chosen * itemsize
        expert_s = experts.bytes / held / bandwidth
        experts.scale_elements(chosen)
        self.experts = RoutedExperts(
            self.model.num_experts,
            self.model.num_experts_per_tok,
            tp * self.data_parallel_size,
            self.enable_expert_parallel,
            expert_s,
            traffic / bandwidth,
            self._compute_s(experts, scheme, compute, compute),
            self.model.num_moe_layers * reached["moe_layer_latency_s"],
            self.moe_routing_correlation,
        )

    def _compute_s(
        self,
        volume: Volume,
        scheme: QuantizationScheme | None,
        plain: float,
        quantised: float,
    ) -> float:
        """Return seconds to multiply one token, each tensor in its own precision."""
        units = own_flops_per_s(scheme, self.gpu)
        # weights alone are quantised: the kernel multiplies in bf16
        peak = self._peak(plain) if units is None else units * quantised
        seconds = 2.0 * volume.quantised_elements / peak
        return seconds + 2.0 * volume.plain_elements / self._peak(plain)

    def _derive_attention(self) -> None:
        model, tp = self.model, self.tensor_parallel_size
        itemsize = self.kv_itemsize_bytes()
        reached = self.reached()
        of_16_bits = reached["decode_bandwidth_efficiency"]
        of_8_bits = reached["fp8_decode_bandwidth_efficiency"]
        efficiency = of_8_bits if itemsize == 1 else of_16_bits
        peak = self._peak(self.prefill_attention_efficiency)
        bandwidth = self._bandwidth(efficiency)
        if is_mixture(model):
            self._is_bounded = True
            memory = self._bandwidth(of_16_bits)
            states = state_layers(model, tp, bandwidth=memory, peak=self._peak(1.0))
            self.mixture = mixed_layers(self, states, bandwidth, peak)
            return
        layers = model.num_attention_layers
        kv_token_bytes = layers * model.kv_bytes_per_layer(tp, itemsize)
        self._kv_token_s = kv_token_bytes / bandwidth
        # MLA has one latent for all heads
        kv_heads = 1 if model.kv_lora_rank else model.kv_heads_per_rank(tp)
        self._decode_sequence_s = layers * kv_heads * self.decode_sequence_head_s
        self._pair_s = layers * pair_flops(model, tp) / peak
        self._decode_key_compute_s = layers * decode_key_flops(model, tp) / peak
        self._mixed_decode_key_s = max(
            self._decode_key_compute_s, self._pair_s * self.mixed_tile_tokens()
        )
        self._is_bounded = bool(model.num_sliding_layers)
        self._window_tokens = model.sliding_window or 0

    def _derive_head(self) -> None:
        model = self.model
        rows = -(-model.vocab_size // self.tensor_parallel_size)
        itemsize = dtype_bytes(model.dtype)
        products = self.products()
        bandwidth = self._bandwidth(products.bandwidth)
        elements = rows * model.hidden_size
        self._head = WeightProduct(
            elements * itemsize / bandwidth,
            (rows + model.hidden_size) * itemsize / bandwidth,
            2.0 * elements / self._peak(products.compute),
            products.sharpness,
        )
        # every rank gathers all logits and samples
        sampled_bytes = model.vocab_size * self.sampler_bytes_per_logit
        self._sampler_row_s = sampled_bytes / self.gpu.memory_bandwidth_bytes_per_s

    def _derive_collectives(self) -> None:
        self._exchange, self._link = self.exchange(), self.link()
        model = self.model  # one behind each mixer of tokens, one behind each MLP
        self._num_collectives = (
            model.num_attention_layers + model.num_state_layers + model.num_mlps
        )

    def _derive_copies(self) -> None:
        # every rank moves its own heads over its own link
        token_bytes = self.model.kv_bytes_per_token(
            self.tensor_parallel_size, self.kv_itemsize_bytes()
        )
        self._block_bytes = token_bytes * self.block_size
        self._swaps = self.swapping()
        self._copy_block_s = (
            2.0 * self.copied_bytes / self._bandwidth(self.copy_efficiency)
        )

    @property
    def copied_bytes(self) -> float:
        """Bytes that copying a block on the GPU reads."""
        return self.copied_block_bytes or self._block_bytes

    def block_pages(self, layout: KvLayout | None = None) -> Pages:
        layout = layout or self.swapping_rule().layout
        return pages_of(self.model, layout, self._block_bytes)

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        """Return the price of moving blocks by a variant; None: the engine's layout."""
        pages, fixed_s = self.block_pages(layout), self.swap_fixed_s
        link = self.gpu.host_bytes_per_s * self.swap_efficiency
        if variant == "loop":
            return Loop(pages, fixed_s, self.swap_call_s, link)
        reached = self.gpu.host_bytes_per_s * self.swap_kernel_efficiency
        kernel = CopyKernel(pages, fixed_s, reached)
        if variant == "kernel":
            return kernel
        batch = Batch(pages, fixed_s, self.swap_descriptor_s, self.swap_dma_s, link)
        return ByPageSize(pages, kernel, batch) if load else batch

    def swapping(self) -> Swapping:
        """Return the times that swaps add to a step, from the datasheet."""
        rule = self.swapping_rule()
        return Swapping(
            self.transfer(rule.variant, load=True),
            self.transfer(rule.variant, load=False),
            rule.overlap,
            self.swap_step_factor,
            self.swap_transfer_factor,
        )

    def copy_part_s(self, num_blocks: int) -> float:
        copied_s = self.copy_fixed_s + self._copy_block_s * num_blocks
        return copied_s if num_blocks else 0.0

    def _derive_host(self) -> None:
        model, tp = self.model, self.tensor_parallel_size
        self._kernels_s = model.num_hidden_layers * self.layer_latency_s
        self._kernels_s += model.num_qk_norms * self.qk_norm_latency_s
        bandwidth = self._bandwidth(self.elementwise_bandwidth_efficiency)
        traffic = elementwise_elements(model, tp) * dtype_bytes(model.dtype)
        self._elementwise_token_s = model.num_hidden_layers * traffic / bandwidth

    # -- what counts decide ------------------------------------------------------

    def counted(
        self, num_decodes: Count, num_prefills: Count, num_prefill_tokens: Count
    ) -> tuple[Seconds, Seconds, Seconds, Seconds, Seconds]:
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        if num_tokens.__class__ is ndarray:
            of_tokens: Any = looked_up(self._token_parts, self.token_parts, num_tokens)
            of_rows: Any = looked_up(self._row_parts, self.row_parts, num_rows)
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
            computed = padded(self.graph_sizes, num_tokens)
            kernels_s = self._kernels_s + pieces_s(self, num_tokens)
            parts = (
                self._dense.seconds(computed) + self._experts_s(num_tokens),
                self._allreduce_s(computed),
                kernels_s + self._elementwise_token_s * computed,
            )
        return self._token_parts.keep(num_tokens, parts)

    def _allreduce_s(self, num_tokens: int) -> float:
        if self.tensor_parallel_size == 1:
            return 0.0
        message = num_tokens * self.model.hidden_size * dtype_bytes(self.model.dtype)
        one_s = all_reduce_s(self._link, self.tensor_parallel_size, message)
        return self._num_collectives * one_s

    def _experts_s(self, num_tokens: int) -> float:
        # tokens that fill a graph up are all alike, and choose the same experts
        if self.experts is None or self.data_parallel_size > 1:
            return 0.0
        return self.experts.seconds(num_tokens)

    def together(self, shapes: Sequence[BatchShape]) -> tuple[float, float]:
        """Return seconds of experts and of exchanges for the batches of all ranks.

        Steps of data-parallel ranks leave them out: they are as long for each, see
        `sim.costs.steps.lock_step`.
        """
        if self.experts is None:
            return 0.0, 0.0
        num_tokens, most_tokens = rank_tokens(shapes)
        one_s = self._exchange.seconds(num_tokens, most_tokens)
        return self.experts.seconds(num_tokens), self.model.num_moe_layers * one_s

    def expert_spread_s(self, num_tokens: int) -> float:
        """Return by how much the choice of experts moves nine steps of ten."""
        if self.experts is None:
            return 0.0
        return self.experts.spread_s(num_tokens, self.model.num_moe_layers)

    def row_parts(self, num_rows: int) -> tuple[float, float]:
        """Return seconds of the head and of the host for so many requests."""
        kept = self._row_parts.get(num_rows)
        if kept is not None:
            return kept
        head_s = sum(self.head_parts(num_rows))
        host_s = self.step_overhead_s + self.added_request_s() * num_rows
        return self._row_parts.keep(num_rows, (head_s, host_s))

    def host_part_s(self, num_rows: int) -> float:
        """Return how long the host works on a batch of so many requests."""
        return self.row_parts(num_rows)[1]

    def head_parts(self, num_rows: int) -> tuple[float, float]:
        """Return seconds of the output projection and of the sampler."""
        sampler_s = self._sampler_row_s * num_rows + self.filter_s(num_rows)
        return self._head.seconds(num_rows), sampler_s

    # -- attention -----------------------------------------------------------------

    def decode_attention_s(
        self, num_decodes: Count, num_context_tokens: Count, num_prefills: Count
    ) -> Seconds:
        tokens = num_context_tokens
        if self._is_bounded:
            if self.mixture is not None:
                return self.mixture.decode_s(num_decodes, tokens, num_prefills)
            tokens = smaller(tokens, num_decodes * self._window_tokens)
        decode_s = self._kv_token_s * tokens + self._decode_sequence_s * num_decodes
        if self._mixed_decode_key_s <= self._kv_token_s:
            # rounding keeps order: where a key takes longer to read, any number does
            return decode_s
        mixed_s, alone_s = self._mixed_decode_key_s, self._decode_key_compute_s
        if num_prefills.__class__ is ndarray:
            return larger(decode_s, where(num_prefills, mixed_s, alone_s) * tokens)
        compute_s = (mixed_s if num_prefills else alone_s) * tokens
        return decode_s if decode_s > compute_s else compute_s

    def steady_decodes(self, num_decodes: int) -> SteadyDecodes | None:
        if self.mixture is not None:
            lines = self.mixture.steady(num_decodes)
            return self.along(num_decodes, lines) if lines else None
        if self._is_bounded or self._decode_key_compute_s > self._kv_token_s:
            return None
        return self.along(num_decodes, [self.decode_line(num_decodes)])

    def decode_line(self, num_decodes: int) -> Line:
        """Return attention of so many decodes alone, where reading bounds it."""
        return Line(0, self._decode_sequence_s * num_decodes, self._kv_token_s)

    def prefill_attention_s(
        self,
        num_prefills: Count,
        num_tokens: Count,
        num_context_tokens: Count,
        num_pairs: Count,
    ) -> Seconds:
        if self._is_bounded:
            if self.mixture is not None:
                return self.mixture.prefill_s(
                    num_prefills, num_tokens, num_context_tokens, num_pairs
                )
            window = self._window_tokens
            num_pairs = smaller(num_pairs, num_tokens * window)
            # a chunk reaches back one window from its first token
            num_context_tokens = smaller(
                num_context_tokens, num_prefills * window + num_tokens
            )
        compute_s = self._pair_s * (
            num_pairs + self.prefill_tile_tokens * num_context_tokens
        )
        read_s = self._kv_token_s * num_context_tokens
        if compute_s.__class__ is ndarray:
            return larger(compute_s, read_s)
        return compute_s if compute_s > read_s else read_s

    # -- blocks --------------------------------------------------------------------

    def rest(self, shape: BatchShape, parts: Parts) -> Rest:
        num_loaded, num_stored, num_copied = shape[6:]
        swap_s = 0.0
        if num_loaded or num_stored:
            gemm_s, prefill_s, decode_s, head_s, allreduce_s, _, kernels_s = parts
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            swap_s = self._swaps.exposed_s(num_loaded, num_stored, gpu_s)
        return swap_s, self.copy_part_s(num_copied), False, 0.0, 0.0
