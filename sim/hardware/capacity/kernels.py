"""Kernels' demands on the pool: states inside prompts, and the sizes of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict

from sim.errors import CapacityError
from sim.hardware.capacity import constants
from sim.hardware.models.layers import GatedDeltaNetShape

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

GDN_PREFILL_BACKENDS: Final = ("flashinfer", "triton", "cutedsl")
"""Kernels of gated delta nets in prompts, by vLLM's ``gdn_prefill_backend``."""
FIRST_MAMBA2_CHECKPOINT_MINOR: Final = 32
"""Source: vLLM 0.31.0 and 0.32.0, ``model_executor/layers/mamba/mamba_mixer2.py``."""
FIRST_DELTA_NET_CHECKPOINT_MINOR: Final = 33
"""Source: vLLM 0.32.0 and 0.33.0, ``layers/mamba/gdn/qwen_gdn_linear_attn.py``."""

_HOPPER: Final = frozenset({"h100", "h200", "h20"})
_BLACKWELL_DATA_CENTRE: Final = frozenset({"b200", "b300", "gb200", "gb300"})
_BLACKWELL: Final = _BLACKWELL_DATA_CENTRE | {
    *("rtx_pro_6000", "rtx_5090", "rtx_5080", "rtx_5070_ti", "rtx_5060_ti", "gb10")
}
_BLACKWELL_KEY_HEAD_DIM: Final = 128
_AMD: Final = "mi3"
_SPARSE_BLOCK_SIZE: Final = 64
_LATENT_BLOCK_SIZES: Final = (32, 64)
_FLASHINFER_HEAD_SIZES: Final = frozenset({64, 128, 256})
_WIDEST_FLASH_HEAD: Final = 256
_READS_IMAGES_BOTH_WAYS: Final = frozenset({"gemma3", "gemma4"})


def is_hopper(gpu: GpuSpec) -> bool:
    """Whether a GPU is an H100, H200 or H20."""
    return gpu.family in _HOPPER


def is_blackwell(gpu: GpuSpec) -> bool:
    """Whether a GPU is one of the Blackwell generation, card or not."""
    return gpu.family in _BLACKWELL


def is_data_centre_blackwell(gpu: GpuSpec) -> bool:
    """Whether a GPU is a B200, B300, GB200 or GB300."""
    return gpu.family in _BLACKWELL_DATA_CENTRE


def is_amd(gpu: GpuSpec) -> bool:
    """Whether a GPU is an Instinct MI300X or one after it."""
    return gpu.family.startswith(_AMD)


def is_hopper_or_later(gpu: GpuSpec) -> bool:
    """Whether a GPU is one of NVIDIA's from 2022 on, but for Ada's."""
    return gpu.family in _HOPPER | _BLACKWELL


def is_linked_hopper_or_later(gpu: GpuSpec) -> bool:
    """Whether a GPU is one of those that NVLink connects, not a card."""
    return gpu.family in _HOPPER | _BLACKWELL_DATA_CENTRE


def attends_by_flashinfer(arguments: EngineArguments) -> bool:
    """Whether FlashInfer's attention is the release's choice.

    It is on Blackwell's data centre GPUs, and for caches of eight bits where
    FlashAttention takes none: before Hopper, and on cards after it.

    Notes
    -----
    Source: vLLM 0.20 to 0.33, ``platforms/cuda.py`` (`_get_backend_priorities`),
    ``v1/attention/backends/fa_utils.py`` (`flash_attn_supports_fp8`).
    """
    model, gpu = arguments.model, arguments.gpu
    sizes = {model.head_dim}
    if model.sliding_heads is not None:
        sizes.add(model.sliding_heads.head_dim)
    takes_heads = sizes <= _FLASHINFER_HEAD_SIZES
    is_latent = model.kv_lora_rank is not None
    if is_latent or not takes_heads or model.model_type in _READS_IMAGES_BOTH_WAYS:
        return False
    if is_data_centre_blackwell(gpu):
        return True
    is_eight_bits = arguments.kv_cache_dtype.startswith("fp8")
    return is_eight_bits and gpu.num_sms is not None and not is_hopper(gpu)


def flashinfer_workspace_bytes(arguments: EngineArguments) -> int:
    """Return what FlashInfer's attention works in; 0 where it is not the choice."""
    if not attends_by_flashinfer(arguments):
        return 0
    model, least = arguments.model, constants.FLASHINFER_WORKSPACE_BYTES
    is_fixed = arguments.engine_minor < constants.FIRST_WIDE_WORKSPACE_MINOR
    if is_fixed or is_data_centre_blackwell(arguments.gpu):
        return least
    heads = model.num_attention_heads // arguments.tensor_parallel_size
    elements = arguments.max_num_batched_tokens * heads * model.head_dim
    return max(least, elements * constants.WIDE_WORKSPACE_ELEMENT_BYTES)


def split_output_bytes(arguments: EngineArguments, num_tokens: int) -> int:
    """Return what FlashAttention 3 cuts the output of a whole graph into; else 0.

    It is the release's choice on Hopper, of latents in 16 bits, too, but not where
    images are read both ways or an indexer chooses keys.

    Notes
    -----
    Source: vLLM 0.29 to 0.33, ``platforms/cuda.py`` (`_get_backend_priorities`),
    ``v1/attention/backends/flash_attn.py`` and ``mla/flashattn_mla.py``.
    """
    model = arguments.model
    is_chosen = is_hopper(arguments.gpu) and model.num_attention_layers > 0
    if model.kv_lora_rank:
        is_chosen &= not model.index_num_heads
        is_chosen &= not arguments.kv_cache_dtype.startswith("fp8")
        widths = [(model.num_attention_heads, model.kv_lora_rank)]
    else:
        heads = [model.attention_heads(), *filter(None, [model.sliding_heads])]
        is_chosen &= model.model_type not in _READS_IMAGES_BOTH_WAYS
        is_chosen &= max(each.head_dim for each in heads) <= _WIDEST_FLASH_HEAD
        widths = [(each.num_attention_heads, each.v_head_dim) for each in heads]
    ranks = arguments.tensor_parallel_size
    width = max(num_heads // ranks * size for num_heads, size in widths)
    return is_chosen * constants.NUM_SPLITS * num_tokens * width * 4


class Checkpoints(TypedDict):
    """Fields of `sim.hardware.models.kv_layers.KVCacheOptions`."""

    prefill_checkpoint: bool
    mamba2_checkpoint: bool


def checkpoint_options(
    model: ModelArchitecture,
    gpu: GpuSpec | None,
    minor: int,
    gdn_prefill_backend: str | None = None,
) -> Checkpoints:
    """Return which kernels can write a state in the middle of a chunk.

    Parameters
    ----------
    model, gpu
        FlashInfer's kernel of gated delta nets can, and is the release's choice where
        it runs; a GPU that is not known is taken for one where it does not.
    minor
        NN of a vLLM release 0.NN.
    gdn_prefill_backend
        The kernel that was asked for; None for the release's choice.

    Raises
    ------
    CapacityError
        If no such kernel is known.

    Notes
    -----
    Source: vLLM 0.33.0, `_resolve_gdn_prefill_backend` of
    ``layers/mamba/gdn/qwen_gdn_linear_attn.py``, for CUDA 13, which its wheels have.
    """
    if gdn_prefill_backend not in {None, *GDN_PREFILL_BACKENDS}:
        raise CapacityError(
            "gdn_prefill_backend must be one of"
            f" {', '.join(GDN_PREFILL_BACKENDS)}; got {gdn_prefill_backend!r}; leave"
            " it out for the release's choice"
        )
    return {
        "prefill_checkpoint": minor >= FIRST_DELTA_NET_CHECKPOINT_MINOR
        and gdn_prefill_backend in {None, "flashinfer"}
        and _runs_flashinfer(model, gpu),
        "mamba2_checkpoint": minor >= FIRST_MAMBA2_CHECKPOINT_MINOR,
    }


def _runs_flashinfer(model: ModelArchitecture, gpu: GpuSpec | None) -> bool:
    shape = model.state_shape
    if gpu is None or not isinstance(shape, GatedDeltaNetShape):
        return False
    is_narrow = shape.key_head_dim == _BLACKWELL_KEY_HEAD_DIM
    return gpu.family in _HOPPER or (gpu.family in _BLACKWELL and is_narrow)


def block_size_warnings(arguments: EngineArguments) -> tuple[str, ...]:
    """Say so if the release's kernels do not take blocks of the size that was given.

    Notes
    -----
    Source: vLLM 0.33.0, ``v1/attention/backends/mla/indexer.py`` and
    ``flashinfer_mla.py`` (`get_supported_kernel_block_sizes`).
    """
    model, family, size = arguments.model, arguments.gpu.family, arguments.block_size
    sizes: tuple[int, ...] = ()
    if model.index_num_heads and not is_amd(arguments.gpu):
        sizes = (_SPARSE_BLOCK_SIZE,)
    elif model.kv_lora_rank and family in _BLACKWELL_DATA_CENTRE:
        sizes = _LATENT_BLOCK_SIZES
    if not sizes or size in sizes:
        return ()
    taken = " or ".join(map(str, sizes))
    return (
        f"block_size: the release's kernels of {model.name} take blocks of {taken} "
        f"tokens on {arguments.gpu.name}, which it chooses by itself; here they have "
        f"{size}, set it to {sizes[0]}",
    )
