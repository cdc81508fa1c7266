"""Real text as token counts and identities: a stated number of characters a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import Segment

CHARACTERS_PER_TOKEN: Final = 4
"""Of English text, as a rule of thumb."""


class PromptIds:
    """Segments of prompts, equal where the text is equal up to their end.

    A prompt is cut into pieces of a block; a piece is named by its text. Full blocks of
    equal prefixes are therefore found in the cache by content.

    Parameters
    ----------
    block_size
        Tokens of a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_characters = block_size * CHARACTERS_PER_TOKEN
        self._ids: dict[str, int] = {}
        self._next_id = 0

    def new_id(self) -> int:
        """Return an id that no text has: of an answer."""
        self._next_id += 1
        return self._next_id - 1

    def segments(self, text: str) -> tuple[Segment, ...]:
        """Return the segments of a prompt, of at least one token."""
        size = self._num_characters
        found = []
        for start in range(0, max(len(text), 1), size):
            piece = text[start : start + size]
            segment_id = self._ids.get(piece)
            if segment_id is None:
                segment_id = self._ids[piece] = self.new_id()
            num_tokens = -(-len(piece) // CHARACTERS_PER_TOKEN)
            found.append((segment_id, max(num_tokens, 1)))
        return tuple(found)


def filler(first: int, end: int) -> str:
    """Return the text of the answer's tokens from `first` on, before `end`."""
    return "".join(f"{index % 1000:03d} " for index in range(first, end))


def stopped_at(num_tokens: int, stop: Sequence[str]) -> tuple[int, int] | None:
    """Return how many tokens an answer has until a stop string, and its characters.

    The string itself is not part of the answer's text. None if none occurs.
    """
    text = filler(0, num_tokens)
    found = [(text.find(each) + len(each), text.find(each)) for each in stop]
    ends = [pair for pair in found if pair[1] >= 0]
    if not ends:
        return None
    end, start = min(ends)
    return -(-end // CHARACTERS_PER_TOKEN), start
