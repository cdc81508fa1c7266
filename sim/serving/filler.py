"""Text of answers, of which only the length means anything."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Filler:
    """Words, a token each, that come round again and again.

    Parameters
    ----------
    words
        At least one.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._ends = [*accumulate(map(len, words), initial=0)]

    def text(self, first: int, end: int) -> str:
        """Return the tokens from `first` on, before `end`."""
        words = self._words
        return "".join([words[index % len(words)] for index in range(first, end)])

    def num_characters(self, num_tokens: int) -> int:
        """Return how long so many tokens are."""
        rounds, rest = divmod(num_tokens, len(self._words))
        return rounds * self._ends[-1] + self._ends[rest]

    def num_tokens(self, num_characters: int) -> int:
        """Return how many tokens so many characters need."""
        rounds, rest = divmod(num_characters, self._ends[-1])
        return rounds * len(self._words) + bisect_left(self._ends, rest)

    def stopped_at(
        self, num_tokens: int, stop: Sequence[str]
    ) -> tuple[int, int] | None:
        """Return how many tokens there are until a stop string, and its place.

        The string itself is not part of the answer's text. None if none occurs.
        """
        if not stop:
            return None
        text = self.text(0, num_tokens)
        found = [(text.find(each) + len(each), text.find(each)) for each in stop]
        ends = [pair for pair in found if pair[1] >= 0]
        if not ends:
            return None
        end, start = min(ends)
        return self.num_tokens(end), start


NUMBERS = Filler([f"{index:03d} " for index in range(1000)])
"""Numbers, four characters each."""
MOST_WORDS = 64
_WORD_STARTS = ("Ġ", "▁")  # of a space before, in byte-level and in sentence pieces


def is_word(token: str) -> bool:
    """Whether a token of a vocabulary is a plain word with a space before it."""
    rest = token[1:]
    return token[:1] in _WORD_STARTS and rest.isascii() and rest.isalpha()
