"""Where chunks of prompts must end for states to be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.v1.groups.mamba import Checkpoints, prefill_end
from cache.v1.specs import MambaCacheMode, MambaSpec

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout
    from cache.v1.tables import TableRequest


@dataclass(frozen=True, slots=True)
class ChunkEnds:
    """Where a prompt's chunks must end for its states to be kept.

    Parameters
    ----------
    checkpoints
        Of the layers with states; all of them can write checkpoints, or none.
    block_size
        Tokens after which a state can be kept.
    splits_blocks
        Whether hits end inside blocks.
    most_chunk_tokens
        Most tokens of a request in a step.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py``
    (`_mamba_block_aligned_split`).
    """

    checkpoints: Checkpoints
    block_size: int
    splits_blocks: bool
    most_chunk_tokens: int

    @classmethod
    def of(cls, layout: KVCacheLayout, most_chunk_tokens: int) -> ChunkEnds | None:
        """Return the ends that states of a layout ask for; None if there are none."""
        states = [
            group.spec
            for group in layout.groups
            if isinstance(group.spec, MambaSpec)
            and group.spec.mamba_cache_mode is MambaCacheMode.ALIGN
        ]
        if not states:
            return None
        spec = min(states, key=lambda spec: spec.num_checkpoint_blocks)
        unit, alignment = layout.hash_block_size, layout.cache_hit_alignment
        block_size = min(group.spec.block_size for group in layout.groups)
        return cls(
            Checkpoints(spec, unit, alignment),
            block_size,
            alignment == unit < block_size,
            most_chunk_tokens,
        )

    def cut(
        self, request: TableRequest, start: int, num_new_tokens: int, junction: int
    ) -> int:
        """Return how many of the next tokens the chunk that begins at `start` gets.

        Parameters
        ----------
        request
            Whose prompt, or whose tokens before a preemption, are computed.
        start
            Tokens computed, hits included.
        num_new_tokens
            That budget and limits leave to it.
        junction
            See `cache.v1.groups.lookup.Hit`.
        """
        last_token = prefill_end(request)
        if start >= last_token:
            return num_new_tokens
        block_size, end = self.block_size, start + num_new_tokens
        writes_inside = end >= last_token and bool(
            self.checkpoints.within(start, end, last_token)
        )
        if end < last_token:
            whole = end // block_size * block_size
            if whole > start or block_size <= self.most_chunk_tokens:
                end = whole
        stops = []
        if not writes_inside:
            last_block = (request.num_tokens - 1) // block_size * block_size
            stops.append(last_block)
            if start % block_size:
                stops.append((start // block_size + 1) * block_size)
            if self.splits_blocks:
                unit = self.checkpoints.hash_block_size
                last_hash = (request.num_prompt_tokens - 1) // unit * unit
                if last_hash > last_block:
                    stops.append(last_hash)
        if start < junction < end:
            stops.append(start + (junction - start) // block_size * block_size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(end - start, 0)
