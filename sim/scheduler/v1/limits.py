"""Which requests the V1 scheduler could never serve (invariant 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.v1.planning import blocks_per_request
from cache.v1.specs import MambaSpec

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout, KVCacheSpec
    from sim.scheduler.request import Request
    from sim.scheduler.v1.settings import Settings


def admission_error(
    request: Request,
    settings: Settings,
    num_usable_blocks: int,
    layout: KVCacheLayout,
) -> str | None:
    """Return why `request` can never be served, or None.

    What passes is served at last whatever runs beside it: alone in the engine it is
    admitted, and every chunk gets its blocks. A watermark does not count, since it
    does not hold while nothing runs.

    Parameters
    ----------
    request
        A request that has just arrived.
    settings, num_usable_blocks, layout
        Of the scheduler that it would join, its pool, and the groups that share it.
    """
    num_tokens = request.num_prompt_tokens
    if num_tokens >= settings.max_model_len:
        return (
            f"a prompt of {num_tokens} tokens leaves no room for output within "
            f"max_model_len {settings.max_model_len}"
        )
    for what, length in (
        ("a prompt", num_tokens),
        ("a prompt and its longest output", request.max_num_tokens),
    ):
        error = _budget_error(length, settings)
        if error is not None:
            return f"{what} of {length} tokens {error}"
        num_blocks = _most_blocks(length, settings, layout)
        if num_blocks > num_usable_blocks:
            return (
                f"{what} of {length} tokens needs {num_blocks} blocks; the cache has "
                f"{num_usable_blocks}"
            )
    return _load_error(request, settings, num_usable_blocks, layout)


def drafts_error(settings: Settings) -> str | None:
    """Return why a prompt of which one token is left is never computed, or None.

    The release waits for ever, too. Where the prompt ends at `max_model_len` it is
    computed without drafts.
    """
    drafts = settings.speculative_config
    if drafts is None:
        return None
    budget = min(
        settings.token_budget, settings.max_num_batched_tokens - drafts.num_draft_slots
    )
    num_padded = 1 + drafts.num_speculative_tokens
    if budget >= num_padded:
        return None
    return (
        f"the last token of a loaded or cached prompt is computed with empty drafts, "
        f"{num_padded} tokens in all; a step has {budget} (raise "
        f"max_num_scheduled_tokens or max_num_batched_tokens)"
    )


def _load_error(
    request: Request,
    settings: Settings,
    num_usable_blocks: int,
    layout: KVCacheLayout,
) -> str | None:
    """Say that a prompt would never be loaded, or never be computed with drafts."""
    drafts = settings.speculative_config
    is_remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
    if drafts is None or not is_remote:
        return None
    num_tokens = request.num_prompt_tokens
    num_padded = 1 + drafts.num_speculative_tokens
    if num_tokens + num_padded <= settings.max_model_len:
        error = drafts_error(settings)
        if error is not None:
            return error
    num_blocks = sum(
        -(-number // group.spec.block_size)
        for group in layout.groups
        for number in (num_tokens, drafts.num_step_tokens)
    )
    if num_blocks <= num_usable_blocks:
        return None
    return (
        f"to load a prompt of {num_tokens} tokens and verify drafts takes {num_blocks} "
        f"free blocks; the cache has {num_usable_blocks}"
    )


def _budget_error(length: int, settings: Settings) -> str | None:
    """Say that a sequence, preempted at this length, would block the queue.

    It is computed again in one piece where prompts are not chunked, output included.
    """
    budget = settings.token_budget
    if settings.enable_chunked_prefill or settings.has_steady_threshold:
        return None  # in the latter case the threshold chunks it
    if length <= budget:
        return None
    return (
        f"must be computed in one step, chunked prefill being off; a step has {budget}"
    )


def _most_blocks(length: int, settings: Settings, layout: KVCacheLayout) -> int:
    """Return how many blocks a sequence of this length ever needs at a time."""
    # The test on admission counts with the whole budget, whatever the chunks.
    num_new_tokens = (
        settings.max_in_flight_tokens
        if settings.reserve_full_isl
        else settings.most_new_tokens
    )
    num_blocks, num_slots = 0, length
    if (drafts := settings.speculative_config) is not None:
        # Its last output may come of a step that verifies drafts.
        most = drafts.num_speculative_tokens + drafts.num_lookahead_tokens
        num_slots = min(length + most, settings.max_model_len)
    for group in layout.groups:
        spec = group.spec
        most = blocks_per_request(spec, settings.max_model_len, num_new_tokens)
        if layout.cache_hit_alignment < spec.block_size:
            most += 1  # the copy of a block that is hit in part
        num_entries = -(-num_slots // spec.block_size) + _num_speculative_blocks(spec)
        num_blocks += num_entries if num_entries < most else most
    return num_blocks


def _num_speculative_blocks(spec: KVCacheSpec) -> int:
    return spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0
