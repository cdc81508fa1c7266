"""The engines of decision workloads: the keys that each reference has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from sim.studies.conformance.drafts import Speculative  # noqa: TC001  # pydantic
from sim.studies.conformance.fields import (
    MAX_BLOCKS,
    Count,
    Positive,
    Share,
    Table,
    Whole,
)
from sim.studies.conformance.played_pair import PairSide  # noqa: TC001  # pydantic
from sim.studies.conformance.played_worker import (  # noqa: TC001  # pydantic
    OffloadTier,
    WorkerPace,
)

MAX_LEN = 1 << 40
"""Stands for no limit, where a release has none."""


class _Engine(Table):
    """Keys that all references have."""

    block_size: Positive
    num_gpu_blocks: Annotated[Positive, Field(le=MAX_BLOCKS)]
    max_num_batched_tokens: Positive
    max_num_seqs: Positive

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return read_config(data)


class _TwoTiers(_Engine):
    num_cpu_blocks: Annotated[Count, Field(le=MAX_BLOCKS)]
    watermark: Share = 0.01
    preemption_mode: Literal["recompute", "swap"] | None = None


class CacheflowEngine(_TwoTiers):
    """vLLM 0.1.0 and 0.1.1."""


class V02Engine(_TwoTiers):
    """vLLM 0.2."""

    max_model_len: Positive
    max_paddings: Count = MAX_LEN  # a file without the key has no such limit
    sliding_window: Positive | None = None


class V0Engine(_TwoTiers):
    """vLLM 0.7, V0."""

    max_model_len: Positive
    chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    sliding_window: Positive | None = None
    num_lookahead_slots: Count = 0
    delay_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_num_partial_prefills: Positive = 1
    max_long_partial_prefills: Positive = 1
    long_prefill_token_threshold: Count = 0


class V1Engine(_Engine):
    """vLLM 0.8 and later, V1; `num_gpu_blocks` includes the null block."""

    max_model_len: Positive
    chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: Count = 0
    sliding_window: Positive | None = None
    # Keys of later releases: a file without one means a release without it, so these
    # are what an older release does, not what a later one does by default.
    watermark: Share = 0.0
    scheduler_reserve_full_isl: bool = False
    long_prefill_token_threshold_adaptive: bool = False
    max_num_active_seqs: Positive | None = None
    prefill_schedule_interval: Positive = 1
    max_num_scheduled_tokens: Positive | None = None
    async_scheduling: bool = False
    pipeline_parallel_size: Positive = 1
    speculative: Speculative | None = None
    offload: OffloadTier | None = None
    worker: WorkerPace | None = None
    kv_transfer: PairSide | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that are in flight at a time."""
        return self.pipeline_parallel_size + self.async_scheduling


class HfFifoEngine(_Engine):
    """transformers 5.17, continuous batching."""

    num_cpu_blocks: Annotated[Count, Field(le=MAX_BLOCKS)] = 0
    max_model_len: Positive = MAX_LEN
    enable_prefix_caching: bool = True
    safety_margin: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.15
    max_blocks_per_request: Count = 0  # no block table, as on the CPU


class SglangWindow(Table):
    """Layers with a window, whose slots are a pool of their own."""

    sliding_window_size: Positive
    max_total_num_tokens: Annotated[Positive, Field(le=MAX_BLOCKS)]
    eviction_interval: Positive = 128


class SglangEngine(Table):
    """SGLang 0.5.9 to 0.5.12 and 0.5.19 to 0.5.23, under its own names.

    What is left out is what the logs' driver takes, such as no overlap.
    """

    max_total_num_tokens: Annotated[Positive, Field(le=MAX_BLOCKS)] = 2048
    page_size: Positive = 1
    max_running_requests: Positive = 64
    context_len: Positive = 4096
    chunked_prefill_size: Whole = 8192
    max_prefill_tokens: Positive = 16384
    prefill_max_requests: Positive | None = None
    enable_mixed_chunk: bool = False
    schedule_policy: str = "fcfs"
    schedule_conservativeness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: Whole = 10
    max_queued_requests: Positive | None = None
    overlap: bool = False
    need_sort: bool = False
    swa: SglangWindow | None = None
    disaggregation_mode: Literal["prefill", "decode"] | None = None
    num_reserved_decode_tokens: Count = 512
    max_steps: Positive = 5000

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return read_config(data)


class PlannedEngine(V1Engine):
    """`V1Engine` before its pool is planned."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    block_size: None = None  # type: ignore[assignment]
    num_gpu_blocks: None = None  # type: ignore[assignment]


Engine = CacheflowEngine | V02Engine | V0Engine | V1Engine | HfFifoEngine | SglangEngine

ENGINES: dict[str, type[Table]] = {
    "cacheflow": CacheflowEngine,
    "v0_2": V02Engine,
    "v0": V0Engine,
    "v1": V1Engine,
    "hf_fifo": HfFifoEngine,
    "sglang": SglangEngine,
}


CONFIG_KEYS = frozenset(key for model in ENGINES.values() for key in model.model_fields)


def read_config(data: Any) -> Any:
    """Return a configuration under this format's names, without what is null.

    A null says that there is no such thing, of a key that another reference has, too.
    ``enable_chunked_prefill`` is read as its short form.
    """
    if not isinstance(data, dict):
        return data
    short, long = "chunked_prefill", "enable_chunked_prefill"
    data = {k: v for k, v in data.items() if v is not None or k not in CONFIG_KEYS}
    if long in data and short not in data:
        data[short] = data.pop(long)
    return data
