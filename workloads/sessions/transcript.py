"""Transcripts: the text of the requests of one session so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from workloads._checks import MAX_TOKENS, whole
from workloads.draws.by_position import Draws
from workloads.errors import WorkloadError
from workloads.prefixes import NoPrefixes, drawn_prefixes
from workloads.spec import RequestSpec, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from workloads.draws.streams import Streams
    from workloads.prefixes import Prefix, PrefixStructure

PlanT = TypeVar("PlanT")

# Sessions drawn at once: few enough that long ones do not fill the memory.
_PART = 1024


class Numbering:
    """Hands out ids of requests and of their own texts, behind the shared texts."""

    def __init__(self, num_shared_texts: int) -> None:
        self._num_shared_texts = num_shared_texts
        self._next_id = 0

    def take(self) -> tuple[int, int, int]:
        """Return a request id, the segment of its own prompt text and of its output."""
        number = self._next_id
        self._next_id += 1
        return number, 2 * (self._num_shared_texts + number), 2 * number + 1


class Transcript:
    """A growing conversation: each prompt is all that was said before, and new text."""

    def __init__(
        self,
        session_id: int,
        arrival_s: float,
        prefix: Prefix,
        numbering: Numbering,
        max_context_tokens: int | None,
    ) -> None:
        self.session_id = session_id
        self.arrival_s = arrival_s
        self.said: tuple[Segment, ...] = prefix
        self.num_tokens = sum(tokens for _, tokens in prefix)
        self.previous_id: int | None = None
        self._numbering = numbering
        self._most = math.inf if max_context_tokens is None else max_context_tokens
        if self.num_tokens + 2 > self._most:
            raise WorkloadError(
                f"max_context_tokens must exceed what prompts share; got "
                f"{max_context_tokens}, and a shared prefix of {self.num_tokens}; "
                "raise it or shorten prefixes"
            )

    def fits(self, num_new_tokens: int) -> bool:
        """Whether so many tokens, prompt and output, can still be said."""
        return self.num_tokens + num_new_tokens <= self._most

    def first(self, new_tokens: int, output_tokens: int, delay_s: float) -> RequestSpec:
        """Return the first turn, cut to fit: its text, then its output."""
        room = self._most - self.num_tokens
        new_tokens = int(min(new_tokens, room - 1))
        return self.turn(
            new_tokens, int(min(output_tokens, room - new_tokens)), delay_s
        )

    def turn(self, new_tokens: int, output_tokens: int, delay_s: float) -> RequestSpec:
        """Return the next turn: `new_tokens` of new text, and its output."""
        request = self.aside(new_tokens, output_tokens, delay_s)
        self.said = (*request.prompt, (request.output_segment, output_tokens))
        self.num_tokens += new_tokens + output_tokens
        self.previous_id = request.request_id
        return request

    def aside(self, new_tokens: int, output_tokens: int, delay_s: float) -> RequestSpec:
        """Return a request from here that the conversation does not go on from."""
        request_id, text, output_segment = self._numbering.take()
        own = ((text, new_tokens),) if new_tokens else ()
        return RequestSpec(
            request_id=request_id,
            arrival_s=self.arrival_s,
            prompt=(*self.said, *own),
            num_output_tokens=output_tokens,
            output_segment=output_segment,
            session_id=self.session_id,
            previous_id=self.previous_id,
            delay_s=delay_s,
        )

    def quote(self, request: RequestSpec) -> None:
        """Take the output of another request into the conversation."""
        self.said = (*self.said, (request.output_segment, request.num_output_tokens))
        self.num_tokens += request.num_output_tokens


def told(
    arrivals_s: Sequence[float],
    streams: Streams,
    prefixes: PrefixStructure | None,
    max_context_tokens: int | None,
    drawn: Callable[[Draws], Iterable[PlanT]],
) -> Iterator[tuple[Transcript, PlanT]]:
    """Yield a fresh transcript of each session, and the plan of the session.

    `drawn` makes the plans of a run of sessions; few at a time, so that they fit into
    memory.
    """
    structure = prefixes or NoPrefixes()
    of_session = drawn_prefixes(structure, len(arrivals_s), streams)
    numbering = Numbering(structure.num_texts)
    for start in range(0, len(arrivals_s), _PART):
        draws = Draws(streams, start, min(_PART, len(arrivals_s) - start))
        for session, plan in enumerate(drawn(draws), start=start):
            transcript = Transcript(
                session,
                arrivals_s[session],
                of_session[session],
                numbering,
                max_context_tokens,
            )
            yield transcript, plan


def by_depth(
    draws: Draws, depth: int, draw: Callable[[int], NDArray[np.generic]]
) -> NDArray[np.generic]:
    """Return the draws at each depth for each session, a row a session."""
    if not depth:
        return np.zeros((draws.num_draws, 0))
    return np.stack([draw(each) for each in range(depth)], axis=1)


def check_context(max_context_tokens: int | None) -> None:
    if max_context_tokens is not None:
        remedy = "give tokens, such as 32768, or leave it out for no limit"
        whole("max_context_tokens", max_context_tokens, 2, MAX_TOKENS, remedy)
