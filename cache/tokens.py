"""Token identity without token lists.

Prefix caching needs to know which blocks hold equal tokens, not which tokens they
are. A request's tokens are *segments*: ``(segment_id, num_tokens)`` means the first
``num_tokens`` of a stream that only its id names (a trace's hash id, a system prompt,
a generated answer). Block keys are then made from ids and offsets, in O(1) a block,
and a prompt of 100,000 tokens costs a tuple. Where real token ids are at hand, plain
lists work too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cache.hashing import NONE_HASH, hash_block

if TYPE_CHECKING:
    from collections.abc import Sequence

Segment = tuple[int, int]

OPEN_END = 1 << 62
"""Length of a segment that grows for as long as tokens are generated."""


class TokenIds(Protocol):
    """All tokens that a request has or will have, prompt and output."""

    def extend_block_hashes(
        self, block_hashes: list[int], num_blocks: int, block_size: int
    ) -> None:
        """Append chained keys until `block_hashes` covers `num_blocks` full blocks.

        Parameters
        ----------
        block_hashes
            Keys of the leading full blocks, extended in place.
        num_blocks
            Number of full blocks wanted; a smaller number than present is a no-op.
        block_size
            Tokens a block; the same in all calls for one list.
        """
        ...


class ListTokens:
    """Plain token ids; `tokens` may grow behind our back as output is appended."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def extend_block_hashes(
        self, block_hashes: list[int], num_blocks: int, block_size: int
    ) -> None:
        """See `TokenIds.extend_block_hashes`."""
        parent = block_hashes[-1] if block_hashes else NONE_HASH
        for index in range(len(block_hashes), num_blocks):
            start = index * block_size
            parent = hash_block(parent, tuple(self.tokens[start : start + block_size]))
            block_hashes.append(parent)


class SegmentTokens:
    """A prompt of segments, followed by a generated segment without an end.

    Parameters
    ----------
    prompt
        ``(segment_id, num_tokens)`` pairs, concatenated.
    output_segment
        Segment id of the generated text.
    """

    __slots__ = ("_num_walked_tokens", "_walk_index", "segments")

    def __init__(self, prompt: Sequence[Segment], output_segment: int) -> None:
        self.segments: tuple[Segment, ...] = (*prompt, (output_segment, OPEN_END))
        # Hashing walks forward only: where the last call stopped, so that a growing
        # answer does not walk its prompt again.
        self._walk_index = 0
        self._num_walked_tokens = 0

    def extend_block_hashes(
        self, block_hashes: list[int], num_blocks: int, block_size: int
    ) -> None:
        """See `TokenIds.extend_block_hashes`."""
        position = len(block_hashes) * block_size
        end = num_blocks * block_size
        parent = block_hashes[-1] if block_hashes else NONE_HASH
        segments = self.segments
        index, start = self._segment_at(position)
        while position < end:
            segment_id, length = segments[index]
            if position >= start + length:
                start += length
                index += 1
                continue
            inside = min(start + length, end)
            offset = position - start
            while position + block_size <= inside:
                parent = hash((parent, segment_id, offset))
                block_hashes.append(parent)
                offset += block_size
                position += block_size
            if position < inside:  # the block reaches into the next segments
                parent = hash_block(parent, self._pieces(index, offset, block_size))
                block_hashes.append(parent)
                position += block_size
        self._walk_index, self._num_walked_tokens = index, start

    def _segment_at(self, position: int) -> tuple[int, int]:
        """Index and first token of the segment that holds token `position`."""
        index, start = self._walk_index, self._num_walked_tokens
        if position < start:
            index = start = 0
        while position >= start + self.segments[index][1]:
            start += self.segments[index][1]
            index += 1
        return index, start

    def _pieces(
        self, index: int, offset: int, num_tokens: int
    ) -> tuple[tuple[int, int, int], ...]:
        """Identity of `num_tokens` tokens that span segments: id, offset, length."""
        pieces: list[tuple[int, int, int]] = []
        while num_tokens:
            segment_id, length = self.segments[index]
            taken = min(length - offset, num_tokens)
            if taken:
                pieces.append((segment_id, offset, taken))
            num_tokens -= taken
            index += 1
            offset = 0
        return tuple(pieces)
