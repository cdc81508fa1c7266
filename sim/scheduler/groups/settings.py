"""Settings of the schedulers before V1, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.errors import SchedulerError
from sim.scheduler.base import PreemptionMode
from sim.scheduler.settings import at_least

if TYPE_CHECKING:
    from sim.scheduler.victims.base import VictimPolicy


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets and rules of a step; each generation reads those that it has.

    Parameters
    ----------
    max_num_batched_tokens
        Token budget of a step (`cacheflow`, `v0_2`: of its prompts).
    max_num_seqs
        Most sequences that run at a time.
    max_model_len
        Longest sequence, prompt and output.
    max_paddings
        Most padding tokens of a prompt batch (`v0_2`).
    preemption_mode
        Forces a mode, given as such or by its name (``"swap"``, as in vLLM); None for
        the generation's own rule.
    policy
        ``"fcfs"`` or ``"priority"`` (`v0`).
    enable_chunked_prefill
        Prompts in chunks, beside decodes (`v0`).
    num_lookahead_slots
        Slots kept ahead for speculative tokens (`v0`).
    delay_factor
        A prompt waits this many times the length of the last prompt step (`v0`).
    max_num_partial_prefills, max_long_partial_prefills, long_prefill_token_threshold
        Prompts that are prefilled in chunks side by side, how many of them may be
        long, and from where on a prompt is long (`v0`).
    preemption_victim
        Chooses the group to preempt; None for the last of the running queue.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_paddings: int = 256
    preemption_mode: PreemptionMode | None = None
    policy: str = field(default="fcfs", metadata={"key": "scheduling_policy"})
    enable_chunked_prefill: bool = False
    num_lookahead_slots: int = 0
    delay_factor: float = field(default=0.0, metadata={"key": "scheduler_delay_factor"})
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    preemption_victim: VictimPolicy | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "preemption_mode", _mode(self.preemption_mode))
        at_least(
            1,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
        )
        at_least(
            0,
            max_paddings=self.max_paddings,
            num_lookahead_slots=self.num_lookahead_slots,
            delay_factor=self.delay_factor,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )
        if self.policy not in ("fcfs", "priority"):
            raise SchedulerError(
                f"policy must be 'fcfs' or 'priority', got {self.policy!r}"
            )


def _mode(name: PreemptionMode | str | None) -> PreemptionMode | None:
    if name is None or isinstance(name, PreemptionMode):
        return name
    modes = {mode.value: mode for mode in PreemptionMode}
    if name not in modes:
        raise SchedulerError(
            f"preemption_mode must be null or one of {', '.join(modes)}, got {name!r}"
        )
    return modes[name]
