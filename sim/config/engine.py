"""The serving engine of a configuration: its keys, and what its generation refuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sim.config.offloading import (
    KVTransferTable,
    OffloadingLinkTable,
    check_offloading,
)
from sim.config.sglang import in_tokens, read_arguments, replaced_by
from sim.config.speculative import SpeculativeTable  # noqa: TC001 - pydantic's
from sim.config.types import ConfigTable, Count, Kind, Limit, Positive, Whole
from sim.hardware.interconnects import GATHERING, All2AllBackend
from sim.scheduler.generations import (
    GENERATION_KEYS,
    GENERATIONS,
    generation_of,
    owners,
)
from sim.scheduler.sglang import SGLANG
from sim.scheduler.v1 import V1
from sim.scheduler.v1.dialect import dialect_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.scheduler.generation import Generation

OWN_NAMES = {SGLANG.name: read_arguments}
"""From an engine table in a generation's own names to the common ones."""
StateDtype = Literal["auto", "float32", "bfloat16", "float16"]
_PRINTED_VERSION = re.compile(r"v?(\d+\.\d+(?:\.\d+)?)(?:\.\d+)*(?:[.+a-z-].*)?")
"""A release as an engine prints it (``0.8.5.post1``, ``0.20.1+cu128``), of which a
fourth number, a build and what was added locally change no rule."""


class GenerationTable(ConfigTable):
    """Sampling parameters of requests that give none, under vLLM's names."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class EngineConfig(ConfigTable):
    """The serving engine, in vLLM's engine arguments."""

    model: str
    gpu: str
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    data_parallel_size: Positive = 1
    api_server_count: Positive | None = None
    enable_expert_parallel: bool = False
    all2all_backend: All2AllBackend = GATHERING
    interconnect: str | dict[str, Any] | None = None
    network: str | dict[str, Any] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    scheduler: str | Kind = "v1"
    block_size: Annotated[int, Field(ge=1, le=2**16)] = 16
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    num_gpu_blocks_override: Annotated[int, Field(ge=2)] | None = None
    kv_cache_memory_bytes: Positive | None = None
    swap_space: Annotated[float, Field(ge=0)] = 4.0
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_scheduled_tokens: Count | None = None
    max_num_active_seqs: Count | None = None
    max_paddings: Whole | None = None
    max_prefill_tokens: Count | None = None
    prefill_max_requests: Count | None = None
    max_queued_requests: Count | None = None
    enable_mixed_chunk: bool | None = None
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof"] | None = None
    schedule_conservativeness: Annotated[float, Field(ge=0)] | None = None
    radix_eviction_policy: str | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    priority_scheduling_preemption_threshold: Whole | None = None
    max_blocks_per_request: Whole | None = None
    safety_margin: Annotated[float, Field(ge=0, le=1)] | None = None
    long_prefill_token_threshold: Whole | None = None
    long_prefill_token_threshold_adaptive: bool | None = None
    max_num_partial_prefills: Count | None = None
    max_long_partial_prefills: Count | None = None
    prefill_schedule_interval: Count | None = None
    prefix_cache_retention_interval: Whole | Literal["dense"] | None = None
    prefix_match_unit: Count | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    disable_hybrid_swa_memory: bool | None = None
    swa_full_tokens_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    disable_cascade_attn: bool | None = None
    mamba_cache_dtype: StateDtype | None = None
    mamba_ssm_cache_dtype: StateDtype | None = None
    gdn_prefill_backend: Literal["flashinfer", "triton", "cutedsl"] | None = None
    num_lookahead_slots: Whole | None = None
    scheduler_delay_factor: Annotated[float, Field(ge=0)] | None = None
    scheduler_reserve_full_isl: bool | None = None
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    sliding_window: Count | None = None
    watermark: Annotated[float, Field(ge=0, lt=1)] | None = None
    enable_prefix_caching: bool | None = None
    evictor: str | Kind | None = None
    enable_chunked_prefill: bool | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: Literal["release"] | list[Count] | None = None
    override_generation_config: GenerationTable | None = None
    engine_version: str | None = None
    preemption_mode: Literal["recompute", "swap"] | None = None
    preemption_victim: str | Kind | None = None
    admission: str | Kind | None = None
    async_scheduling: bool | None = None
    speculative_config: SpeculativeTable | None = None
    kv_offloading_size: Limit | None = None
    kv_offloading_backend: str | None = None
    kv_offloading_link: OffloadingLinkTable | None = None
    kv_transfer_config: KVTransferTable | None = None
    admission_check: bool = True

    @property
    def scheduler_kind(self) -> str:
        """A generation's name, or the user's class."""
        if isinstance(self.scheduler, str):
            return self.scheduler
        return str(self.scheduler.get("kind"))

    @property
    def evictor_kind(self) -> str | None:
        """An eviction policy's name, the user's class, or None for the engine's own."""
        if self.evictor is None or isinstance(self.evictor, str):
            return self.evictor
        return str(self.evictor.get("kind"))

    @property
    def speculative(self) -> SpeculativeTable | None:
        """Which drafts are proposed; None for none."""
        drafts = self.speculative_config
        return drafts if drafts is not None and drafts.num_speculative_tokens else None

    @property
    def generation(self) -> Generation:
        """The chosen generation; that of the release for a user's own scheduler."""
        kind = self.scheduler_kind
        if kind in GENERATIONS:
            return GENERATIONS[kind]
        return generation_of(self.engine_version)

    @property
    def version(self) -> str:
        """The release that decides dialect, defaults and capacity."""
        return self.engine_version or self.generation.engine_version

    @property
    def prefix_caching(self) -> bool:
        """Whether full blocks are found again by their content."""
        if self.enable_prefix_caching is None:
            return bool(self.generation.enable_prefix_caching)
        return self.enable_prefix_caching

    @property
    def budget_key(self) -> str:
        """Key of the tokens of a step; SGLang has another one for whole prompts."""
        key = "max_prefill_tokens"
        is_whole = self.enable_chunked_prefill is False
        has_key = key in self.generation.keys
        return key if is_whole and has_key else "max_num_batched_tokens"

    @property
    def cascades(self) -> bool:
        """Whether a prefix that all requests share may be read once a step."""
        if not (self.generation is V1 and self.prefix_caching):
            return False
        dialect = dialect_of(self.version)
        if self.disable_cascade_attn is None:
            return dialect.cascades_by_default
        return dialect.has_cascade and not self.disable_cascade_attn

    @property
    def has_tier(self) -> bool:
        """Whether there is a tier behind the pool."""
        return self.kv_offloading_size is not None or (
            self.kv_transfer_config is not None
        )

    @property
    def schedules_ahead(self) -> bool:
        """Whether steps are formed one ahead, as given or by the release's default."""
        own = GENERATIONS.get(self.scheduler_kind)
        has_queue = own is not None and (own.has_batch_queue or own.is_hosted)
        if self.async_scheduling is not None or not has_queue:
            return bool(self.async_scheduling)
        if own is not None and own.always_ahead:
            return True
        drafts = self.speculative
        return dialect_of(self.version).schedules_ahead(
            pipeline_parallel_size=self.pipeline_parallel_size,
            draft_method=None if drafts is None else drafts.method,
        )

    def shared_with(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table of an engine that has keys of its own, beside this one.

        One of another generation shares what stands here at no default: release and
        defaults belong to the generation.
        """
        replaced = replaced_by(own)
        shared = {k: v for k, v in self.model_dump().items() if k not in replaced}
        other = _generation_in({**shared, **own})
        if other is not None and other is not self.generation:
            defaults = {
                **{
                    name: each.default for name, each in type(self).model_fields.items()
                },
                **self.generation.defaults,
            }
            shared = {k: v for k, v in shared.items() if v != defaults[k]}
            shared.pop("engine_version", None)
        elif other is SGLANG:
            shared = in_tokens(shared, self.block_size, own)
        return {**shared, **own}

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_generation(cls, data: object) -> object:
        """Fill in the defaults that only the chosen generation has."""
        if not isinstance(data, dict):
            return data
        generation = _generation_in(data)
        if generation is None:
            return data
        if (reads := OWN_NAMES.get(generation.name)) is not None:
            data = reads(data)
        data = dict(generation.defaults) | data
        if generation.release is not None and data.get("engine_version") is None:
            # Kept with the results: another release would be another run.
            data["engine_version"] = generation.release()
        return data

    @model_validator(mode="after")
    def _ranks(self) -> EngineConfig:
        """Refuse data-parallel ranks where they are not built."""
        if self.data_parallel_size > 1 and not self.generation.has_ranks:
            raise ValueError(
                f"data_parallel_size: ranks are built for the v1 generation, got "
                f"{self.data_parallel_size} with {self.scheduler_kind}; leave it at 1"
            )
        if self.all2all_backend != GATHERING and not self.enable_expert_parallel:
            raise ValueError(
                f"all2all_backend: {self.all2all_backend} needs whole experts on GPUs; "
                f"set enable_expert_parallel to true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _drafts(self) -> EngineConfig:
        """Refuse drafts where they are not built, or not in the release."""
        drafts = self.speculative
        if drafts is None:
            return self
        own = GENERATIONS.get(self.scheduler_kind)
        if own is None or not own.has_drafts:
            raise ValueError(
                f"speculative_config: drafts are built for the {V1.name} generation, "
                f"got {self.scheduler_kind}; remove it, or set scheduler to {V1.name}"
            )
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"speculative_config: drafts with pipeline_parallel_size above 1 are "
                f"not built, got {self.pipeline_parallel_size}; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _offloading(self) -> EngineConfig:
        check_offloading(self)
        return self

    @field_validator("engine_version", mode="before")
    @classmethod
    def _version_as_text(cls, value: object) -> object:
        # YAML reads an unquoted 0.11 as a number.
        if isinstance(value, float):
            return repr(value)
        printed = _PRINTED_VERSION.fullmatch(value) if isinstance(value, str) else None
        return printed[1] if printed else value

    @model_validator(mode="after")
    def _of_the_generation(self) -> EngineConfig:
        """Refuse keys that the chosen generation does not have."""
        name = self.scheduler_kind
        own = GENERATIONS.get(name)
        self._check_steps_in_flight(own)
        if own is None:
            return self
        generation = own
        for key in sorted(GENERATION_KEYS - generation.keys):
            value = getattr(self, key)
            if value is not None:
                if isinstance(value, ConfigTable):
                    value = value.model_dump(exclude_defaults=True)
                raise ValueError(
                    f"{key}: the {name} generation has no such key "
                    f"({owners(key)}); remove it, got {value!r}"
                )
        if not generation.takes(self.version):
            # YAML has made 0.1 of an unquoted 0.10.
            quoted = f"{self.version}0"
            hint = (
                f", and put {quoted} in quotes: YAML reads it as {self.version}"
                if generation.takes(quoted)
                else ""
            )
            follows = generation_of(self.version)
            if not hint and follows.takes(self.version):
                hint = f", or set scheduler to {follows.name}, which follows it"
            raise ValueError(
                f"engine_version: the {name} generation covers "
                f"{generation.versions_in_words}, got {self.engine_version!r}; leave "
                f"it out for {generation.engine_version}{hint}"
            )
        if self.enable_prefix_caching and generation.enable_prefix_caching is None:
            raise ValueError(
                f"enable_prefix_caching: the {name} generation has no prefix caching, "
                f"got True; set it to false, or leave it out"
            )
        if self.preemption_mode == "swap" and not generation.has_cpu_tier:
            raise ValueError(
                f"preemption_mode: the {name} generation preempts by recomputation "
                f"only, got 'swap'; set it to recompute or null"
            )
        return self

    @model_validator(mode="after")
    def _cascade(self) -> EngineConfig:
        """Refuse a prefix that is read once where the release has no such kernel."""
        if self.disable_cascade_attn is not False or self.generation is not V1:
            return self
        dialect = dialect_of(self.version)
        if not dialect.has_cascade:
            raise ValueError(
                f"disable_cascade_attn: 0.32 removed cascade attention, so false has "
                f"no effect in {dialect.release}; leave it out, or name an "
                f"engine_version up to 0.31"
            )
        for key, is_used in (
            ("data_parallel_size", self.data_parallel_size > 1),
            ("kv_offloading_size", self.kv_offloading_size is not None),
        ):
            if is_used:
                raise ValueError(
                    f"disable_cascade_attn: reading a prefix once is not built beside "
                    f"{key}; leave one of them out"
                )
        return self

    def _check_steps_in_flight(self, generation: Generation | None) -> None:
        """Refuse several steps in flight where they are not built."""
        num_stages, ahead = self.pipeline_parallel_size, self.async_scheduling
        if num_stages == 1 and not ahead:
            return
        if num_stages > 1 and generation is not None and not generation.has_pipelines:
            raise ValueError(
                f"pipeline_parallel_size: pipelines are built for {V1.name} only, got "
                f"{num_stages} with {self.scheduler_kind}; leave it out"
            )
        named = [
            name
            for name, each in GENERATIONS.items()
            if each.has_batch_queue and (num_stages == 1 or each.has_pipelines)
        ]
        is_hosted = generation is not None and generation.is_hosted
        has_queue = generation is not None and generation.has_batch_queue
        if not (has_queue or (is_hosted and num_stages == 1)):
            key = "async_scheduling" if ahead else "pipeline_parallel_size"
            what = "scheduling ahead is" if ahead else "pipelines are"
            raise ValueError(
                f"{key}: {what} built for {', '.join(named)} only, got "
                f"{getattr(self, key)} with {self.scheduler_kind}; leave it out"
            )


def _generation_in(engine: dict[str, Any]) -> Generation | None:
    """Return the generation that an unchecked table names, if it does."""
    kind, release = engine.get("scheduler"), engine.get("engine_version")
    if isinstance(kind, dict):
        kind = kind.get("kind")
    if not isinstance(kind, str):
        return None
    if kind in GENERATIONS:
        return GENERATIONS[kind]
    return generation_of(release if isinstance(release, str) else None)
