"""What the roofline computes once: datasheet times architecture, in seconds a unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sim.costs.roofline_parameters import RooflineParameters
from sim.costs.transfers import (
    Batch,
    ByPageSize,
    CopyKernel,
    Loop,
    Swapping,
    pages_of,
)
from sim.hardware.models.architecture import dtype_bytes
from sim.hardware.models.quantization import quantization_scheme
from sim.hardware.models.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from sim.costs.base import KvLayout, SwapVariant
    from sim.costs.transfers import Pages, Transfer
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.quantization import QuantizationScheme
    from sim.hardware.models.weights import WeightTensor


_NO_GEMM: Final = frozenset(
    {TensorRole.EMBEDDING, TensorRole.SMALL, TensorRole.DERIVED}
)
"""Tensors that are no linear layer of a transformer layer; the head is its own part."""


def _derived() -> Any:
    """Declare a constant that ``__post_init__`` computes, in seconds."""
    return field(init=False, repr=False, default=0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class RooflineConstants(RooflineParameters):
    """Constants of `RooflineCost`, derived from its parameters by the constructor."""

    _weights_s: float = _derived()
    _gemm_token_memory_s: float = _derived()
    _gemm_token_compute_s: float = _derived()
    _num_experts: int = _derived()
    _expert_miss_share: float = _derived()
    _expert_s: float = _derived()
    _expert_token_memory_s: float = _derived()
    _expert_token_compute_s: float = _derived()
    _kv_token_s: float = _derived()
    _decode_key_compute_s: float = _derived()
    _decode_sequence_s: float = _derived()
    _mixed_decode_key_s: float = _derived()
    _pair_s: float = _derived()
    _window_tokens: int = _derived()
    _sliding_share: float = _derived()
    _full_share: float = _derived()
    _head_s: float = _derived()
    _head_row_memory_s: float = _derived()
    _head_row_compute_s: float = _derived()
    _sampler_row_s: float = _derived()
    _collectives_s: float = _derived()
    _collective_token_s: float = _derived()
    _block_bytes: float = _derived()
    _swaps: Swapping = field(init=False, repr=False)
    _copy_block_s: float = _derived()
    _kernels_s: float = _derived()
    _elementwise_token_s: float = _derived()

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

    def _gemm_peak(self, scheme: QuantizationScheme | None, efficiency: float) -> float:
        fp8 = self.gpu.fp8_flops_per_s
        if fp8 is None or scheme is None or not scheme.quantized_activation:
            # weights alone are quantised: the kernel multiplies in bf16
            return self._peak(efficiency)
        ratio = self.fp8_gemm_compute_efficiency / self.gemm_compute_efficiency
        return fp8 * efficiency * ratio

    def _derive_gemm(self) -> None:
        scheme = quantization_scheme(self.model.quantization)
        bandwidth = self._bandwidth(self.gemm_bandwidth_efficiency)
        dense, experts = _Volume(), _Volume()
        for tensor in weight_tensors(self.model, self.tensor_parallel_size):
            volume = experts if tensor.num_groups > 1 else dense
            if tensor.role not in _NO_GEMM:
                volume.add(tensor, _itemsize_bytes(self.model, tensor, scheme))
        itemsize = dtype_bytes(self.model.dtype)
        self._weights_s = dense.bytes / bandwidth
        self._gemm_token_memory_s = dense.activations * itemsize / bandwidth
        peak = self._gemm_peak(scheme, self.gemm_compute_efficiency)
        self._gemm_token_compute_s = 2.0 * dense.elements / peak
        self._num_experts = self.model.num_experts if experts.elements else 0
        if not self._num_experts:
            return
        chosen = self.model.num_experts_per_tok / self._num_experts
        self._expert_miss_share = 1.0 - chosen
        self._expert_s = experts.bytes / self._num_experts / bandwidth
        traffic = experts.activations * chosen * itemsize
        self._expert_token_memory_s = traffic / bandwidth
        peak = self._gemm_peak(scheme, self.moe_compute_efficiency)
        self._expert_token_compute_s = 2.0 * experts.elements * chosen / peak

    def _derive_attention(self) -> None:
        model, tp = self.model, self.tensor_parallel_size
        layers = model.num_hidden_layers
        itemsize = self.kv_itemsize_bytes()
        kv_token_bytes = layers * model.kv_bytes_per_layer(tp, itemsize)
        efficiency = (
            self.fp8_decode_bandwidth_efficiency
            if itemsize == 1
            else self.decode_bandwidth_efficiency
        )
        self._kv_token_s = kv_token_bytes / self._bandwidth(efficiency)
        # MLA has one latent for all heads
        kv_heads = 1 if model.kv_lora_rank else model.kv_heads_per_rank(tp)
        self._decode_sequence_s = layers * kv_heads * self.decode_sequence_head_s
        peak = self._peak(self.prefill_attention_efficiency)
        self._pair_s = layers * _pair_flops(model, tp) / peak
        self._decode_key_compute_s = layers * _decode_key_flops(model, tp) / peak
        self._mixed_decode_key_s = max(
            self._decode_key_compute_s, self._pair_s * self.mixed_tile_tokens()
        )
        if model.sliding_window:
            self._window_tokens = model.sliding_window
            self._sliding_share = model.num_sliding_layers / layers
        self._full_share = 1.0 - self._sliding_share

    def _derive_head(self) -> None:
        model = self.model
        rows = -(-model.vocab_size // self.tensor_parallel_size)
        itemsize = dtype_bytes(model.dtype)
        bandwidth = self._bandwidth(self.gemm_bandwidth_efficiency)
        elements = rows * model.hidden_size
        self._head_s = elements * itemsize / bandwidth
        self._head_row_memory_s = (rows + model.hidden_size) * itemsize / bandwidth
        peak = self._peak(self.gemm_compute_efficiency)
        self._head_row_compute_s = 2.0 * elements / peak
        # every rank gathers all logits and samples
        sampled_bytes = model.vocab_size * self.sampler_bytes_per_logit
        self._sampler_row_s = sampled_bytes / self.gpu.memory_bandwidth_bytes_per_s

    def _derive_collectives(self) -> None:
        tp = self.tensor_parallel_size
        if tp == 1:
            return
        count = 2 * self.model.num_hidden_layers
        ring_bytes = (
            2.0 * (tp - 1) / tp * self.model.hidden_size * dtype_bytes(self.model.dtype)
        )
        link = self.gpu.interconnect_bytes_per_s * self.allreduce_efficiency
        self._collectives_s = count * self.allreduce_latency_s
        self._collective_token_s = count * ring_bytes / link

    def _derive_copies(self) -> None:
        model, tp = self.model, self.tensor_parallel_size
        layers = model.num_hidden_layers
        per_layer = model.kv_bytes_per_layer(tp, self.kv_itemsize_bytes())
        # every rank moves its own heads over its own link
        self._block_bytes = layers * per_layer * self.block_size
        self._swaps = self.swapping()
        self._copy_block_s = (
            2.0 * self._block_bytes / self._bandwidth(self.copy_efficiency)
        )

    def block_pages(self, layout: KvLayout | None = None) -> Pages:
        """Return how a block lies in memory on one rank; None: as the engine has it."""
        layout = layout or self.swapping_rule().layout
        return pages_of(self.model, layout, self._block_bytes)

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        """Return the price of moving blocks by a variant, from the datasheet.

        Parameters
        ----------
        variant
            How they move.
        load
            To the GPU rather than to the host.
        layout
            How a block lies in memory; None: as the engine has it.
        """
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
        """Return what swaps add to a step, from the datasheet."""
        rule = self.swapping_rule()
        return Swapping(
            self.transfer(rule.variant, load=True),
            self.transfer(rule.variant, load=False),
            rule.overlap,
            self.swap_step_factor,
            self.swap_transfer_factor,
        )

    def copy_part_s(self, num_blocks: int) -> float:
        """Return seconds of copies on the GPU, none for no block."""
        if not num_blocks:
            return 0.0
        return self.copy_fixed_s + self._copy_block_s * num_blocks

    def _derive_host(self) -> None:
        model, tp = self.model, self.tensor_parallel_size
        self._kernels_s = model.num_hidden_layers * self.layer_latency_s
        bandwidth = self._bandwidth(self.elementwise_bandwidth_efficiency)
        traffic = _elementwise_elements(model, tp) * dtype_bytes(model.dtype)
        self._elementwise_token_s = model.num_hidden_layers * traffic / bandwidth


class _Volume:
    """What the GEMMs of some tensors read and multiply on one rank."""

    __slots__ = ("activations", "bytes", "elements")

    def __init__(self) -> None:
        self.elements = 0
        self.bytes = 0.0
        self.activations = 0
        """Elements that a token reads and writes."""

    def add(self, tensor: WeightTensor, itemsize_bytes: float) -> None:
        elements = tensor.num_elements * tensor.count
        self.elements += elements
        self.bytes += elements * itemsize_bytes
        width = (tensor.rows + tensor.columns) * tensor.num_groups
        self.activations += width * tensor.count


def _itemsize_bytes(
    model: ModelArchitecture, tensor: WeightTensor, scheme: QuantizationScheme | None
) -> float:
    """Return bytes of an element of a linear layer, scales included."""
    if scheme is None or (scheme.only_experts and tensor.num_groups == 1):
        return dtype_bytes(model.dtype)
    scales = scheme.scale_bytes / (scheme.group_size or tensor.columns)
    return scheme.weight_bits / 8 + scales


def _pair_flops(model: ModelArchitecture, tensor_parallel_size: int) -> float:
    """Return FLOPs of a query-key pair in one layer on one rank."""
    heads = model.num_attention_heads / tensor_parallel_size
    if model.kv_lora_rank:
        key_width = model.qk_nope_head_dim + model.qk_rope_head_dim
        return 2.0 * heads * (key_width + model.v_head_dim)
    return 4.0 * heads * model.head_dim


def _decode_key_flops(model: ModelArchitecture, tensor_parallel_size: int) -> float:
    """Return FLOPs of a key of a decode: MLA attends to the latent itself."""
    if not model.kv_lora_rank:
        return _pair_flops(model, tensor_parallel_size)
    heads = model.num_attention_heads / tensor_parallel_size
    return 2.0 * heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim)


def _elementwise_elements(model: ModelArchitecture, tensor_parallel_size: int) -> float:
    """Return elements that a token reads and writes outside GEMM and attention.

    In one layer on one rank: two residual norms (two reads and two writes each),
    rotary embedding in place, the write of the KV cache, the gated activation (two
    reads, one write).
    """
    tp = tensor_parallel_size
    query = model.num_attention_heads / tp * model.head_dim
    key = model.kv_heads_per_rank(tp) * model.head_dim
    inner: float = model.intermediate_size
    if model.num_experts:
        inner = model.num_experts_per_tok * model.expert_size
    return 8.0 * model.hidden_size + 2.0 * (query + key) + 4.0 * key + 3.0 * inner / tp
