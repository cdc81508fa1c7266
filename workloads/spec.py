"""Requests as a workload hands them to the simulator: one immutable value each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Segment = tuple[int, int]
"""``(segment_id, num_tokens)``: the first ``num_tokens`` tokens of a stream.

Two segments with the same id hold the same tokens, as far as both reach. Ids are
non-negative; everything else about the text is unknown and not needed.
"""


class RequestSpec(NamedTuple):
    """A request as the workload knows it.

    A named tuple and no dataclass: traces have millions of requests, and a tuple is
    made in a quarter of the time. Change a field with ``spec._replace(field=value)``;
    read fields by name, as their positions are no promise.

    Parameters
    ----------
    request_id
        Position in arrival order, from 0; also the tie-break of equal arrivals.
    arrival_s
        Arrival time in seconds from the start of the workload. Of a follow-up, the
        earliest that it can be: that of the request before plus `delay_s`.
    prompt
        Prompt identity as segments, concatenated; equal leading segments mean an
        equal prefix. Token lists are never materialised.
    num_output_tokens
        Tokens that will be generated. Known to the workload alone: no scheduling
        policy may read it (invariant 4).
    output_segment
        Segment id of the generated text, so that a later prompt can quote it.
    max_tokens
        Limit that the client states, or None for the engine's own limit. This is
        the only bound on the output that a policy may see.
    priority
        Smaller is more urgent.
    best_of
        Samples of the prompt.
    beam_width
        Beams, if more than 1; there is then no parallel sampling.
    beam_switch_share
        Share of a beam's steps in which another beam's continuation takes its place.
    slo_class
        Name of the service level that the client was promised, for reports; empty for
        none. No policy reads it.
    session_id
        Conversation or agent that the request belongs to, or None.
    previous_id
        Request that must have ended before this one is sent, or None if it waits for
        none. Always smaller than `request_id`.
    delay_s
        Seconds from that end to the sending of this one: the time to think, or that a
        tool takes. Of a request that waits for none, seconds before it that a user
        spends who has just become free (see `max_concurrent_users`).
    ends_at_stop
        Whether a stop token ends the output, which no engine can foresee. Otherwise the
        client asks for exactly `num_output_tokens` and ignores stop tokens, so the
        engine knows the length from the start.
    accepted_drafts
        Drafts that a real engine accepted, a number for each of the request's
        verifications, in order; empty where that was not recorded. Only the output of
        a step looks at it (`workloads.acceptance`).
    """

    request_id: int
    arrival_s: float
    prompt: tuple[Segment, ...]
    num_output_tokens: int
    output_segment: int
    max_tokens: int | None = None
    priority: int = 0
    best_of: int = 1
    beam_width: int = 1
    beam_switch_share: float = 0.0
    slo_class: str = ""
    session_id: int | None = None
    previous_id: int | None = None
    delay_s: float = 0.0
    ends_at_stop: bool = True
    accepted_drafts: tuple[int, ...] = ()

    @property
    def output_limit(self) -> int | None:
        """Most output tokens that the engine is told of, or None for its own limit."""
        if self.ends_at_stop:
            return self.max_tokens
        return min(self.max_tokens or self.num_output_tokens, self.num_output_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        prompt = self.prompt
        if len(prompt) == 1:  # most of them, and asked for at every arrival
            return prompt[0][1]
        return sum([num_tokens for _, num_tokens in prompt])

    @property
    def num_sequences(self) -> int:
        """Continuations of the prompt: beams, or samples."""
        return self.beam_width if self.beam_width > 1 else self.best_of


made: Callable[[Iterable[Any]], RequestSpec] = partial(tuple.__new__, RequestSpec)
"""As `RequestSpec._make`, without its Python code."""
