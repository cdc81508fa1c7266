"""Chunks of prompts by position: their identity, and which of them were seen."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.hashing import group_salt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cache.hashing import BlockRuns

Ints = npt.NDArray[np.int64]
Span = tuple[int, int]
"""Positions from one on and before another one."""

NO_INTS: Ints = np.empty(0, np.int64)


def as_ints(numbers: Sequence[int] | Ints) -> Ints:
    """Return places as a column."""
    return np.asarray(numbers, np.int64)


def column_of(columns: Sequence[Ints]) -> Ints:
    """Join columns."""
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(columns) if columns else NO_INTS


class Keys:
    """Identity of successive chunks of a prompt, by runs (`cache.hashing`).

    A chunk is known by the run of its last block, and which chunk of that run it is.
    Both chain all tokens before it; as a single number they are their sum.

    Parameters
    ----------
    runs
        Key of each run that a chunk ends in.
    starts
        Position of the first chunk of each, and behind the last one.
    group
        KV cache group of its layers; the same tokens have other runs in another one.
    chunk_tokens
        Tokens of a chunk, which set positions of several groups in order.

    Attributes
    ----------
    pieces
        Which run a key is.
    """

    __slots__ = ("chunk_tokens", "group", "pieces", "runs", "starts")

    def __init__(
        self, runs: list[int], starts: list[int], group: int = 0, chunk_tokens: int = 1
    ) -> None:
        self.runs = runs
        self.starts = starts
        self.group = group
        self.chunk_tokens = chunk_tokens
        self.pieces = dict(zip(runs, range(len(runs)), strict=True))

    @classmethod
    def of(cls, keys: Sequence[int], first: int = 0) -> Keys:
        """Return single chunks by a number each, from a position on."""
        return cls([*keys], [*range(first, first + len(keys) + 1)])

    @classmethod
    def of_runs(
        cls,
        runs: BlockRuns,
        num_chunks: int,
        size: int,
        *,
        group: int = 0,
        block_size: int = 1,
    ) -> Keys:
        """Return the chunks of so many blocks of a prompt, in a group."""
        if num_chunks:
            runs.cover(num_chunks * size)
        own, ends = runs.keys, runs.ends
        if salt := group_salt(group):
            own = [key ^ salt for key in own]
        if size == 1:
            last = bisect_left(ends, num_chunks)
            starts = [0, *ends[:last], num_chunks]
            return cls(own[: last + 1], starts, group, block_size)
        ids: list[int] = []
        starts = [0]
        for run, end in zip(own, ends, strict=True):
            stop = min(end // size, num_chunks)
            if stop > starts[-1]:
                ids.append(run)
                starts.append(stop)
        return cls(ids, starts, group, size * block_size)

    @property
    def stop(self) -> int:
        """Position behind the last chunk."""
        return self.starts[-1]

    def piece_of(self, position: int) -> int:
        """Return which run a position belongs to; it is before `stop`."""
        return bisect_right(self.starts, position) - 1

    def bounds_of(self, run: int) -> Span:
        """Return where a run begins and ends; a span without positions if it is not."""
        piece = self.pieces.get(run)
        return (0, 0) if piece is None else (self.starts[piece], self.starts[piece + 1])

    def numbers(self, first: int, stop: int) -> list[int]:
        """Return each chunk from a position on and before another one as a number."""
        if first >= stop:
            return []
        begin, end = self.piece_of(first), self.piece_of(stop - 1) + 1
        starts = self.starts
        bounds = [first, *starts[begin + 1 : end], stop]
        return [
            *chain.from_iterable(
                range(run + low - start, run + high - start)
                for run, start, low, high in zip(
                    self.runs[begin:end],
                    starts[begin:end],
                    bounds[:-1],
                    bounds[1:],
                    strict=True,
                )
            )
        ]

    def has_in_common(self, position: int, other: Keys) -> bool:
        """Whether both have the same chunk at a position."""
        piece = self.piece_of(position)
        its = other.pieces.get(self.runs[piece])
        return its is not None and (
            other.starts[its] <= position < other.starts[its + 1]
        )


NO_KEYS = Keys([], [0])


class Lot(NamedTuple):
    """Successive chunks of a prompt, in one group.

    Attributes
    ----------
    keys
        The prompt.
    first, stop
        From which position on, and before which.
    """

    keys: Keys
    first: int
    stop: int

    @property
    def num_chunks(self) -> int:
        return self.stop - self.first

    @property
    def span(self) -> Span:
        return self.first, self.stop

    def numbers(self) -> list[int]:
        """Return each chunk as a number."""
        return self.keys.numbers(self.first, self.stop)


def in_order_of_tokens(
    groups: Sequence[int], ends: Ints, *, is_settled: bool
) -> npt.NDArray[np.intp]:
    """Return the order in which chunks of several groups are evicted, as indices.

    The tail of the prompt goes first. Where chunks of two groups end at the same token,
    that of the later group does if the request has ended, of the earlier one if not:
    the release settles an ended request from head to tail, group by group, and compares
    keys, which end with the group, of one that has not.

    Parameters
    ----------
    groups, ends
        Of each chunk: its group, and the token that it ends before.
    is_settled
        Whether the request has ended.
    """
    numbers = np.asarray(groups)
    return np.lexsort((-numbers if is_settled else numbers, -ends))


class Spans:
    """Positions that were seen."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[Span] = []  # ascending, with gaps between them

    def __len__(self) -> int:
        return sum(stop - first for first, stop in self.spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def add(self, first: int, stop: int) -> list[Span]:
        """See positions; return those that are new."""
        spans = self.spans
        if first >= stop:
            return []
        if not spans or spans[-1][1] < first:
            spans.append((first, stop))
            return [(first, stop)]
        last, end = spans[-1]
        if end == first:  # mostly
            spans[-1] = last, stop
            return [(first, stop)]
        if last <= first and stop <= end:
            return []
        new, at = [], first
        for start, end in spans:
            if start >= stop:
                break
            if at < start:
                new.append((at, start))
            at = max(at, end)
        if at < stop:
            new.append((at, stop))
        touching = [span for span in spans if span[0] <= stop and span[1] >= first]
        others = [span for span in spans if span[0] > stop or span[1] < first]
        first = min([first, *[start for start, _ in touching]])
        stop = max([stop, *[end for _, end in touching]])
        self.spans = sorted([*others, (first, stop)])
        return new


def gaps_of(spans: Sequence[Span], first: int, stop: int) -> list[Span]:
    """Return the gaps between ascending spans, within one."""
    gaps = []
    for start, end in spans:
        if first < start:
            gaps.append((first, start))
        first = end
    if first < stop:
        gaps.append((first, stop))
    return gaps
