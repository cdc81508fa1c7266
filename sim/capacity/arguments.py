"""Engine arguments of the capacity estimate: what is refused, and the defaults."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.capacity import constants
from sim.errors import CapacityError
from sim.model import ModelArchitecture, dtype_bytes

if TYPE_CHECKING:
    from sim.hardware import GpuSpec

_VERSION = re.compile(r"v?0\.(\d+)(?:\.\d+)*(?:[.+a-z-].*)?")
_KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Arguments of one engine, checked, with the release's defaults filled in."""

    model: ModelArchitecture
    gpu: GpuSpec
    engine_minor: int
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
    defaults: tuple[str, ...] = field(default=())
    """Names of the arguments that were not given."""

    @property
    def is_v1(self) -> bool:
        """Whether the release runs the V1 engine."""
        return self.engine_minor >= constants.FIRST_V1_MINOR

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of an element of activations and unquantised weights."""
        return dtype_bytes(self.dtype)

    @property
    def kv_itemsize_bytes(self) -> int:
        """Bytes of an element of the KV cache."""
        if self.kv_cache_dtype.startswith("fp8"):
            return 1
        return dtype_bytes(self.kv_cache_dtype)


def parse_engine_version(engine_version: str) -> int:
    """Return NN of a vLLM release ``0.NN`` or ``0.NN.N``.

    Raises
    ------
    CapacityError
        When the version is not of that form.
    """
    matched = _VERSION.fullmatch(str(engine_version).strip())
    if matched is None:
        raise CapacityError(
            "engine_version must be a vLLM release such as '0.11' or '0.19.1';"
            f" got {engine_version!r}"
        )
    return int(matched.group(1))


def resolve_dtypes(
    model: ModelArchitecture, dtype: str, kv_cache_dtype: str
) -> tuple[str, str]:
    """Return the precision of the model and of its KV cache, 'auto' replaced.

    Raises
    ------
    CapacityError
        When a name is unknown.
    """
    dtype = model.dtype if dtype == "auto" else dtype
    dtype_bytes(dtype)
    if kv_cache_dtype not in _KV_DTYPES:
        raise CapacityError(
            f"unknown kv_cache_dtype: {kv_cache_dtype!r}; use one of"
            f" {', '.join(_KV_DTYPES)}"
        )
    return dtype, dtype if kv_cache_dtype == "auto" else kv_cache_dtype


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


def resolve_batch(
    model: ModelArchitecture,
    gpu: GpuSpec,
    minor: int,
    *,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
    max_num_seqs: int | None,
) -> tuple[int, int]:
    """Return ``max_num_batched_tokens`` and ``max_num_seqs`` of the release.

    Raises
    ------
    CapacityError
        When a batch could not hold one token of each sequence.
    """
    if minor >= constants.FIRST_V1_MINOR:
        tokens, seqs = default_batch(gpu, minor)
    else:
        # V0 without chunked prefill profiles a prompt of the longest length.
        longest = max_model_len or model.max_position_embeddings
        chunked = longest > constants.V0_CHUNKED_PREFILL_ABOVE_TOKENS
        least = constants.V0_CHUNKED_BATCHED_TOKENS
        tokens = least if chunked else max(longest, least)
        seqs = constants.V0_MAX_NUM_SEQS
    tokens = max_num_batched_tokens or tokens
    seqs = max_num_seqs or min(seqs, tokens)
    if tokens < seqs:
        raise CapacityError(
            "max_num_batched_tokens must be at least max_num_seqs;"
            f" got {tokens} and {seqs}; raise the one or lower the other"
        )
    return tokens, seqs


def check_positive(name: str, value: object) -> None:
    """Refuse anything but None or a positive integer.

    Raises
    ------
    CapacityError
        Naming the argument.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CapacityError(
            f"{name} must be a positive integer; got {value!r}; leave it out for the"
            " engine's default"
        )


def check_quantity(
    name: str, value: float | None, *, low: float, high: float = math.inf
) -> None:
    """Refuse a number that is not finite or not in (low, high].

    Raises
    ------
    CapacityError
        Naming the argument.
    """
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low < value <= high:
        limit = f"in ({low:g}, {high:g}]" if high < math.inf else f"above {low:g}"
        raise CapacityError(f"{name} must be a number {limit}; got {value!r}")


def check_parallelism(model: ModelArchitecture, tp: int) -> None:
    """Refuse a tensor-parallel size that does not divide the heads.

    Raises
    ------
    CapacityError
        With the size and the number of heads.
    """
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
