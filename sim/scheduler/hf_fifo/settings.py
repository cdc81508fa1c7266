"""Arguments of the `hf_fifo` scheduler, checked."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from sim.errors import SchedulerError

if TYPE_CHECKING:
    from sim.scheduler.victims.base import VictimPolicy


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the `hf_fifo` scheduler.

    Parameters
    ----------
    max_num_batched_tokens
        Token budget of a step (the release's ``max_batch_tokens``).
    max_num_seqs
        Most requests in a batch (``max_requests_per_batch``); more may be active.
    max_model_len
        Longest sequence, prompt and output; the release itself has no such limit.
    safety_margin
        Share of the pool; while less is free, a batch takes prompt tokens of its first
        request only.
    max_blocks_per_request
        Entries of a row of the block table: batches of decodes whose contexts are
        shorter have no KV-read budget. 0 where no such table is used.
    preemption_mode
        ``"recompute"`` leaves the CPU pool out; None for the release's rule. Swapping
        cannot be forced: what does not fit the pool is computed again.
    preemption_victim
        Which of the starved requests is evicted, or None for the newest; see
        `sim.scheduler.victims`.

    Raises
    ------
    SchedulerError
        Where a value is impossible.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    safety_margin: float = 0.15
    max_blocks_per_request: int = 32
    preemption_mode: str | None = None
    preemption_victim: VictimPolicy | None = None

    def __post_init__(self) -> None:
        if self.preemption_mode not in (None, "recompute"):
            raise SchedulerError(
                f"preemption_mode must be recompute or null in hf_fifo, got "
                f"'{self.preemption_mode}': what does not fit swap_space is computed "
                f"again"
            )
        for name, least, most in (
            ("max_num_batched_tokens", 1, inf),
            ("max_num_seqs", 1, inf),
            ("max_model_len", 1, inf),
            ("safety_margin", 0, 1),
            ("max_blocks_per_request", 0, inf),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                bounds = f"at least {least}" if most == inf else f"{least} to {most}"
                raise SchedulerError(f"{name} must be {bounds}, got {value}")
