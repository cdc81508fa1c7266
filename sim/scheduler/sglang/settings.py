"""Arguments of the `sglang` scheduler, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from cache.sglang.nodes import RANKS
from sim.errors import SchedulerError

SCHEDULE_POLICIES: Final = ("fcfs", "lpm", "dfs-weight", "lof")
_OF_PRIORITIES: Final = ("fcfs", "lof")

INIT_NEW_TOKEN_RATIO: Final = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR: Final = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS: Final = 600
RETRACT_DECODE_STEPS: Final = 20
CLIP_MAX_NEW_TOKENS: Final = 4096
IN_BATCH_PREFIX_TOKENS: Final = 32
LONGEST_MATCHED_QUEUE: Final = 128
FEW_REQUESTS: Final = 32
PREFIX_REFRESH_INTERVAL: Final = 32
"""The release's environment variables, at their defaults: SGLang 0.5.9,
``environ.py`` and ``managers/schedule_policy.py``."""
FIRST_WITH_PLANS: Final = 19
"""Their loop makes plans, and their tree is the unified one: 0.5.19 to 0.5.23."""
FIRST_WITH_WINDOWS: Final = 23
"""From which release on the rules of layers with a window are known here."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """One side of a prefiller and a decoder, under SGLang's names.

    Parameters
    ----------
    mode
        What the engine does: ``"prefill"`` or ``"decode"``.
    num_reserved_decode_tokens
        Of a decoder: room that it keeps for each request that it has.
    """

    mode: str
    num_reserved_decode_tokens: int = 512


@dataclass(frozen=True, slots=True)
class WindowPool:
    """The slots of layers with a window, beside those of full ones: a hybrid SWA.

    Parameters
    ----------
    sliding_window_size
        Tokens before one that it attends to.
    max_total_num_tokens
        Token slots of the pool, a multiple of the page.
    eviction_interval
        A decoding request gives slots back once it has left so many tokens behind its
        window: ``SGLANG_SWA_EVICTION_INTERVAL``.
    """

    sliding_window_size: int
    max_total_num_tokens: int
    eviction_interval: int = 128


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the `sglang` scheduler, under SGLang's argument names.

    Parameters
    ----------
    max_total_num_tokens
        Token slots of the pool, a multiple of `page_size`.
    page_size
        Tokens of a page.
    max_running_requests
        Most requests that run, and request slots.
    context_len
        Longest sequence of the model.
    chunked_prefill_size
        Most prompt tokens of a batch; 0 or less, or without `enable_chunked_prefill`,
        for no limit, and whole prompts.
    max_prefill_tokens
        Prompt tokens after which a batch takes no more requests.
    prefill_max_requests
        Most requests of a prefill batch, or None.
    enable_mixed_chunk
        Whether running requests decode in prefill batches, too; not with whole prompts.
    schedule_policy
        Order of the queue: see `SCHEDULE_POLICIES`.
    schedule_conservativeness
        Scales the share of their limits that running requests are expected to write.
    disable_radix_cache
        Whether no prefix is shared.
    radix_eviction_policy
        See `cache.sglang.nodes.RANKS`.
    enable_priority_scheduling, schedule_low_priority_values_first
        Whether the queue is sorted by priority, which may preempt, and whether small
        numbers are the urgent ones.
    priority_scheduling_preemption_threshold
        A request is preempted for one that is more urgent by more than this.
    max_queued_requests
        Most that wait; None for no limit.
    overlap
        Whether a batch is formed while the one before runs.
    need_sort
        See `cache.sglang.allocator.SlotAllocator`.
    engine_version
        0.5.9 to 0.5.12, or 0.5.19 to 0.5.23.
    kv_transfer
        What it does beside engines that do the other part; None for both parts.
    swa
        Layers with a window, and their slots; None where all attend to all tokens.

    Attributes
    ----------
    patch
        The release that it follows: 9 for 0.5.9, 10 for 0.5.10.post1.
    makes_plans
        Whether it follows the rules of 0.5.19 and later.

    Raises
    ------
    SchedulerError
        Where a value is impossible, or two do not fit together.
    """

    max_total_num_tokens: int = 2048
    page_size: int = 1
    max_running_requests: int = field(default=64, metadata={"key": "max_num_seqs"})
    context_len: int = field(default=4096, metadata={"key": "max_model_len"})
    chunked_prefill_size: int = field(
        default=8192, metadata={"key": "max_num_batched_tokens"}
    )
    enable_chunked_prefill: bool = True
    max_prefill_tokens: int = 16384
    prefill_max_requests: int | None = None
    enable_mixed_chunk: bool = False
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    max_queued_requests: int | None = None
    overlap: bool = field(default=False, metadata={"key": "async_scheduling"})
    need_sort: bool = False
    engine_version: str = "0.5.9"
    kv_transfer: Disaggregation | None = None
    swa: WindowPool | None = None
    patch: int = field(init=False, compare=False)
    makes_plans: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        patch = int(self.engine_version.split(".")[2])
        object.__setattr__(self, "patch", patch)
        object.__setattr__(self, "makes_plans", patch >= FIRST_WITH_PLANS)
        for name, least, most in (
            ("max_total_num_tokens", self.page_size, inf),
            ("page_size", 1, inf),
            ("max_running_requests", 1, inf),
            ("context_len", 1, inf),
            ("max_prefill_tokens", 1, inf),
            ("prefill_max_requests", 1, inf),
            ("schedule_conservativeness", 0, inf),
            ("max_queued_requests", 1, inf),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise SchedulerError(f"{name} must be at least {least}, got {value}")
        if self.max_total_num_tokens % self.page_size:
            raise SchedulerError(
                f"max_total_num_tokens must be a multiple of page_size "
                f"{self.page_size}, got {self.max_total_num_tokens}"
            )
        if self.chunk is not None and self.chunk < self.page_size:
            raise SchedulerError(
                f"chunked_prefill_size must be at least page_size {self.page_size}, or "
                f"-1 for whole prompts, got {self.chunked_prefill_size}"
            )
        for name, known in (
            ("schedule_policy", SCHEDULE_POLICIES),
            ("radix_eviction_policy", (*RANKS,)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise SchedulerError(
                    f"{name} must be one of {', '.join(known)}, got '{value}'"
                )
        if self.enable_priority_scheduling and (
            self.schedule_policy not in _OF_PRIORITIES
        ):
            raise SchedulerError(
                f"schedule_policy must be one of {', '.join(_OF_PRIORITIES)} with "
                f"enable_priority_scheduling, got '{self.schedule_policy}'"
            )
        if 10 < self.patch < FIRST_WITH_PLANS and self.kv_transfer is not None:
            raise SchedulerError(
                "prefill and decode apart are SGLang 0.5.9, 0.5.10 or 0.5.19 to "
                f"0.5.23, got engine_version {self.engine_version}; take one of these"
            )
        self._check_windows()
        if self.radix_eviction_policy == "slru" and self.patch < 10:
            raise SchedulerError(
                "radix_eviction_policy: slru is of SGLang 0.5.10, got engine_version "
                f"{self.engine_version}; take lru"
            )

    def _check_windows(self) -> None:
        swa = self.swa
        if swa is None:
            return
        if self.patch < FIRST_WITH_WINDOWS:
            raise SchedulerError(
                f"layers with a window are SGLang 0.5.{FIRST_WITH_WINDOWS}, got "
                f"engine_version {self.engine_version}; take that"
            )
        if self.kv_transfer is not None:
            raise SchedulerError(
                "layers with a window are not built for prefill and decode apart; "
                "serve both in one engine"
            )
        num_tokens, size = swa.max_total_num_tokens, self.page_size
        if num_tokens < size or num_tokens % size:
            raise SchedulerError(
                f"the pool of layers with a window must be a multiple of page_size "
                f"{size} and at least one page, got {num_tokens}"
            )

    @property
    def has_connector(self) -> bool:
        """Whether it only prefills, or only decodes."""
        return self.kv_transfer is not None

    @property
    def only_decodes(self) -> bool:
        """Whether prompts are computed elsewhere."""
        return self.kv_transfer is not None and self.kv_transfer.mode == "decode"

    @property
    def gives_up_last(self) -> bool:
        """Whether the last request ends that finds no slot to decode, or the engine.

        Others may hold what its limits leave it: prompts to come, or windows.
        """
        return self.swa is not None or (self.makes_plans and self.only_decodes)

    @property
    def num_request_slots(self) -> int:
        """Rows of the table of requests: a small decoder has some for newcomers.

        Source: SGLang 0.5.9, ``model_executor/model_runner_kv_cache_mixin.py``.
        """
        most = self.max_running_requests
        return most * 3 if self.only_decodes and most <= FEW_REQUESTS else most

    @property
    def max_concurrent_batches(self) -> int:
        """Batches in flight at most."""
        return 2 if self.overlap else 1

    @property
    def chunk(self) -> int | None:
        """Most prompt tokens of a batch; None for no limit."""
        size = self.chunked_prefill_size
        return size if self.enable_chunked_prefill and size > 0 else None

    @property
    def is_mixed(self) -> bool:
        """Whether running requests decode beside chunks."""
        return self.enable_mixed_chunk and self.chunk is not None

    @property
    def policy(self) -> str:
        """The queue's order; without a radix cache prefixes order nothing."""
        policy = self.schedule_policy
        if self.disable_radix_cache and policy in ("lpm", "dfs-weight"):
            return "fcfs"
        return policy

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and output at which the engine stops a request."""
        return min(self.context_len, self.max_total_num_tokens) - 2

    @property
    def longest_prompt(self) -> int:
        """A longer prompt is not served: it gets one token, and ends.

        Source: SGLang 0.5.9, ``managers/utils.py`` (`validate_input_length`) and
        ``managers/tp_worker.py``.
        """
        return self.longest_request + 1 - 6

    def admission_error(self, num_prompt_tokens: int) -> str | None:
        """Return why a prompt of so many tokens can never be served, or None."""
        longest = self.longest_prompt
        if num_prompt_tokens <= longest:
            return None
        limits = (
            f"context_len {self.context_len} and max_total_num_tokens "
            f"{self.max_total_num_tokens}"
        )
        if longest < 1:
            return f"{limits} leave a prompt no token, got {num_prompt_tokens}"
        return (
            f"a prompt of {num_prompt_tokens} tokens is longer than {longest}, what "
            f"{limits} let it be"
        )

    @property
    def ratios(self) -> tuple[float, float, float]:
        """`new_token_ratio` at first, at least, and its decay a step."""
        first = min(INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness, 1.0)
        least = min(first * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)
        return first, least, (first - least) / NEW_TOKEN_RATIO_DECAY_STEPS
