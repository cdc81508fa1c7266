"""What the model does with a batch: tokens appear, and outputs end.

The only place that knows how long an output will be (invariant 4): schedulers decide
first, this part then says which requests got a token and which are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from sim.scheduler.base import SchedulerOutput

# Looked up once: members of an enum are found by a call.
_RUNNING = RequestStatus.RUNNING
_STOPPED = RequestStatus.FINISHED_STOPPED
_LENGTH_CAPPED = RequestStatus.FINISHED_LENGTH_CAPPED


def sample(output: SchedulerOutput, step: int, end_s: float) -> list[Request]:
    """Give a token to every request of the batch that has caught up.

    Parameters
    ----------
    output
        The scheduler's decisions; computed tokens have advanced.
    step
        Index of the step.
    end_s
        When the step ends, in seconds.

    Returns
    -------
    list of Request
        Requests that this output finished, in batch order, their status set.

    Notes
    -----
    A request whose computed tokens reach its length gets one token, others (prompts
    in mid-way) none. It ends at ``length >= max_model_len``, at its max_tokens, or
    where the workload says. Source: vLLM 0.11.2, ``vllm/v1/core/sched/utils.py``
    (`check_stop`), with the end of sequence known from the workload.
    """
    finished: list[Request] = []
    for request in output.scheduled:
        num_tokens = request.num_tokens
        if request.num_computed_tokens == num_tokens:
            num_tokens += 1
            request.num_tokens = num_tokens
            if num_tokens >= request.num_tokens_at_event and _event(
                request, step, end_s
            ):
                finished.append(request)
    return finished


def _event(request: Request, step: int, end_s: float) -> bool:
    """Handle the first token of a streak, or the last token; True if it is done."""
    last = last_num_tokens(request)
    if not request.is_streaking:
        request.begin_streak(step)
        request.num_tokens_at_event = last
        if request.num_output_tokens == 1:
            request.first_token_s = end_s
    if request.num_tokens < last:
        return False
    request.end_streak()
    finish(request, end_s)
    return True


def last_num_tokens(request: Request) -> int:
    """Return the length at which a request ends, prompt included."""
    oracle, most = request.oracle_num_tokens, request.max_num_tokens
    return oracle if oracle < most else most


def finish(request: Request, end_s: float) -> None:
    """End a request that has got its last token."""
    request.finish_s = end_s
    is_whole = request.num_tokens >= request.oracle_num_tokens
    status = _STOPPED if is_whole else _LENGTH_CAPPED
    if request.status is _RUNNING:  # as `move_to`, which costs a call and a search
        request.status = status
    else:
        request.move_to(status)
