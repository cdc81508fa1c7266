"""Token identity without token lists.

Prefix caching needs to know which blocks hold equal tokens, not which tokens they
are. A request's tokens are *segments*: ``(segment_id, num_tokens)`` means the first
``num_tokens`` of a stream that only its id names (a trace's hash id, a system prompt,
a generated answer). Block keys are then made from ids and offsets, in O(1) a block,
and a prompt of 100,000 tokens costs a tuple. Where real token ids are at hand, plain
lists work too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

from cache.hashing import NONE_HASH, BlockRuns, hash_block, runs_of_pieces
from cache.prompt_tree import runs_of_stretches

if TYPE_CHECKING:
    from cache.prompt_tree import PromptTree, Stretch

Segment = tuple[int, int]

OPEN_END = 1 << 62
"""Length of a segment that grows for as long as tokens are generated."""


MAX_NUM_BRANCHES = 1024
"""Most continuations of a prompt."""


class TokenIds(Protocol):
    """All tokens that a request has or will have, prompt and output."""

    def extend_block_hashes(
        self,
        block_hashes: list[int],
        num_blocks: int,
        block_size: int,
        num_lookahead_tokens: int = 0,
    ) -> None:
        """Append chained keys until `block_hashes` covers `num_blocks` full blocks.

        A key covers the `num_lookahead_tokens` tokens behind its block, too.
        """
        ...

    def prompt(self) -> TokenSlice:
        """Return the prompt, for generations that place sequences."""
        ...

    def output(self, branch: int, index: int) -> int | tuple[int, int]:
        """Return the generated token `index` of a continuation of the prompt."""
        ...

    def block_runs(self, block_size: int) -> BlockRuns:
        """Return the runs of full blocks."""
        ...


class ListTokens:
    """Plain token ids; `tokens` may grow behind our back as output is appended."""

    __slots__ = ("num_prompt_tokens", "tokens")

    def __init__(
        self, tokens: Sequence[int], num_prompt_tokens: int | None = None
    ) -> None:
        self.tokens = tokens
        self.num_prompt_tokens = (
            len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        )

    def prompt(self) -> TokenSlice:
        return self.tokens[: self.num_prompt_tokens]

    def output(self, branch: int, index: int) -> int:
        if branch:
            raise ValueError(f"these tokens have one continuation, not {branch + 1}")
        return self.tokens[self.num_prompt_tokens + index]

    def block_runs(self, block_size: int) -> BlockRuns:
        """Return runs of one block each, as long as the tokens are by then."""
        return HashedRuns(self, block_size)

    def ids(self, start: int, end: int) -> Sequence[int]:
        """Return the tokens from position `start` on, before `end`."""
        return self.tokens[start:end]

    def extend_block_hashes(
        self,
        block_hashes: list[int],
        num_blocks: int,
        block_size: int,
        num_lookahead_tokens: int = 0,
    ) -> None:
        parent = block_hashes[-1] if block_hashes else NONE_HASH
        num_covered = block_size + num_lookahead_tokens
        for index in range(len(block_hashes), num_blocks):
            start = index * block_size
            parent = hash_block(parent, tuple(self.ids(start, start + num_covered)))
            block_hashes.append(parent)


class SegmentTokens:
    """A prompt of segments, followed by a generated segment without an end.

    Parameters
    ----------
    prompt, output_segment
        What it is made of.
    tree
        The prompts that share an engine with it, of which each has the same tree; None:
        runs end with segments.
    """

    __slots__ = (
        "_num_walked_tokens",
        "_runs",
        "_stretches",
        "_tree",
        "_walk_index",
        "segments",
    )

    def __init__(
        self,
        prompt: Sequence[Segment],
        output_segment: int,
        tree: PromptTree | None = None,
    ) -> None:
        self.segments: tuple[Segment, ...] = (*prompt, (output_segment, OPEN_END))
        self._tree = tree
        self._stretches: Sequence[Stretch] = ()
        # Hashing walks forward only: where the last call stopped, so that a growing
        # answer does not walk its prompt again.
        self._walk_index = 0
        self._num_walked_tokens = 0
        self._runs: tuple[int, BlockRuns] | None = None  # of a block size

    def block_runs(self, block_size: int) -> BlockRuns:
        """Return the runs of full blocks; the last one has no end. O(segments)."""
        if self._runs is None or self._runs[0] != block_size:
            self._runs = block_size, self._new_runs(block_size)
        return self._runs[1]

    def _new_runs(self, block_size: int) -> BlockRuns:
        segments = self.segments
        if self._tree is None:
            pieces = [(segment_id, 0, length) for segment_id, length in segments]
            return runs_of_pieces(pieces, block_size)
        if not self._stretches:
            some = tuple([each for each in segments if each[1]])
            self._stretches = self._tree.stretches(some)
        return runs_of_stretches(self._stretches, block_size)

    def prompt(self) -> TokenRuns:
        return TokenRuns.from_segments(self.segments[:-1])

    def output(self, branch: int, index: int) -> tuple[int, int]:
        # Later prompts may quote branch 0; the others have segments of their own, whose
        # ids are negative, as no workload's are.
        segment_id = self.segments[-1][0]
        if branch:
            segment_id = -(segment_id * MAX_NUM_BRANCHES + branch) - MAX_NUM_BRANCHES
        return segment_id, index

    def extend_block_hashes(
        self,
        block_hashes: list[int],
        num_blocks: int,
        block_size: int,
        num_lookahead_tokens: int = 0,
    ) -> None:
        num_covered = block_size + num_lookahead_tokens
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
            inside = min(start + length, end + num_lookahead_tokens)
            offset = position - start
            while position + num_covered <= inside:
                parent = hash((parent, segment_id, offset))
                block_hashes.append(parent)
                offset += block_size
                position += block_size
            if position < min(inside, end):  # it reaches into the next segments
                parent = hash_block(parent, self._pieces(index, offset, num_covered))
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


class OwnTokens(SegmentTokens):
    """A prompt and an answer of which no other request has a part: one run."""

    __slots__ = ()

    def _new_runs(self, block_size: int) -> BlockRuns:
        key = hash_block(NONE_HASH, self.segments[0][0])
        return BlockRuns([key], [OPEN_END // block_size])


Piece = tuple[int, int, int]
"""Segment id, offset in the segment, number of tokens."""


class TokenRuns:
    """A sequence's tokens as runs of segments: sliced, appended to, compared.

    Slices are `TokenRuns` again; a slice costs O(runs it spans), whatever its length.
    """

    __slots__ = ("_ends", "_pieces")

    def __init__(self, pieces: Sequence[Piece] = ()) -> None:
        self._pieces: list[Piece] = []
        self._ends: list[int] = []
        for segment_id, offset, num_tokens in pieces:
            self.append(segment_id, offset, num_tokens)

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> TokenRuns:
        """Return a prompt of whole ``(segment_id, num_tokens)`` segments."""
        return cls([(segment_id, 0, length) for segment_id, length in segments])

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The runs; equal for equal tokens."""
        return tuple(self._pieces)

    def append(self, segment_id: int, offset: int, num_tokens: int = 1) -> None:
        """Add `num_tokens` tokens of a segment from `offset` on. O(1)."""
        if num_tokens <= 0:
            return
        pieces, ends = self._pieces, self._ends
        end = (ends[-1] if ends else 0) + num_tokens
        if pieces:
            last_id, last_offset, last_num_tokens = pieces[-1]
            if last_id == segment_id and last_offset + last_num_tokens == offset:
                pieces[-1] = (last_id, last_offset, last_num_tokens + num_tokens)
                ends[-1] = end
                return
        pieces.append((segment_id, offset, num_tokens))
        ends.append(end)

    def copy(self) -> TokenRuns:
        """Return an independent copy, O(runs)."""
        copied = TokenRuns()
        copied._pieces = self._pieces.copy()
        copied._ends = self._ends.copy()
        return copied

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, wanted: slice) -> TokenRuns:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError(f"token runs slice in steps of 1, got {step}")
        found = TokenRuns()
        if start >= stop:
            return found
        pieces, ends = self._pieces, self._ends
        index = bisect_right(ends, start)
        while start < stop:
            segment_id, offset, num_tokens = pieces[index]
            end = ends[index]
            inside = start - (end - num_tokens)
            found.append(segment_id, offset + inside, min(end, stop) - start)
            start = end
            index += 1
        return found

    def __add__(self, other: TokenRuns) -> TokenRuns:
        joined = self.copy()
        for piece in other._pieces:
            joined.append(*piece)
        return joined

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenRuns) and self._pieces == other._pieces

    __hash__ = None  # type: ignore[assignment]  # it grows; hash its content

    def __repr__(self) -> str:
        return f"TokenRuns({self._pieces})"


TokenSlice = Sequence[int] | TokenRuns
"""Tokens in order: plain ids, or runs of segments."""


def content_of(tokens: TokenSlice) -> Hashable:
    """Return the content that a block key is made of: equal for equal tokens."""
    return tokens.pieces if isinstance(tokens, TokenRuns) else tuple(tokens)


class RunTokens:
    """A prompt given as runs, such as a beam's: text that was generated in pieces.

    Block keys equal those of `SegmentTokens` for equal tokens.
    """

    __slots__ = ("runs",)

    def __init__(self, runs: TokenRuns) -> None:
        self.runs = runs

    def block_runs(self, block_size: int) -> BlockRuns:
        """Return the runs of full blocks, as `SegmentTokens` has them. O(runs)."""
        return runs_of_pieces(self.runs.pieces, block_size)

    def prompt(self) -> TokenRuns:
        return self.runs

    def output(self, branch: int, index: int) -> tuple[int, int]:
        """Refuse: what continues these runs is another request's prompt."""
        raise ValueError(f"no output {index} of branch {branch} is known of these runs")

    def extend_block_hashes(
        self,
        block_hashes: list[int],
        num_blocks: int,
        block_size: int,
        num_lookahead_tokens: int = 0,
    ) -> None:
        parent = block_hashes[-1] if block_hashes else NONE_HASH
        num_covered = block_size + num_lookahead_tokens
        for index in range(len(block_hashes), num_blocks):
            start = index * block_size
            pieces = self.runs[start : start + num_covered].pieces
            if len(pieces) == 1:
                segment_id, offset, _ = pieces[0]
                parent = hash((parent, segment_id, offset))
            else:
                parent = hash_block(parent, pieces)
            block_hashes.append(parent)


class HashedRuns(BlockRuns):
    """Runs of one block each, for tokens that know nothing but block keys."""

    __slots__ = ("_block_size", "_tokens")

    def __init__(self, tokens: TokenIds, block_size: int) -> None:
        super().__init__([], [])
        self._tokens = tokens
        self._block_size = block_size

    def cover(self, num_blocks: int) -> None:
        self._tokens.extend_block_hashes(self.keys, num_blocks, self._block_size)
        self.ends.extend(range(len(self.ends) + 1, len(self.keys) + 1))
