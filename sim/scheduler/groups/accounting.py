"""From decisions about groups to the engine's view: tokens, shapes, recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.sequences import SequenceStatus
from sim.scheduler.batch import Batch
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from cache.stats import PrefixCacheStats
    from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup
    from sim.scheduler.groups.sequence import Sequence

_RUNNING = SequenceStatus.RUNNING


def account(
    output: GroupSchedulerOutput,
    now_s: float,
    sliding_window: int | None,
    stats: PrefixCacheStats | None,
) -> None:
    """Advance computed tokens and fill the engine's view of the output."""
    batch = Batch(0, sliding_window)
    batch.num_decodes = output.num_clocked
    batch.num_decode_context_tokens = output.num_clocked_tokens
    for entry in output.scheduled_seq_groups:
        request = entry.seq_group.request
        assert request is not None
        if request.status is not RequestStatus.RUNNING:
            _admit(request, entry, output, now_s, stats)
        if entry.is_prefill:
            num_tokens = _prefill(entry, request, batch)
        else:
            num_tokens = 0
            for seq in entry.seq_group.get_seqs(_RUNNING):
                num_tokens += 1
                length = seq.get_len()
                seq.num_computed_tokens = length
                batch.add(1, length)
                entry.queries.append((seq.seq_id, 1, length))
        output.scheduled.append(request)
        output.num_scheduled_tokens.append(num_tokens)
    output.shape = batch.shape()._replace(
        num_swapped_in_blocks=len(output.blocks_to_swap_in),
        num_swapped_out_blocks=len(output.blocks_to_swap_out),
        num_copied_blocks=len(output.blocks_to_copy),
    )
    output.num_recomputed_tokens = batch.num_recomputed_tokens


def num_lost_tokens(seqs: list[Sequence]) -> int:
    """Return the computed tokens of a group's sequences, a shared prompt once."""
    num_tokens = sum(seq.num_computed_tokens for seq in seqs)
    if len(seqs) > 1:
        num_tokens -= (len(seqs) - 1) * seqs[0].get_prompt_len()
    return num_tokens


def _admit(
    request: Request,
    entry: ScheduledSequenceGroup,
    output: GroupSchedulerOutput,
    now_s: float,
    stats: PrefixCacheStats | None,
) -> None:
    """Note that a request runs, for the first time or again."""
    resumed = request.status is not RequestStatus.WAITING
    if not resumed:
        request.first_scheduled_s = now_s
        request.num_cached_tokens = entry.num_cached_tokens
    if stats is not None and entry.is_prefill:
        stats.record(
            entry.seq_group.first_seq.get_len(),
            entry.num_cached_tokens,
            preempted=resumed,
        )
    output.admitted.append(request)
    request.move_to(RequestStatus.RUNNING)


def _prefill(entry: ScheduledSequenceGroup, request: Request, batch: Batch) -> int:
    """Count a prefill and return its computed (not cached) tokens."""
    seqs = entry.seq_group.get_seqs(_RUNNING)
    # A group of vLLM 0.1.0 may revive finished sequences: its prefill is as long as
    # the first of them and computes nothing for the others.
    revived = entry.token_chunk_size == seqs[0].get_len()
    if len(seqs) > 1 and seqs[0].get_output_len() and not revived:
        return _recompute_group(entry, request, batch, seqs)
    after = entry.num_computed_tokens + entry.token_chunk_size
    for seq in seqs:
        seq.update_num_computed_tokens(
            min(after, seq.get_len()) - seq.num_computed_tokens
        )
    # A whole prompt in the cache: its last token is computed for the logits.
    num_new_tokens = max(entry.token_chunk_size - entry.num_cached_tokens, 1)
    _note_recomputed(request, after - num_new_tokens, after, batch)
    batch.add(num_new_tokens, after)
    entry.queries.append((seqs[0].seq_id, num_new_tokens, after))
    return num_new_tokens


def _recompute_group(
    entry: ScheduledSequenceGroup, request: Request, batch: Batch, seqs: list[Sequence]
) -> int:
    """Count a recomputation of several sequences: the prompt once, then each."""
    num_prompt_tokens = seqs[0].get_prompt_len()
    for seq in seqs:
        seq.update_num_computed_tokens(seq.get_len() - seq.num_computed_tokens)
    _note_recomputed(request, 0, entry.token_chunk_size, batch)
    batch.add(num_prompt_tokens, num_prompt_tokens)
    entry.queries.append((seqs[0].seq_id, num_prompt_tokens, num_prompt_tokens))
    for seq in seqs:
        batch.add(seq.get_output_len(), seq.get_len())
        entry.queries.append((seq.seq_id, seq.get_output_len(), seq.get_len()))
    return entry.token_chunk_size


def _note_recomputed(request: Request, before: int, after: int, batch: Batch) -> None:
    """Count the tokens from `before` to `after` that were computed before."""
    if before < request.num_recompute_tokens:
        num_again = min(after, request.num_recompute_tokens) - before
        request.num_recomputed_tokens += num_again
        batch.num_recomputed_tokens += num_again
