"""Engine arguments of the capacity estimate: what is refused, and the defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sim.errors import CapacityError
from sim.hardware.capacity import constants
from sim.hardware.models.architecture import (
    KV_CACHE_DTYPE_BYTES,
    ModelArchitecture,
    dtype_bytes,
)
from sim.hardware.models.kv_layers import PACKED_KV_CACHE_DTYPES
from sim.hardware.models.layers import STATE_DTYPES
from sim.hardware.models.quantization import quantization_scheme
from sim.hardware.models.stages import model_of_stage
from sim.hardware.models.weights import WITHIN_TENSOR_RANKS, ExpertRanks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.drafters import Drafter

_VERSION = re.compile(r"v?0\.(\d+)(?:\.(\d+))?(?:\.\d+)*(?:[.+a-z-].*)?")
MOST_BLOCKS = 2**31 - 1
"""Engines number blocks in 32 bits."""
MOST_BYTES = 2**50
MOST_GIB = 10.0**6


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Arguments of one engine, checked, with the release's defaults filled in."""

    model: ModelArchitecture
    gpu: GpuSpec
    engine_minor: int
    engine_patch: int
    """Last N of 0.NN.N; the largest where only 0.NN is said."""
    tensor_parallel_size: int
    block_size: int
    gpu_memory_utilization: float
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    max_model_len: int | None
    """None where the pool decides."""
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    weights_gib: float | None
    swap_space: float
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    disable_hybrid_kv_cache_manager: bool = False
    swa_full_tokens_ratio: float | None = None
    """Of SGLang; None for its default."""
    has_chunks: bool = True
    """Whether SGLang cuts prompts."""
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    gdn_prefill_backend: str | None = None
    prefix_match_unit: int | None = None
    use_flashinfer_sampler: bool | None = None
    warm_compile_cache: bool = False
    num_speculative_tokens: int = 0
    drafter: Drafter | None = None
    experts: ExpertRanks = WITHIN_TENSOR_RANKS
    pipeline_parallel_size: int = 1
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """None for the release's."""
    stage: int = 0
    """Of the pipeline, from 0: the stage that the memory is of."""
    defaults: tuple[str, ...] = field(default=())
    """Names of the arguments that are at the release's defaults."""

    @property
    def is_v1(self) -> bool:
        return self.engine_minor >= constants.FIRST_V1_MINOR

    @property
    def era(self) -> constants.EngineEra:
        return constants.era_of(self.engine_minor, self.engine_patch)

    @property
    def may_sample_by_flashinfer(self) -> bool:
        """Whether the release samples by FlashInfer where that is installed."""
        release = self.engine_minor, self.engine_patch
        first, last = constants.FIRST_FLASHINFER_IMAGE, constants.LAST_FLASHINFER_IMAGE
        return first <= release <= last

    @property
    def constants_source(self) -> str:
        """Where the release's constants come from, and which patch they are of."""
        minor, patch = constants.LAST_FLASHINFER_IMAGE
        if (self.engine_minor, self.engine_patch) != (minor, constants.LAST_PATCH):
            return self.era.source
        first = f"0.{minor}.{patch}"
        return (
            f"{self.era.source}; 0.{minor} is its last patch, which sorts where {first}"
            f" samples by FlashInfer and leaves more blocks: name {first} if it is that"
        )

    @property
    def has_second_model_runner(self) -> bool:
        """Whether the release's second model runner serves the model."""
        return self._has_runner_for_drafts and (
            self._is_served_early
            or any(
                self.engine_minor >= first and self._is_served(model_types)
                for first, model_types in constants.SECOND_RUNNER_MODEL_TYPES
            )
        )

    def _is_served(self, model_types: frozenset[str] | None) -> bool:
        model = self.model
        is_plain = not (model.num_experts or model.state_shape)
        return is_plain or model_types is None or model.model_type in model_types

    @property
    def _is_served_early(self) -> bool:
        model_types = constants.EARLY_SECOND_RUNNER_MODEL_TYPES
        return (
            self.engine_minor >= constants.FIRST_SECOND_RUNNER_MINOR
            and self.model.model_type in model_types
            and not self.quantization
        )

    @property
    def _has_runner_for_drafts(self) -> bool:
        if not self.num_speculative_tokens:
            return True
        first = constants.FIRST_SECOND_RUNNER_NGRAMS_MINOR
        if self.drafter is not None:
            first = constants.FIRST_SECOND_RUNNER_DRAFTERS_MINOR
            if self.drafter.is_head:
                first = constants.FIRST_SECOND_RUNNER_HEADS_MINOR
        return self.engine_minor >= first

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def num_steps_in_flight(self) -> int:
        """Steps whose tokens windows are sized for."""
        if self.engine_minor < constants.FIRST_IN_FLIGHT_MINOR:
            return 1
        return self.pipeline_parallel_size + self.async_scheduling

    @property
    def of_stage(self) -> EngineArguments:
        """The same of the stage's layers alone."""
        if self.pipeline_parallel_size == 1:
            return self
        model = model_of_stage(self.model, self.pipeline_parallel_size, self.stage)
        return replace(self, model=model)

    @property
    def itemsize_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def kv_itemsize_bytes(self) -> int:
        """Bytes of a cached element; a packed one is refused."""
        if self.kv_cache_dtype in KV_CACHE_DTYPE_BYTES:
            return KV_CACHE_DTYPE_BYTES[self.kv_cache_dtype]
        return dtype_bytes(self.kv_cache_dtype)  # the model's own, as "half"


def parse_engine_version(engine_version: str) -> int:
    """Return NN of a vLLM release ``0.NN`` or ``0.NN.N``."""
    return parse_release(engine_version)[0]


def parse_release(engine_version: str) -> tuple[int, int]:
    """Return NN and N of a vLLM release ``0.NN.N``; of ``0.NN``, its last N."""
    matched = _VERSION.fullmatch(str(engine_version).strip()[:40])
    if matched is None:
        raise CapacityError(
            "engine_version must be a vLLM release such as '0.11' or '0.19.1';"
            f" got {str(engine_version)[:40]!r}"
        )
    minor, last = int(matched[1]), constants.LAST_KNOWN_MINOR
    if minor > last:
        raise CapacityError(
            f"engine_version must be at most 0.{last}, the last release whose defaults"
            f" are known; got {str(engine_version)[:40]!r}: use '0.{last}'"
        )
    return minor, constants.LAST_PATCH if matched[2] is None else int(matched[2])


def resolve_dtypes(
    model: ModelArchitecture,
    dtype: str,
    kv_cache_dtype: str,
    minor: int = constants.LAST_KNOWN_MINOR,
) -> tuple[str, str]:
    """Return the precision of the model and of its KV cache, 'auto' replaced.

    That of the cache is what the checkpoint asks for, in releases that obey, or else
    that of the model.
    """
    dtype = model.dtype if dtype == "auto" else dtype
    dtype_bytes(dtype)
    known = {**KV_CACHE_DTYPE_BYTES, **dict.fromkeys(PACKED_KV_CACHE_DTYPES)}
    if kv_cache_dtype not in {"auto", *known}:
        raise CapacityError(
            f"unknown kv_cache_dtype: {kv_cache_dtype!r}; use 'auto' or one of"
            f" {', '.join(known)}"
        )
    if kv_cache_dtype != "auto":
        return dtype, kv_cache_dtype
    return dtype, (obeyed_kv_cache_dtype(model, minor) or dtype)


def obeyed_kv_cache_dtype(model: ModelArchitecture, minor: int) -> str | None:
    """Return the cache's precision that a checkpoint asks for, if a release obeys."""
    obeys = minor >= constants.FIRST_CHECKPOINT_KV_DTYPE_MINOR
    return model.kv_cache_dtype if obeys else None


def check_state_dtypes(**dtypes: str) -> None:
    """Refuse precisions of states that the engine does not take, by argument."""
    known = ("auto", *STATE_DTYPES)
    for name, dtype in dtypes.items():
        if dtype not in known:
            raise CapacityError(
                f"{name} must be one of {', '.join(known)}; got {str(dtype)[:40]!r}"
            )


def check_prefix_match_unit(unit: int | None, minor: int) -> None:
    """Refuse a unit of hits where the release has none."""
    first = constants.FIRST_PREFIX_MATCH_UNIT_MINOR
    check_positive("prefix_match_unit", unit)
    if unit is not None and minor < first:
        raise CapacityError(
            f"prefix_match_unit exists from 0.{first} on; got engine_version"
            f" 0.{minor}: leave it out, or raise engine_version"
        )


def default_batch(gpu: GpuSpec, minor: int) -> tuple[int, int]:
    """Return the API server's ``max_num_batched_tokens`` and ``max_num_seqs``.

    They grow with the device: GPUs of 70 GiB and more but the A100, and, in releases
    from 0.33, those of 160 GiB and more.
    """
    if gpu.memory_gib < constants.WIDE_MEMORY_GIB or gpu.family == "a100":
        return constants.DEFAULT_BATCH
    very_wide = gpu.memory_gib >= constants.VERY_WIDE_MEMORY_GIB
    if very_wide and minor >= constants.VERY_WIDE_SINCE_MINOR:
        return constants.VERY_WIDE_BATCH
    return constants.WIDE_BATCH


def v0_chunks_by_itself(max_model_len: int, minor: int) -> bool:
    """Whether a V0 release turns chunked prefill on where nothing is said."""
    return (
        minor >= constants.FIRST_V0_CHUNKING_MINOR
        and max_model_len > constants.V0_CHUNKED_PREFILL_ABOVE_TOKENS
    )


def resolve_batch(
    model: ModelArchitecture,
    gpu: GpuSpec,
    minor: int,
    *,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
    max_num_seqs: int | None,
) -> tuple[int, int]:
    """Return ``max_num_batched_tokens`` and ``max_num_seqs`` of the release."""
    if minor >= constants.FIRST_V1_MINOR:
        tokens, seqs = default_batch(gpu, minor)
    else:
        # Without chunked prefill a prompt of the longest length must fit a step.
        longest = max_model_len or model.max_position_embeddings
        least = constants.V0_CHUNKED_BATCHED_TOKENS
        tokens = max(longest, least)
        if minor <= constants.LAST_CACHEFLOW_MINOR:
            tokens = constants.CACHEFLOW_BATCHED_TOKENS
        elif v0_chunks_by_itself(longest, minor):
            tokens = least
        seqs = constants.V0_MAX_NUM_SEQS
    tokens = max_num_batched_tokens or tokens
    seqs = max_num_seqs or min(seqs, tokens)
    if tokens < seqs:
        raise CapacityError(
            "max_num_batched_tokens must be at least max_num_seqs;"
            f" got {tokens} and {seqs}; raise the one or lower the other"
        )
    return tokens, seqs


def check_positive(name: str, value: object, most: int = MOST_BLOCKS) -> None:
    """Refuse anything but None or a positive integer of at most `most`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CapacityError(
            f"{name} must be a positive integer; got {_shown(value)}; leave it out for"
            " the engine's default"
        )
    if value > most:
        raise CapacityError(
            f"{name} must be at most {most}; got {_shown(value)}; lower it"
        )


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > MOST_BYTES:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]


def check_quantity(name: str, value: float | None, *, low: float, high: float) -> None:
    """Refuse a number that is not in (low, high]."""
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low < value <= high:
        raise CapacityError(
            f"{name} must be a number in ({low:g}, {high:g}]; got {_shown(value)}"
        )


def check_numbers(
    counts: Mapping[str, object],
    *,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float | None,
    weights_gib: float | None,
    swap_space: float,
) -> None:
    """Refuse numbers that no engine takes."""
    for name, value in counts.items():
        check_positive(name, value)
    check_positive("kv_cache_memory_bytes", kv_cache_memory_bytes, MOST_BYTES)
    check_quantity("gpu_memory_utilization", gpu_memory_utilization, low=0, high=1)
    check_quantity("weights_gib", weights_gib, low=0, high=MOST_GIB)
    check_quantity("swap_space", swap_space or None, low=0, high=MOST_GIB)


def check_pipeline(model: ModelArchitecture, num_stages: int, minor: int) -> None:
    """Refuse stages without a layer, and pipelines that are not modelled."""
    if num_stages == 1:
        return
    if num_stages > model.num_hidden_layers:
        raise CapacityError(
            f"pipeline_parallel_size must be at most the {model.num_hidden_layers}"
            f" layers of {model.name}; got {num_stages}; lower it"
        )
    if minor < constants.FIRST_V1_MINOR:
        raise CapacityError(
            f"pipelines are modelled for releases from 0.{constants.FIRST_V1_MINOR} on;"
            f" got pipeline_parallel_size {num_stages}; use 1 and a larger"
            " tensor_parallel_size"
        )


def check_expert_blocks(
    model: ModelArchitecture,
    quantization: str | None,
    tp: int,
    experts: ExpertRanks,
    minor: int,
) -> None:
    """Refuse parts of experts that end within a block of FP8 scales, as releases do."""
    is_old = (
        constants.FIRST_V1_MINOR <= minor <= constants.LAST_WHOLE_SCALE_BLOCKS_MINOR
    )
    if not (is_old and model.num_moe_layers):
        return
    scheme, width = quantization_scheme(quantization), experts.of(model, tp)[1]
    if scheme is not None and width % scheme.group_rows:
        num_gpus = tp * experts.data_parallel_size
        raise CapacityError(
            f"0.{minor} divides experts at whole blocks of {scheme.group_rows} FP8"
            f" scales, and {model.name} over {num_gpus} GPUs has {width} rows a GPU;"
            " set enable_expert_parallel, or use fewer GPUs an engine"
        )


def schedules_ahead(minor: int, num_stages: int) -> bool:
    """Whether a release schedules ahead by itself; see `sim.scheduler.v1.dialect`."""
    if num_stages > 1:
        return minor >= constants.FIRST_AHEAD_IN_STAGES_MINOR
    return minor >= constants.FIRST_ASYNC_MINOR


def check_parallelism(
    model: ModelArchitecture, tp: int, experts: ExpertRanks = WITHIN_TENSOR_RANKS
) -> None:
    """Refuse a tensor-parallel size that does not divide the heads, or idle GPUs."""
    ranks = tp * experts.data_parallel_size
    if experts.enable_expert_parallel and not model.num_moe_layers:
        raise CapacityError(
            f"enable_expert_parallel needs a mixture of experts, and {model.name} is"
            " none; leave it out"
        )
    if experts.enable_expert_parallel and ranks > model.num_experts:
        raise CapacityError(
            f"enable_expert_parallel gives every GPU an expert, and {model.name} has"
            f" {model.num_experts}; got {ranks} GPUs (tensor_parallel_size x"
            " data_parallel_size); use fewer, or leave it out"
        )
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % tp:
        raise CapacityError(
            f"tensor_parallel_size must divide the {heads} attention heads of"
            f" {model.name}; got {tp}; use a divisor of {heads}"
        )
    if model.kv_lora_rank is None and kv_heads % tp and tp % kv_heads:
        raise CapacityError(
            f"tensor_parallel_size must divide the {kv_heads} KV heads of {model.name}"
            f" or be a multiple of them; got {tp}"
        )
    shape = model.state_shape
    if shape is not None and any(count % tp for count in shape.divided):
        raise CapacityError(
            f"tensor_parallel_size must divide the {min(shape.divided)} heads of"
            f" {model.name}'s states; got {tp}"
        )
