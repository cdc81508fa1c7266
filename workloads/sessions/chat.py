"""Chats: people who read an answer, think, and go on from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads.draws.by_position import check_quantile
from workloads.draws.counts import CountDistribution
from workloads.draws.durations import DurationDistribution
from workloads.lengths import LengthDistribution
from workloads.prefixes import PrefixStructure, check_prefixes
from workloads.sessions.transcript import Transcript, by_depth, check_context, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.draws.by_position import Draws
    from workloads.draws.streams import Streams
    from workloads.spec import RequestSpec


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations of several turns.

    The prompt of a turn is the prompt before, the answer to it, and new text; it is
    sent when the user has thought, from the end of the answer on.

    Parameters
    ----------
    turns
        Turns of a conversation; there is always one.
    prompt_tokens
        New text of each turn.
    output_tokens
        Answers.
    think_s
        Seconds from the end of an answer to the next turn. That of the first turn is
        spent by a user who has just become free (see `RequestSpec.delay_s`).
    first_prompt_tokens
        New text of the first turn; None for the same as later on.
    prefixes
        Beginnings of first prompts, such as a system prompt; None for none.
    max_context_tokens
        A conversation ends before the turn whose prompt and answer would be longer
        than this together. A first turn is cut to fit. None for no limit.

    Raises
    ------
    WorkloadError
        If a parameter is out of range.
    """

    turns: CountDistribution
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    think_s: DurationDistribution
    first_prompt_tokens: LengthDistribution | None = None
    prefixes: PrefixStructure | None = None
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        check_quantile("turns", self.turns, CountDistribution)
        check_quantile("prompt_tokens", self.prompt_tokens, LengthDistribution)
        check_quantile("output_tokens", self.output_tokens, LengthDistribution)
        check_quantile("think_s", self.think_s, DurationDistribution)
        if self.first_prompt_tokens is not None:
            name = "first_prompt_tokens"
            check_quantile(name, self.first_prompt_tokens, LengthDistribution)
        if self.prefixes is not None:
            check_prefixes(self.prefixes)
        check_context(self.max_context_tokens)

    def requests(
        self, arrivals_s: Sequence[float], streams: Streams
    ) -> Iterator[RequestSpec]:
        for transcript, turns in told(
            arrivals_s, streams, self.prefixes, self.max_context_tokens, self._drawn
        ):
            yield from _said(transcript, turns)

    def _drawn(self, draws: Draws) -> Iterator[list[tuple[int, int, float]]]:
        """Yield the turns of each session: new text, answer, time to think before."""
        numbers = draws.counts("sessions/turns", self.turns).clip(min=1)
        depth = int(numbers.max())

        def prompts(turn: int) -> Any:
            first = self.first_prompt_tokens if turn == 0 else None
            lengths = first or self.prompt_tokens
            return draws.lengths(f"sessions/prompt_tokens/{turn}", lengths)

        def outputs(turn: int) -> Any:
            return draws.lengths(f"sessions/output_tokens/{turn}", self.output_tokens)

        def thoughts(turn: int) -> Any:
            return draws.seconds(f"sessions/think_s/{turn}", self.think_s)

        tables = [by_depth(draws, depth, draw) for draw in (prompts, outputs, thoughts)]
        for row, number in enumerate(numbers.tolist()):
            columns = [table[row, :number].tolist() for table in tables]
            yield list(zip(*columns, strict=True))


def _said(
    transcript: Transcript, turns: list[tuple[int, int, float]]
) -> Iterator[RequestSpec]:
    (prompt, output, think_s), *later = turns
    yield transcript.first(prompt, output, think_s)
    for prompt, output, think_s in later:
        if not transcript.fits(prompt + output):
            return
        yield transcript.turn(prompt, output, think_s)
