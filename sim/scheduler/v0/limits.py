"""Requests that the V0 scheduler can serve (invariant 7): none may stall a run.

The reference has no such test. It ignores a request when it meets it (also after it has
been preempted), waits for ever, or ends on an assertion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.base import PreemptionMode

if TYPE_CHECKING:
    from sim.scheduler.groups.settings import SchedulerConfig
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig


class AdmissionLimits:
    """Requests that, alone in an empty engine, come to their end whatever happens."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        watermark_blocks: int,
    ) -> None:
        self._config = config
        self._block_size = cache_config.block_size
        self._watermark_blocks = watermark_blocks
        # A sliding window takes one block for good: the null block.
        has_window = cache_config.sliding_window is not None
        self._num_usable_blocks = cache_config.num_gpu_blocks - has_window

    @property
    def _may_recompute(self) -> bool:
        """Whether a preemption may send a group back to the waiting queue."""
        config = self._config
        evicts = config.policy == "priority" and not config.enable_chunked_prefill
        return evicts or config.preemption_mode is not PreemptionMode.SWAP

    @property
    def max_servable_tokens(self) -> int:
        """Longest single sequence that pool and budgets let come to its end.

        ``max_model_len`` is not looked at; it is what this bounds.
        """
        config = self._config
        size = self._block_size
        ahead = config.num_lookahead_slots
        usable = self._num_usable_blocks
        longest = min(
            (usable - self._watermark_blocks) * size - ahead,
            (usable - 1 - -(-ahead // size)) * size - ahead + 1,
        )
        if self._may_recompute and not config.enable_chunked_prefill:
            longest = min(longest, config.max_num_batched_tokens)
        return max(longest, 0)

    def error(self, request: Request) -> str | None:
        """Return why `request` can never be served, or None."""
        return (
            self._width_error(request)
            or self._prompt_error(request)
            or self._recompute_error(request)
            or self._pool_error(request)
        )

    def _width_error(self, request: Request) -> str | None:
        width = request.num_sequences
        for key, limit in (
            ("max_num_seqs", self._config.max_num_seqs),
            ("max_num_batched_tokens", self._config.max_num_batched_tokens),
        ):
            if width > limit:
                return (
                    f"{width} sequences cannot run within {key} {limit}; raise it, or "
                    f"sample fewer"
                )
        return None

    def _prompt_error(self, request: Request) -> str | None:
        config = self._config
        num_tokens = request.num_prompt_tokens
        if num_tokens > config.max_model_len:
            return (
                f"a prompt of {num_tokens} tokens exceeds max_model_len "
                f"{config.max_model_len}"
            )
        budget = config.max_num_batched_tokens
        if num_tokens <= budget:
            return None
        if not config.enable_chunked_prefill:
            return (
                f"a prompt of {num_tokens} tokens exceeds max_num_batched_tokens "
                f"{budget}; raise it, or set enable_chunked_prefill"
            )
        if config.preemption_mode is PreemptionMode.SWAP:
            return (
                f"a prompt of {num_tokens} tokens that is swapped out between two "
                f"chunks comes back as a whole only, which exceeds "
                f"max_num_batched_tokens {budget}; raise it, or do not force "
                f"preemption_mode"
            )
        return None

    def _recompute_error(self, request: Request) -> str | None:
        config = self._config
        budget = config.max_num_batched_tokens
        if config.enable_chunked_prefill or not self._may_recompute:
            return None
        if request.max_num_tokens > budget:
            return (
                f"a sequence that may grow to {request.max_num_tokens} tokens could "
                f"not be recomputed within max_num_batched_tokens {budget}; raise it, "
                f"lower max_tokens, or set enable_chunked_prefill"
            )
        return None

    def _pool_error(self, request: Request) -> str | None:
        """Weigh the whole group at its longest, nothing shared: swapping unshares."""
        size = self._block_size
        width = request.num_sequences
        ahead = self._config.num_lookahead_slots
        most_slots = request.max_num_tokens + ahead
        num_held = width * -(-most_slots // size)
        # A step counts each block that it writes to as one more, needed or not.
        num_written = width * (1 + -(-ahead // size))
        before_last = width * -(-(most_slots - 1) // size)
        need = max(num_held + self._watermark_blocks, before_last + num_written)
        if need > self._num_usable_blocks:
            return (
                f"{width} x {request.max_num_tokens} tokens take {need} blocks, with "
                f"{self._watermark_blocks} below the watermark and those a step writes "
                f"to; the cache has {self._num_usable_blocks}; state "
                f"max_tokens (workload.max_tokens), or lower max_model_len"
            )
        return None
