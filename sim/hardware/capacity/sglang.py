"""How many token slots SGLang makes: its own memory rule.

::

    before = free memory once processes have met, before weights are loaded
    after  = before - weights
    slots  = (after - before * (1 - mem_fraction_static)) / bytes of a token

It profiles no step: `mem_fraction_static` leaves room for activations and graphs.

Source: SGLang 0.5.9, ``server_args.py`` (`_handle_gpu_memory_settings`),
``model_executor/model_runner_kv_cache_mixin.py``; 0.5.10 to 0.5.23, the same or
``arg_groups/memory_hook.py``, ``cuda_graph_hook.py``,
``mem_cache/kv_cache_configurator.py``. From 0.5.16 on a pool may be sized by what
graphs leave, where ``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING`` is set, which is not built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from sim.hardware.capacity.kernels import is_amd
from sim.hardware.capacity.parts import MemoryParts, memory_parts
from sim.hardware.capacity.pool import LEAST_BLOCKS, groups_of
from sim.hardware.capacity.sglang_windows import WindowPools, window_pools
from sim.hardware.gpus import GIB

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

_VERSION = re.compile(r"0\.5\.(9|1[0-2]|19|2[0-3])(\.post\d{1,2})?")
_FIRST_PROMPT_GRAPHS: Final = 10
_FIRST_INDEXED_PROMPT_GRAPHS: Final = 13
_FIRST_WITHOUT_ABSENT_GRAPHS: Final = 15
_FIRST_LARGE_ON_SMALL_CARDS: Final = 20
_FIRST_GRAPHS_OF_REQUESTS: Final = 22
"""Releases 0.5.N from which graphs of prompts are kept room for; those of models with
an indexer; none where graphs are off; more on cards of up to 35 GiB; and no more for
decodes than `max_running_requests`."""
_MIB: Final = 2**20
CONTEXT_GIB: Final = 1.2
MARGIN_GIB: Final = 0.5
"""Memory of a GPU in use before the weights: 0.8 to 1.6 GiB in three published logs."""
CONSTANTS_SOURCE: Final = "SGLang's own rule; CUDA context from three published logs"
MAX_PREFILL_TOKENS: Final = 16_384
AITER_SHARE: Final = 0.85
"""Part of `mem_fraction_static` that counts where AITER, the attention of AMD's GPUs,
serves a `max_model_len` above `_AITER_LONGER_THAN` tokens."""
_AITER_LONGER_THAN: Final = 8192
_AITER_LATENT_HEADS: Final = (16, 128)
"""Query heads of a rank with which AITER attends to latents."""
_DRIVER_MIB: Final = {
    "t4": 15_360,
    "rtx_4090": 24_564,
    "rtx_5090": 32_607,
    "l40s": 46_068,
    "a100_sxm": 81_920,
    "h100_sxm": 81_559,
    "h20": 97_871,
    "h200_sxm": 143_771,
    "b200_sxm": 183_359,
    "mi300x": 196_592,
}
"""``nvidia-smi``'s memory.total."""
_LEAST_REQUESTS, _MOST_REQUESTS = 2048, 4096


@dataclass(frozen=True, slots=True)
class Defaults:
    """SGLang's defaults for a card.

    Attributes
    ----------
    chunked_prefill_size
        Prompt tokens of a batch.
    cuda_graph_max_bs
        Requests of the largest decode graph.
    """

    chunked_prefill_size: int
    cuda_graph_max_bs: int


_BY_MIB: Final = (
    (20_480, 2048, 8, 8),
    (35_840, 2048, 24, 80),
    (61_440, 4096, 32, 160),
    (92_160, 8192, 256, 512),
    (163_840, 8192, 256, 512),
)
"""Below so many MiB: chunk, graphs with fewer than 4 ranks, and with more."""
_OF_LARGER: Final = (16_384, 512, 512)
_LATER: Final = {35_840: (4096, 48, 160)}
"""Rows of 0.5.20 and later that differ."""
_PROMPT_GRAPH_MIB: Final = 8
_LATENT_PROMPT_GRAPHS_MIB: Final = 1536
_LLAMA_2_TOKENS: Final = 4096
"""Of a graph of prompts, of all those of latents, and how large Llama 2's are."""


def is_sglang(engine_version: str) -> bool:
    """Whether a release is one of SGLang, not of vLLM."""
    return _VERSION.fullmatch(str(engine_version).strip()[:40]) is not None


def _patch(engine_version: str) -> int:
    """Return N of a release 0.5.N."""
    matched = _VERSION.fullmatch(engine_version.strip()[:40])
    assert matched is not None
    return int(matched[1])


def driver_mib(gpu: GpuSpec) -> float:
    """Return the memory of a card as its driver reports it, in MiB.

    Engines see less of it; what they see stands in for cards that are not listed.
    """
    return _DRIVER_MIB.get(gpu.name, gpu.memory_bytes / _MIB)


def defaults_of(
    memory_mib: float, tensor_parallel_size: int, engine_version: str
) -> Defaults:
    """Return a release's defaults of a card with so much memory."""
    is_later = _patch(engine_version) >= _FIRST_LARGE_ON_SMALL_CARDS
    later = _LATER if is_later else {}
    found = (later.get(row[0], row[1:]) for row in _BY_MIB if memory_mib < row[0])
    chunk, few, many = next(found, _OF_LARGER)
    return Defaults(chunk, few if tensor_parallel_size < 4 else many)


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments from which a release derives a `mem_fraction_static` not given.

    Attributes
    ----------
    chunked_prefill_size
        Prompt tokens of a batch: without chunks `max_prefill_tokens`.
    has_chunks
        Whether prompts are cut.
    max_running_requests
        As given, or None.
    """

    engine_version: str
    model: ModelArchitecture
    gpu: GpuSpec
    tensor_parallel_size: int
    chunked_prefill_size: int
    has_chunks: bool = True
    max_running_requests: int | None = None
    enforce_eager: bool = False

    @property
    def default_fraction(self) -> float:
        """`mem_fraction_static`, of the memory that the driver says."""
        size = driver_mib(self.gpu)
        reserved = 512 + 1.5 * max(self.chunked_prefill_size, 2048)
        reserved += 1024 * self.tensor_parallel_size / 8 + self._graphs_mib(size)
        if size > 61_440:
            reserved = max(reserved, 10_240)
        return round((size - reserved) / size, 3)

    def _graphs_mib(self, memory_mib: float) -> float:
        patch = _patch(self.engine_version)
        if self.enforce_eager and patch >= _FIRST_WITHOUT_ABSENT_GRAPHS:
            return 0
        ranks = self.tensor_parallel_size
        largest = defaults_of(memory_mib, ranks, self.engine_version).cuda_graph_max_bs
        if patch >= _FIRST_GRAPHS_OF_REQUESTS:
            largest = min(largest, self.max_running_requests or largest)
        return 2 * largest + self._prompt_graphs_mib(patch)

    def _prompt_graphs_mib(self, patch: int) -> int:
        """Return what graphs of prompts take, which only NVIDIA's GPUs have."""
        model, first = self.model, _FIRST_PROMPT_GRAPHS
        if model.index_num_heads:
            first = _FIRST_INDEXED_PROMPT_GRAPHS
        if patch < first or is_amd(self.gpu) or model.has_encoder:
            return 0
        if model.kv_lora_rank is not None:
            return _LATENT_PROMPT_GRAPHS_MIB
        largest = self.chunked_prefill_size if self.has_chunks else 0
        if "llama-2" in model.name.lower():
            largest = min(largest, _LLAMA_2_TOKENS)
        return _PROMPT_GRAPH_MIB * _num_prompt_graphs(largest)


def _num_prompt_graphs(most_tokens: int) -> int:
    """Return how many sizes of prompts have a graph, up to so many tokens."""
    sizes = (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, most_tokens + 1, 512),
    )
    return sum(size <= most_tokens for size in sizes)


def most_requests(num_tokens: int, context_len: int, given: int | None) -> int:
    """Return `max_running_requests` of a pool of so many tokens."""
    if given is not None:
        return given
    slots = max(int(num_tokens / context_len * 512), _LEAST_REQUESTS)
    return max(min(slots, _MOST_REQUESTS, num_tokens // 2), 1)


@dataclass(frozen=True, slots=True)
class SglangMemory:
    """The parts of a rank's memory, and the interval of its pages.

    Attributes
    ----------
    arguments
        With the model as its pool holds it, and pages where two pools say how many.
    windows
        Both pools, where there are two.
    """

    total_bytes: int
    parts: MemoryParts
    num_blocks_low: int
    num_blocks_high: int
    arguments: EngineArguments
    windows: WindowPools | None


def sglang_memory(arguments: EngineArguments, engine_version: str) -> SglangMemory:
    """Return the parts of one rank's memory; pages are blocks.

    Raises
    ------
    CapacityError
        For layers with windows or states, whose pools are not built.
    """
    weights = memory_parts(arguments).weights_bytes
    held, windows = window_pools(arguments, _patch(engine_version))
    block_bytes = groups_of(held).layout.bytes_per_block
    total = round(driver_mib(arguments.gpu) * _MIB)
    share = arguments.gpu_memory_utilization
    if _attends_by_aiter(arguments):
        share *= AITER_SHARE

    def parts_with(context_gib: float) -> MemoryParts:
        context = round(context_gib * GIB)
        before = total - context
        left = round(before * (1 - share))
        return MemoryParts(
            requested_bytes=total - left,
            weights_bytes=weights,
            activation_peak_bytes=0,
            non_torch_bytes=context,
            cuda_graph_bytes=0,
            activation_argument="mem_fraction_static",
        )

    def num_pages(available_bytes: int) -> int:
        available_bytes = max(0, available_bytes)
        if windows is None:
            return available_bytes // block_bytes
        return windows.num_pages_in(available_bytes)

    parts, low, high = (
        parts_with(CONTEXT_GIB + side * MARGIN_GIB) for side in (0, 1, -1)
    )
    if windows is not None and held.num_gpu_blocks_override is None:
        given = held.kv_cache_memory_bytes
        size = num_pages(given or parts.available_kv_bytes)
        if size >= LEAST_BLOCKS:  # else that is told of the memory
            held = replace(held, num_gpu_blocks_override=size)
    return SglangMemory(
        total,
        parts,
        num_pages(low.available_kv_bytes),
        num_pages(high.available_kv_bytes),
        held,
        windows,
    )


def _attends_by_aiter(arguments: EngineArguments) -> bool:
    """Whether AITER attends, to sequences that are long.

    Source: SGLang 0.5.9, ``server_args.py`` (`_handle_attention_backend_compatibility`)
    and its defaults of backends; a share that is given is no other.
    """
    model = arguments.model
    longest = arguments.max_model_len or model.max_position_embeddings
    if not is_amd(arguments.gpu) or longest <= _AITER_LONGER_THAN:
        return False
    if model.kv_lora_rank is None:
        return True
    heads = model.num_attention_heads // arguments.tensor_parallel_size
    return heads in _AITER_LATENT_HEADS and not model.index_num_heads


def encoder_warnings(arguments: EngineArguments) -> tuple[str, ...]:
    """Return what is not counted of the default share of a model with an encoder.

    Source: SGLang 0.5.9, ``server_args.py`` (`adjust_mem_fraction_for_vlm`).
    """
    is_own = "gpu_memory_utilization" in arguments.defaults
    if not (is_own and arguments.model.has_encoder):
        return ()
    return (
        "SGLang takes up to a quarter off the default mem_fraction_static of a model "
        "with an encoder, by the size of its tower, which is not built: the pool is "
        "smaller; give mem_fraction_static",
    )


def with_requests(arguments: EngineArguments, num_tokens: int) -> EngineArguments:
    """Return arguments with the limit of requests that follows from the pool."""
    given = arguments.max_num_seqs or None
    longest = arguments.max_model_len or arguments.model.max_position_embeddings
    return replace(arguments, max_num_seqs=most_requests(num_tokens, longest, given))
