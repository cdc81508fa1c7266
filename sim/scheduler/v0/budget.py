"""The budget of a V0 scheduler call, and how prompts share it in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sim.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Items

    from sim.scheduler.groups.output import ScheduledSequenceGroup
    from sim.scheduler.groups.sequence import Sequence, SequenceGroup
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.settings import CacheConfig


class SchedulingBudget:
    """Tokens and sequences of one scheduler call, entered under request ids.

    A request is counted once: what is added under an id that is there already changes
    nothing, so sequences that run can be entered ahead of their turn.

    Source: vLLM 0.7.3, ``vllm/core/scheduler.py``.
    """

    __slots__ = (
        "_ids_of_seqs",
        "_ids_of_tokens",
        "max_num_seqs",
        "num_batched_tokens",
        "num_cached_tokens",
        "num_curr_seqs",
        "token_budget",
    )

    def __init__(self, token_budget: int, max_num_seqs: int) -> None:
        _not_negative(token_budget=token_budget, max_num_seqs=max_num_seqs)
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.num_batched_tokens = 0
        # Tokens that were found in the prefix cache; they cost nothing.
        self.num_cached_tokens = 0
        self.num_curr_seqs = 0
        self._ids_of_tokens: set[int | str] = set()
        self._ids_of_seqs: set[int | str] = set()

    def can_schedule(self, *, num_new_tokens: int, num_new_seqs: int) -> bool:
        """Whether so many tokens and sequences still fit."""
        _not_negative(num_new_tokens=num_new_tokens)
        if num_new_seqs < 1:
            raise SchedulerError(
                f"num_new_seqs must be at least 1, got {num_new_seqs}: a group without "
                f"sequences has nothing to schedule"
            )
        return (
            self.num_batched_tokens + num_new_tokens <= self.token_budget
            and self.num_curr_seqs + num_new_seqs <= self.max_num_seqs
        )

    def remaining_token_budget(self) -> int:
        """Return the tokens left; negative if decodes alone exceeded the budget."""
        return self.token_budget - self.num_batched_tokens

    def add_num_batched_tokens(
        self, req_id: int | str, num_batched_tokens: int, num_cached_tokens: int = 0
    ) -> None:
        """Enter a request's tokens, unless it has entered some."""
        if req_id in self._ids_of_tokens:
            return
        if num_batched_tokens < 0 or num_cached_tokens < 0:
            _not_negative(
                num_batched_tokens=num_batched_tokens,
                num_cached_tokens=num_cached_tokens,
            )
        self._ids_of_tokens.add(req_id)
        self.num_batched_tokens += num_batched_tokens
        self.num_cached_tokens += num_cached_tokens

    def subtract_num_batched_tokens(
        self, req_id: int | str, num_batched_tokens: int
    ) -> None:
        """Take back what a request entered; nothing to do if it did not."""
        _not_negative(num_batched_tokens=num_batched_tokens)
        if req_id in self._ids_of_tokens:
            _not_more(num_batched_tokens, self.num_batched_tokens, "tokens")
            self._ids_of_tokens.remove(req_id)
            self.num_batched_tokens -= num_batched_tokens

    def add_num_seqs(self, req_id: int | str, num_curr_seqs: int) -> None:
        """Enter a request's sequences, unless it has entered some."""
        if req_id in self._ids_of_seqs:
            return
        if num_curr_seqs < 0:
            _not_negative(num_curr_seqs=num_curr_seqs)
        self._ids_of_seqs.add(req_id)
        self.num_curr_seqs += num_curr_seqs

    def subtract_num_seqs(self, req_id: int | str, num_curr_seqs: int) -> None:
        """Take back what a request entered; nothing to do if it did not."""
        _not_negative(num_curr_seqs=num_curr_seqs)
        if req_id in self._ids_of_seqs:
            _not_more(num_curr_seqs, self.num_curr_seqs, "sequences")
            self._ids_of_seqs.remove(req_id)
            self.num_curr_seqs -= num_curr_seqs


def _not_negative(**values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise SchedulerError(f"{name} must be at least 0, got {value}")


def _not_more(num: int, most: int, what: str) -> None:
    if num > most:
        raise SchedulerError(
            f"no more than the {most} {what} that are entered can be taken back, got "
            f"{num}"
        )


LONG_PREFILL_SHARE_OF_MODEL_LEN = 0.04
"""A prompt is long from this share of max_model_len on, unless a threshold is set and
if several partial prefills are allowed."""


class CachedTokens(Protocol):
    """The block manager, as `ChunkRule` asks it."""

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens at the front of `seq` whose blocks are cached and computed."""
        ...


@dataclass(frozen=True, slots=True)
class PartialPrefillRules:
    """How many prompts may be in the middle of their prefill, and how many long ones.

    Parameters
    ----------
    max_num_partial_prefills
        Prompts that share the budget of a call.
    max_long_partial_prefills
        How many of them may be long.
    long_prefill_token_threshold
        A prompt with more tokens left than this is long.
    """

    max_num_partial_prefills: int
    max_long_partial_prefills: int
    long_prefill_token_threshold: int

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> PartialPrefillRules:
        """Return the rules of a configuration."""
        num_partial = config.max_num_partial_prefills
        threshold = config.long_prefill_token_threshold
        if num_partial > 1:
            if not config.enable_chunked_prefill:
                raise SchedulerError(
                    f"max_num_partial_prefills of {num_partial} needs chunked prefill: "
                    f"set enable_chunked_prefill, or leave it at 1"
                )
            threshold = threshold or int(
                config.max_model_len * LONG_PREFILL_SHARE_OF_MODEL_LEN
            )
        if config.max_long_partial_prefills > num_partial:
            raise SchedulerError(
                f"max_long_partial_prefills of {config.max_long_partial_prefills} must "
                f"not exceed max_num_partial_prefills ({num_partial})"
            )
        return cls(num_partial, config.max_long_partial_prefills, threshold)

    def is_long(self, group: SequenceGroup) -> bool:
        """Whether the prompt of a group has many tokens left to compute."""
        seq = group.first_seq
        num_tokens = seq.get_len() - seq.num_computed_tokens if seq.is_prefill else 1
        return num_tokens > self.long_prefill_token_threshold


class PartialPrefillMetadata:
    """Partial prefills of one scheduler call."""

    __slots__ = ("long_prefills", "rules", "schedulable_prefills")

    def __init__(
        self, schedulable_prefills: int, long_prefills: int, rules: PartialPrefillRules
    ) -> None:
        self.schedulable_prefills = schedulable_prefills
        self.long_prefills = long_prefills
        self.rules = rules

    @classmethod
    def from_queues(
        cls,
        running: Iterable[SequenceGroup],
        waiting: Iterable[SequenceGroup],
        rules: PartialPrefillRules,
    ) -> PartialPrefillMetadata:
        """Count the prefills that run and those that could start.

        Long prompts beyond their limit are passed over, so shorter ones behind them
        count.
        """
        prefills = [group for group in running if group.is_prefill()]
        num_prefills = len(prefills)
        long_prefills = sum(map(rules.is_long, prefills))
        num_long = long_prefills
        for group in waiting:
            if num_prefills >= rules.max_num_partial_prefills:
                break
            if rules.is_long(group):
                if num_long >= rules.max_long_partial_prefills:
                    continue
                num_long += 1
            num_prefills += 1
        num_schedulable = min(num_prefills, rules.max_num_partial_prefills)
        return cls(num_schedulable, long_prefills, rules)

    def can_schedule(self, group: SequenceGroup) -> bool:
        """Whether a waiting group may start: enough long prompts may run already."""
        rules = self.rules
        return not (
            rules.max_num_partial_prefills > 1
            and self.long_prefills >= rules.max_long_partial_prefills
            and rules.is_long(group)
        )

    def maybe_increment_partial_prefills(self, group: SequenceGroup) -> None:
        """Take note of a group that starts in this call."""
        if self.rules.is_long(group):
            self.long_prefills += 1


class ChunkRule:
    """Tokens that a group computes in a call, and how many of them are cached."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        block_manager: CachedTokens,
    ) -> None:
        self.partial_prefills = PartialPrefillRules.from_config(config)
        self.enable_chunking = config.enable_chunked_prefill
        self.block_manager = block_manager
        self.token_budget = config.max_num_batched_tokens
        self.enable_caching = cache_config.enable_prefix_caching
        # With prefix caching what is left of the budget is used in whole blocks.
        self.granularity = cache_config.block_size if self.enable_caching else 1
        self._refuse_too_small_budget()

    def _refuse_too_small_budget(self) -> None:
        num_sharing = self.partial_prefills.max_num_partial_prefills
        share = self.token_budget // num_sharing
        if self.enable_chunking and share < self.granularity:
            raise SchedulerError(
                f"chunked prefill needs max_num_batched_tokens of at least "
                f"{self.granularity} for each of {num_sharing} partial prefills (with "
                f"prefix caching chunks are whole blocks), got {self.token_budget}: "
                f"nothing could ever be scheduled; raise it"
            )

    def num_new_tokens(
        self,
        seqs: Items[Sequence],
        budget: SchedulingBudget,
        partial: PartialPrefillMetadata | None = None,
        *,
        chunk: bool = False,
    ) -> tuple[int, int]:
        """Return uncached and cached tokens that `seqs` of one group would compute.

        With `chunk`, what the budget cannot hold may be left for later, but never of
        several sequences. A prompt that is cached entirely has one uncached token.
        """
        num_uncached = 0
        num_cached = 0
        for seq in seqs:
            if not seq.is_prefill:
                num_uncached += 1
                continue
            num_computed = seq.num_computed_tokens
            num_new = seq.get_len() - num_computed
            if self.enable_caching:
                num_hits = self.block_manager.get_num_cached_tokens(seq) - num_computed
                if num_hits > 0:
                    num_cached += num_hits
                    num_new -= num_hits
            num_uncached += num_new
        if not num_uncached and num_cached:
            num_uncached = 1
            num_cached -= 1
        if chunk and len(seqs) == 1:
            num_uncached = self.chunk_of(num_uncached, budget, partial)
        return num_uncached, num_cached

    def chunk_of(
        self,
        num_tokens: int,
        budget: SchedulingBudget,
        partial: PartialPrefillMetadata | None,
    ) -> int:
        """Return how many of `num_tokens` the budget holds."""
        remaining = budget.remaining_token_budget()
        share = remaining
        if partial is not None and partial.schedulable_prefills:
            share = self.token_budget // partial.schedulable_prefills
        elif partial is not None:
            share = self.token_budget
        # Rounded down for decodes as well: they go without if less than a block is
        # left.
        whole = min(remaining, share) // self.granularity * self.granularity
        return min(num_tokens, whole)


def num_group_recompute_tokens(seqs: Items[Sequence]) -> int:
    """Return the tokens of a recomputation of several sequences: the prompt once."""
    return seqs[0].get_prompt_len() + sum(seq.get_output_len() for seq in seqs)


def num_group_shared_tokens(seqs: Items[Sequence]) -> int | None:
    """Return the tokens that a forked group shares when computed anew; else None."""
    if len(seqs) > 1 and any(seq.get_output_len() for seq in seqs):
        return seqs[0].get_prompt_len()
    return None


def finishing_first(
    prefills: list[ScheduledSequenceGroup],
) -> list[ScheduledSequenceGroup]:
    """Return running prefills, those first whose last chunk is in this call."""
    is_last = [
        entry.seq_group.get_num_uncomputed_tokens() == entry.token_chunk_size
        for entry in prefills
    ]
    return [
        entry
        for wanted in (True, False)
        for entry, last in zip(prefills, is_last, strict=True)
        if last is wanted
    ]
