"""ShareGPT conversations: JSON, turns of humans and of a model, without times."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads._checks import MAX_TOKENS, between, check_role, positive, whole
from workloads.arrivals.base import MAX_REQUESTS, ArrivalProcess, arrival_times_s
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError
from workloads.requests.chains import in_order
from workloads.spec import RequestSpec
from workloads.traces.parsing.files import BadLines, no_rows, trace_path, warn
from workloads.traces.parsing.json_values import json_values
from workloads.traces.parsing.values import MAX_THINK_S, whole_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workloads.spec import Segment

_ANSWERING = ("gpt", "assistant", "chatgpt", "bing", "bard")


class _Turn(NamedTuple):
    is_answer: bool
    digest: bytes
    """Of the words, which are too many to keep."""
    num_tokens: int


class _MalformedError(Exception):
    """A conversation that is none; the message says why."""


@dataclass(frozen=True, slots=True)
class ShareGptTraceReader:
    """Reader of ShareGPT's conversations, each a session of turns.

    A turn's prompt is all that was said before, and the human's new words; its output
    is the model's answer, as long as the one in the file. It is sent ``think_time_s``
    after the answer before ended. Conversations that begin with the same turns share
    that text, whole turns up to the first answer.

    The file has no times and no token counts. Lengths are characters times
    ``tokens_per_character``, at least one token for any text, or are taken from the
    key ``tokens_key`` of each turn. Conversations begin all at 0, or as ``arrivals``
    says.

    Parameters
    ----------
    path
        JSON file: an array of conversations, or one a line; plain or compressed (gzip,
        zstd).
    tokens_per_character
        Tokens of a character; about 0.25 for English text and current tokenizers.
    tokens_key
        Key of a turn under which the file holds its number of tokens.
    arrivals
        When conversations begin; None for all at 0.
    seed
        Seed of `arrivals`.
    think_time_s
        Seconds from the end of an answer to the next turn.
    max_turns
        Keep the first so many answered turns of each conversation.
    skip_bad_lines
        Leave malformed conversations out with a warning, instead of refusing the first.
        What is no JSON is refused anyway: where the next one begins is unknown.

    Raises
    ------
    WorkloadError
        If not exactly one of ``tokens_per_character`` and ``tokens_key`` is given, or a
        value is out of range.

    Notes
    -----
    A conversation has its turns under ``conversations`` or ``messages``, a turn who
    speaks under ``from`` or ``role`` (``gpt``, ``chatgpt``, ``bing``, ``bard`` and
    ``assistant`` answer; all else, such as ``human`` and ``system``, counts as words of
    the prompt) and what they say under
    ``value`` or ``content``. Empty turns are nothing; conversations without an answer
    are left out with a warning.

    Source: ``ShareGPT_V3_unfiltered_cleaned_split.json`` as in vLLM's benchmarks.
    """

    path: str | Path
    tokens_per_character: float | None = None
    tokens_key: str | None = None
    arrivals: ArrivalProcess | None = None
    seed: int = 0
    think_time_s: float = 0.0
    max_turns: int | None = None
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))
        if (self.tokens_per_character is None) == (self.tokens_key is None):
            given = "neither" if self.tokens_key is None else "both"
            raise WorkloadError(
                "lengths must come from tokens_per_character or from tokens_key; got "
                f"{given}; give tokens_per_character=0.25 for English text"
            )
        if self.tokens_per_character is not None:
            remedy = "0.25 is usual for English text"
            positive("tokens_per_character", self.tokens_per_character, remedy)
        elif not isinstance(self.tokens_key, str):
            remedy = "give the name of a key"
            raise WorkloadError(
                f"tokens_key must be text; got {self.tokens_key!r}; {remedy}"
            )
        if self.arrivals is not None:
            check_role("arrivals", self.arrivals, ArrivalProcess, "times_s(self, rng)")
        remedy = "give seconds, or leave it out for none"
        between("think_time_s", self.think_time_s, 0, MAX_THINK_S, remedy)
        if self.max_turns is not None:
            remedy = "give a number of turns, or leave it out for all"
            whole("max_turns", self.max_turns, 1, MAX_REQUESTS, remedy)
        Streams(self.seed)

    def read(self) -> Iterator[RequestSpec]:
        with BadLines(self.path, self.skip_bad_lines) as bad:
            sessions = list(self._sessions(bad))
        answered = [turns for turns in sessions if _has_answer(turns)]
        if not answered:
            raise no_rows(self.path)
        requests = self._requests(answered)
        if num_silent := len(sessions) - len(answered):
            warn(
                f"{self.path}: {num_silent} of {len(sessions)} conversations hold no "
                "answered turn and are left out"
            )
        return iter(requests)

    def _sessions(self, bad: BadLines) -> Iterator[list[_Turn]]:
        for number, entry in json_values(self.path):
            try:
                yield self._turns(entry)
            except _MalformedError as error:
                bad.refuse(number, str(error))

    def _turns(self, entry: Any) -> list[_Turn]:
        """Return the turns that say something; raises `_MalformedError`."""
        turns = _one_of(entry, _TURNS) if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            problem = "a conversation must be an object with a list of conversations or"
            problem += f" messages; got {str(entry)[:80]!r}; mend or remove it"
            raise _MalformedError(problem)
        checked = [self._turn(position, turn) for position, turn in enumerate(turns)]
        return [turn for turn in checked if turn.num_tokens]

    def _turn(self, position: int, turn: Any) -> _Turn:
        speaker = text = None
        if isinstance(turn, dict):
            speaker, text = _one_of(turn, _SPEAKERS), _one_of(turn, _WORDS)
        if not isinstance(speaker, str) or not isinstance(text, str):
            problem = f"turn {position} must say from whom it is and what (value); got "
            problem += f"{str(turn)[:80]!r}; mend or remove it"
            raise _MalformedError(problem)
        words = text.encode("utf-8", "surrogatepass")
        digest = blake2b(words, digest_size=16).digest()
        return _Turn(speaker in _ANSWERING, digest, self._num_tokens(turn, text))

    def _num_tokens(self, turn: dict[str, Any], text: str) -> int:
        if self.tokens_per_character is None:
            name = str(self.tokens_key)
            num_tokens: int = turn.get(name, -1)
            problem = whole_problem(name, num_tokens, 0, MAX_TOKENS)
        else:
            num_tokens = round(len(text) * self.tokens_per_character)
            num_tokens = max(num_tokens, 1) if text else 0
            problem = whole_problem("tokens of a turn", num_tokens, 0, MAX_TOKENS)
        if problem:
            raise _MalformedError(problem)
        return num_tokens

    def _requests(self, sessions: list[list[_Turn]]) -> list[RequestSpec]:
        starts_s: Iterator[float] = repeat(0.0)
        if self.arrivals is not None:
            rng = Streams(self.seed).generator("arrivals")
            starts_s = iter(arrival_times_s(self.arrivals, rng, len(sessions)))
        texts = _Texts()
        requests: list[RequestSpec] = []
        for session_id, turns in enumerate(sessions):
            first = RequestSpec(0, next(starts_s), (), 1, 1, session_id=session_id)
            requests += self._session(first, turns, len(requests), texts)
        return in_order(requests)

    def _session(
        self, first: RequestSpec, turns: list[_Turn], next_id: int, texts: _Texts
    ) -> Iterator[RequestSpec]:
        prompt: tuple[Segment, ...] = ()
        said = 0
        first_id, previous_id = next_id, None
        for turn in turns:
            said, segment = texts.after(said, turn)
            if turn.is_answer and prompt:
                segment = 2 * next_id + 1
                request = first._replace(
                    request_id=next_id,
                    prompt=prompt,
                    num_output_tokens=turn.num_tokens,
                    output_segment=segment,
                    previous_id=previous_id,
                    delay_s=0.0 if previous_id is None else float(self.think_time_s),
                )
                yield request
                previous_id = next_id
                next_id += 1
                if next_id - first_id == self.max_turns:
                    return
            prompt = (*prompt, (segment, turn.num_tokens))


class _Texts:
    """Ids of texts, by all texts before and the words themselves."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, bool, bytes, int], int] = {}

    def after(self, said: int, turn: _Turn) -> tuple[int, int]:
        """Return the place behind a turn and the segment of its text.

        0 is the start.
        """
        key = (said, *turn)
        place = self._places.setdefault(key, len(self._places) + 1)
        return place, 2 * place


_TURNS = ("conversations", "messages")
_SPEAKERS = ("from", "role")
_WORDS = ("value", "content")


def _one_of(entry: dict[str, Any], keys: tuple[str, str]) -> Any:
    """Return the value of the first key that is there, or None."""
    return entry.get(keys[0], entry.get(keys[1]))


def _has_answer(turns: list[_Turn]) -> bool:
    return any(turn.is_answer for turn in turns[1:])
