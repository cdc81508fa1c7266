"""Settings of the V1 scheduler: what a release has, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.errors import SchedulerError
from sim.scheduler.v1.dialect import (
    FIRST_ASYNC_MINOR,
    LAST_MINOR,
    V1Dialect,
    dialect_of,
)
from sim.scheduler.v1.queues import REQUEST_QUEUES

if TYPE_CHECKING:
    from sim.scheduler.admission import AdmissionRule
    from sim.scheduler.v1.connectors.settings import (
        KVTransferSettings,
        OffloadSettings,
    )
    from sim.scheduler.v1.speculative_config import SpeculativeConfig
    from sim.scheduler.victims import VictimPolicy


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine arguments of the V1 scheduler, checked, and the dialect they belong to.

    Parameters
    ----------
    max_num_batched_tokens
        Token budget of a step.
    max_num_seqs
        Most requests that run at a time.
    max_model_len
        Longest sequence, prompt and output.
    long_prefill_token_threshold
        Most tokens of one request in a step; 0 for no such limit.
    enable_chunked_prefill
        Whether a waiting request may be admitted with part of its tokens.
    scheduling_policy
        ``"fcfs"``, or ``"priority"``: the smallest `Request.priority` first.
    engine_version
        Release whose rules are followed; see `sim.scheduler.v1.dialect`.
    watermark
        Share of the pool that admissions leave free while something runs.
    scheduler_reserve_full_isl
        Admit a request only if all its known tokens would fit; None for the
        release's default.
    long_prefill_token_threshold_adaptive
        Raise the threshold to a fair share of the budget.
    max_num_active_seqs
        Limit on running requests below `max_num_seqs`, or None.
    prefill_schedule_interval
        Steps from one with prefill to the next while decodes run; 1 for no such rule.
    max_num_scheduled_tokens
        Token budget below `max_num_batched_tokens`, or None.
    preemption_victim
        Chooses the request to preempt, in place of the engine's own rule; see
        `sim.scheduler.victims`.
    admission
        Asked beside the engine's own rules, or None; see `sim.scheduler.admission`.
    async_scheduling
        Whether a step is formed while the one before runs.
    pipeline_parallel_size
        Stages that a step goes through; as many steps may be in flight.
    speculative_config
        Draft tokens, or None.
    offload
        A CPU tier behind the pool, or None.
    kv_transfer
        One side of a pair of engines for prefill and decode, or None.

    Raises
    ------
    SchedulerError
        If the release does not have a key that is used, or a value is impossible.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    engine_version: str = "0.33"
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool | None = None
    long_prefill_token_threshold_adaptive: bool = False
    max_num_active_seqs: int | None = None
    prefill_schedule_interval: int = 1
    max_num_scheduled_tokens: int | None = None
    preemption_victim: VictimPolicy | None = None
    admission: AdmissionRule | None = None
    async_scheduling: bool = False
    pipeline_parallel_size: int = 1
    speculative_config: SpeculativeConfig | None = None
    offload: OffloadSettings | None = None
    kv_transfer: KVTransferSettings | None = None
    dialect: V1Dialect = field(init=False)

    def __post_init__(self) -> None:
        dialect = dialect_of(self.engine_version)
        object.__setattr__(self, "dialect", dialect)
        self._check_keys(dialect)
        self._check_values()
        self._check_together()

    @property
    def has_connector(self) -> bool:
        """Whether blocks may come from beyond the pool."""
        return self.offload is not None or self.kv_transfer is not None

    @property
    def token_budget(self) -> int:
        """Most tokens of a step."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that are in flight at a time."""
        return self.pipeline_parallel_size + self.async_scheduling

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens that are scheduled and not processed."""
        return self.max_num_batched_tokens * self.max_concurrent_batches

    @property
    def most_running(self) -> int:
        """Most requests that run at a time."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def skips_over_budget_heads(self) -> bool:
        """Whether heads that exceed the budget are set aside; see `V1Dialect`."""
        return not self.enable_chunked_prefill and self.dialect.skips_over_budget_heads

    @property
    def spaces_prefills(self) -> bool:
        """Whether ``prefill_schedule_interval`` acts in a single engine."""
        return self.prefill_schedule_interval > 1 and self.dialect.spaces_prefills

    def most_slots(self, block_size: int) -> int:
        """Return the slots of a request at most.

        Positions beyond ``max_model_len`` get none but those of the last block.
        """
        return -(-self.max_model_len // block_size) * block_size

    @property
    def reserve_full_isl(self) -> bool:
        """Whether all known tokens of a request must fit to admit it."""
        if self.scheduler_reserve_full_isl is None:
            return self.dialect.reserves_full_isl
        return self.scheduler_reserve_full_isl

    @property
    def has_steady_threshold(self) -> bool:
        """Whether `long_prefill_token_threshold` cuts prompts below a step's budget.

        In every call, that is: not where it spares lone requests.
        """
        return (
            0 < self.long_prefill_token_threshold <= self.token_budget
            and not self.dialect.spares_lone_requests
        )

    @property
    def most_new_tokens(self) -> int:
        """Most tokens of one request in a step."""
        if self.has_steady_threshold:
            return self.long_prefill_token_threshold
        return self.token_budget

    def draft_limits(self, *, enable_prefix_caching: bool) -> dict[str, Any]:
        """Return the part of `cache.v1.groups.kinds.EngineLimits` that drafts set."""
        drafts = self.speculative_config
        if drafts is None:
            return {}
        return drafts.limits(
            enable_prefix_caching=enable_prefix_caching,
            has_connector=self.has_connector,
        )

    def _check_keys(self, dialect: V1Dialect) -> None:
        """Refuse keys that the release lacks; one that does nothing may stay."""
        used = {
            "max_num_scheduled_tokens": self.max_num_scheduled_tokens is not None,
            "scheduler_reserve_full_isl": bool(self.scheduler_reserve_full_isl),
            "watermark": self.watermark != 0,
            "prefill_schedule_interval": self.prefill_schedule_interval != 1,
            "max_num_active_seqs": self.max_num_active_seqs is not None,
            "long_prefill_token_threshold_adaptive": (
                self.long_prefill_token_threshold_adaptive
            ),
        }
        for key, is_used in used.items():
            if is_used and not dialect.has_key(key):
                raise dialect.refuse_key(key)
        if self.async_scheduling and dialect.minor < FIRST_ASYNC_MINOR:
            raise SchedulerError(
                f"async_scheduling is built from 0.14 on, the engine_version is "
                f"{dialect.release}; set it to false, or raise engine_version"
            )
        if self.pipeline_parallel_size > 1 and not dialect.knows_pipelines:
            raise SchedulerError(
                f"pipeline_parallel_size is known from 0.32 on, the engine_version "
                f"is {dialect.release}; leave it out, or raise engine_version"
            )
        if self.speculative_config is not None and not dialect.knows_drafts:
            raise SchedulerError(
                f"speculative decoding is known of 0.{LAST_MINOR} only, the "
                f"engine_version is {dialect.release}; leave speculative_config out, "
                f"or raise engine_version"
            )
        if self.has_connector:
            self._check_connector(dialect)
        if self.scheduling_policy not in REQUEST_QUEUES:
            raise SchedulerError(
                f"scheduling_policy must be one of {', '.join(REQUEST_QUEUES)}, got "
                f"{self.scheduling_policy!r}"
            )
        if not dialect.has_priority_policy and (
            self.scheduling_policy == "priority" or not self.enable_chunked_prefill
        ):
            raise SchedulerError(
                f"before 0.11 only fcfs with chunked prefill is known (V1 of 0.8 has "
                f"no priority policy, and schedules otherwise without chunking), the "
                f"engine_version is {dialect.release}; use 0.11 or a later release"
            )

    def _check_connector(self, dialect: V1Dialect) -> None:
        """Refuse settings that are not known of engines with a KV connector."""
        offload = self.offload
        if self.kv_transfer is not None and offload is not None:
            self._check_both(offload)
        if self.kv_transfer is not None:
            thing, remedy = "a pair of engines", "or leave the pair out"
            is_known, since = dialect.knows_offloading, f"of 0.{LAST_MINOR} only"
        else:
            thing, remedy = "a CPU tier", "or leave the CPU tier out"
            is_known, since = dialect.has_tiers_as_here, "from 0.28 on"
        if not is_known:
            raise SchedulerError(
                f"{thing} is known {since}, the engine_version is "
                f"{dialect.release}; raise engine_version, {remedy}"
            )
        if self.pipeline_parallel_size > 1:
            raise SchedulerError(
                f"{thing} is not built beside pipelines, pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}; set it to 1, {remedy}"
            )
        if self.speculative_config is not None and self.offload is not None:
            raise SchedulerError(
                "a CPU tier is not built beside drafts; leave speculative_config out, "
                "or leave the CPU tier out"
            )
        if self.admission is not None:
            raise SchedulerError(
                f"admission rules know no requests that load blocks; leave admission "
                f"out, {remedy}"
            )

    @staticmethod
    def _check_both(offload: OffloadSettings) -> None:
        """Refuse tiers that are not known of engines of a pair."""
        if offload.write_policy != "write_through":
            raise SchedulerError(
                f"the tier of an engine of a pair stores what is computed, got "
                f"write_policy {offload.write_policy}; leave it out"
            )

    def _check_values(self) -> None:
        for name, least in (
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("max_model_len", 1),
            ("long_prefill_token_threshold", 0),
            ("prefill_schedule_interval", 1),
            ("max_num_active_seqs", 1),
            ("max_num_scheduled_tokens", 1),
            ("pipeline_parallel_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SchedulerError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.watermark < 1:
            raise SchedulerError(
                f"watermark must be at least 0 and below 1, got {self.watermark}"
            )

    def _check_together(self) -> None:
        for name, most_name in (
            ("max_num_active_seqs", "max_num_seqs"),
            ("max_num_scheduled_tokens", "max_num_batched_tokens"),
        ):
            value, most = getattr(self, name), getattr(self, most_name)
            if value is not None and value > most:
                raise SchedulerError(
                    f"{name} must be at most {most_name}, which is {most}, got {value}"
                )
        self._check_drafts()
        if (
            not self.enable_chunked_prefill
            and self.max_num_batched_tokens < self.max_model_len
        ):
            raise SchedulerError(
                f"without chunked prefill max_num_batched_tokens must be at least "
                f"max_model_len, which is {self.max_model_len}, got "
                f"{self.max_num_batched_tokens}; raise it, or enable_chunked_prefill"
            )

    def _check_drafts(self) -> None:
        """Refuse settings that a release refuses or fails at with drafts, or may."""
        drafts = self.speculative_config
        if drafts is None:
            return
        num_tokens = drafts.num_speculative_tokens
        if self.pipeline_parallel_size > 1:
            raise SchedulerError(
                f"speculative decoding is not known with stages, "
                f"pipeline_parallel_size is {self.pipeline_parallel_size}; set it to 1"
            )
        if 0 < self.long_prefill_token_threshold <= num_tokens:
            raise SchedulerError(
                f"long_prefill_token_threshold must be above num_speculative_tokens, "
                f"which is {num_tokens}, got {self.long_prefill_token_threshold}: an "
                f"admission is filled up with so many drafts"
            )
        if self.max_num_batched_tokens <= drafts.num_lookahead_tokens:
            raise SchedulerError(
                f"max_num_batched_tokens must be above num_speculative_tokens, which "
                f"is {num_tokens}, got {self.max_num_batched_tokens}"
            )
