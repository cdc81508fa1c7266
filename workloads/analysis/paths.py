"""Which KV blocks each request reads and leaves behind: paths in the prefix tree.

A block is a full block of tokens together with everything before it, so the blocks of
all requests form a tree, and a request is a path from its root. The path is kept by
*runs*: full blocks that follow each other inside one segment. A prompt of 100,000
tokens in pieces of 512 is 196 visits of runs, whatever the block size::

    tokens   | segment 14, 40 tokens        | segment 80, 60 tokens             |
    blocks   |  0 | 1 |      2      |  3 | 4 | 5 |           (16 tokens each)
    visits   [  a, 2  ][    b, 1    ][   c, 3    ]   a run, and how much of it

Block ``j`` of run ``c`` is the same block wherever it is met. A run may be longer in
another request, which then shares its first blocks with this one.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from workloads._checks import MAX_TOKENS, between, whole
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec, Segment

Visit = tuple[int, int, int]
"""``(run, num_blocks, num_readable)``: a request's blocks in one run of the tree."""

_CHUNK = 4096
_MASK = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15  # odd, its bits without a pattern (the golden ratio)
_BLOCK_REMEDY = "give a block in tokens, such as 16"
_RATE_REMEDY = "give the share of blocks to keep, such as 0.01"
NEVER = -1
"""Mark of a block that was never touched."""
Piece = tuple[int, int]
"""``(num_blocks, mark)``: neighbours in a run that carry the same mark."""


@dataclass(frozen=True, slots=True)
class BlockPaths:
    """The blocks of every request, in the order in which requests arrive.

    Parameters
    ----------
    block_size
        Tokens of a block.
    sample_rate
        Share of the blocks that were kept; 1 for all.
    num_prompt_tokens
        Tokens of all prompts.
    num_readable
        Blocks that requests look for in the cache, of all blocks, kept or not: the
        full ones of each prompt but one that holds its last token, which an engine
        computes in any case.
    num_blocks
        Blocks that requests leave in the cache, of all blocks, kept or not; a block
        counts once for each request.
    run, used, readable
        Of each visit, int64 of shape ``(num_visits,)``: the run's number, how many
        blocks of it (counted from its start) the request leaves in the cache, and how
        many of those it looks for first.
    ends
        Of each request, the visit behind its last; int64 of shape ``(n,)``.
    phase
        Of each run, 64 bits that do not depend on where it stands in the file; uint64
        of shape ``(num_runs,)``.
    """

    block_size: int
    sample_rate: float
    num_prompt_tokens: int
    num_readable: int
    num_blocks: int
    run: NDArray[np.int64]
    used: NDArray[np.int64]
    readable: NDArray[np.int64]
    ends: NDArray[np.int64]
    phase: NDArray[np.uint64]

    @property
    def num_requests(self) -> int:
        return len(self.ends)

    @property
    def num_runs(self) -> int:
        return len(self.phase)

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks that were kept and differ, which an infinite cache would hold."""
        longest = np.zeros(self.num_runs, dtype=np.int64)
        np.maximum.at(longest, self.run, self.used)
        return int(longest.sum())

    def condensed(self) -> BlockPaths:
        """Return the same paths, with runs of one request alone in one visit of it.

        Behind a run that one request alone has, the rest of its path is its own too:
        such visits stand at the end of a path, and become one. Reuse distances and
        next reads are the same.
        """
        if not len(self.run):
            return self
        alone = np.bincount(self.run)[self.run] == 1
        starts = np.concatenate(([0], self.ends[:-1]))
        begins = np.zeros(len(alone), dtype=np.bool_)
        begins[starts[starts < len(alone)]] = True
        kept = ~alone | begins | ~np.concatenate(([False], alone[:-1]))
        first = np.flatnonzero(kept)
        num_kept = np.concatenate(([0], np.cumsum(kept)))
        return replace(
            self,
            run=self.run[kept],
            used=np.add.reduceat(self.used, first),
            readable=np.add.reduceat(self.readable, first),
            ends=num_kept[self.ends],
        )

    @property
    def shares_nothing(self) -> bool:
        """Whether no run is met twice, so that nothing can be found."""
        return self.num_runs == len(self.run)

    def visits(self) -> Iterator[list[Visit]]:
        return chain.from_iterable(
            self._chunk(start) for start in range(0, self.num_requests, _CHUNK)
        )

    def backwards(self) -> Iterator[list[Visit]]:
        starts = range(0, self.num_requests, _CHUNK)
        return chain.from_iterable(
            reversed(self._chunk(start)) for start in reversed(starts)
        )

    def _chunk(self, start: int) -> list[list[Visit]]:
        ends = self.ends[start : start + _CHUNK].tolist()
        low = int(self.ends[start - 1]) if start else 0
        columns = (self.run, self.used, self.readable)
        visits = list(
            zip(*(column[low : ends[-1]].tolist() for column in columns), strict=True)
        )
        begins = [low, *ends[:-1]]
        return [visits[a - low : b - low] for a, b in zip(begins, ends, strict=True)]


def block_paths(
    requests: Iterable[RequestSpec],
    block_size: int,
    *,
    prompts_only: bool = False,
    sample_rate: float = 1.0,
    sample_seed: int = 0,
) -> BlockPaths:
    """Return the blocks that requests, in order of arrival, read and leave behind.

    With `prompts_only` generated text stays out of the cache. `sample_rate` keeps each
    block with this probability, by its identity: in all requests or in none
    (Waldspurger et al., SHARDS, FAST 2015). Runs without a kept block take no memory.
    O(segments).

    A request of P prompt tokens and G generated ones leaves ``(P + G - 1) //
    block_size`` full blocks, since no engine computes the entries of the last token it
    samples, and looks for ``(P - 1) // block_size``: of a prompt that is cached whole,
    V1 computes the last block again (``max_cache_hit_length``). Further samples or
    beams of a prompt are not counted.

    Runs are told apart by chained 64-bit hashes; two of ten million collide with a
    probability of about 3 in a million. Of a run's blocks every ``1 / sample_rate``-th
    is kept, the first one by the run's hash: that is each with the same probability,
    with less scatter than drawing each for itself.
    """
    whole("block_size", block_size, 1, MAX_TOKENS, _BLOCK_REMEDY)
    between("sample rate", sample_rate, 1e-9, 1, _RATE_REMEDY)
    if isinstance(requests, RequestColumns) and sample_rate == 1:
        return _own_paths(requests, block_size, prompts_only=prompts_only)
    scan = _Scan(block_size, sample_rate, sample_seed)
    for request in requests:
        num_prompt_tokens = request.num_prompt_tokens
        num_new = 0 if prompts_only else request.num_output_tokens - 1
        segments: Iterable[Segment] = request.prompt
        if num_new:
            segments = (*request.prompt, (request.output_segment, num_new))
        scan.add(segments, num_prompt_tokens, num_prompt_tokens + num_new)
    return scan.paths()


def _own_paths(
    requests: RequestColumns, block_size: int, *, prompts_only: bool
) -> BlockPaths:
    """Return the paths of requests that share nothing, a run each."""
    prompts = requests.num_prompt_tokens
    num_new = 0 if prompts_only else requests.num_output_tokens - 1
    used = (prompts + num_new) // block_size
    readable = (prompts - 1) // block_size
    kept = used > 0
    num_runs = int(kept.sum())
    return BlockPaths(
        block_size=block_size,
        sample_rate=1.0,
        num_prompt_tokens=int(prompts.sum()),
        num_readable=int(readable.sum()),
        num_blocks=int(used.sum()),
        run=np.arange(num_runs),
        used=used[kept],
        readable=readable[kept],
        ends=np.cumsum(kept),
        phase=np.zeros(num_runs, dtype=np.uint64),  # for samples, which these are not
    )


class _Scan:
    def __init__(self, block_size: int, sample_rate: float, seed: int) -> None:
        self.block_size = block_size
        self.sample_rate = sample_rate
        self.salt = _mixed(seed)  # 0 for 0
        self.numbers: dict[int, int] = {}
        self.columns = (array("q"), array("q"), array("q"))
        self.ends = array("q")
        self.num_prompt_tokens = self.num_readable = self.num_blocks = 0

    def add(
        self, segments: Iterable[Segment], num_prompt_tokens: int, num_tokens: int
    ) -> None:
        num_left = (num_prompt_tokens - 1) // self.block_size
        self.num_prompt_tokens += num_prompt_tokens
        self.num_readable += num_left
        self.num_blocks += num_tokens // self.block_size
        see = self._see if self.sample_rate == 1.0 else self._see_sampled
        for key, num_blocks in runs(segments, self.block_size):
            see(key, num_blocks, min(num_left, num_blocks))
            num_left -= min(num_left, num_blocks)
        self.ends.append(len(self.columns[0]))

    def _see(self, key: int, used: int, readable: int) -> None:
        numbers = self.numbers
        run, all_used, all_readable = self.columns
        run.append(numbers.setdefault(key, len(numbers)))
        all_used.append(used)
        all_readable.append(readable)

    def _see_sampled(self, key: int, used: int, readable: int) -> None:
        """Add a visit as far as blocks of it are kept."""
        rate = self.sample_rate
        first = _mixed(key ^ self.salt) / 2**64  # in [0, 1)
        if kept := int(used * rate + first):
            self._see(key, kept, int(readable * rate + first))

    def paths(self) -> BlockPaths:
        run, used, readable = (np.array(c, dtype=np.int64) for c in self.columns)
        # A second mixing: the first decided which blocks are kept.
        salt = self.salt
        mixed = (_mixed(_mixed(key ^ salt)) for key in self.numbers)
        return BlockPaths(
            block_size=self.block_size,
            sample_rate=self.sample_rate,
            num_prompt_tokens=self.num_prompt_tokens,
            num_readable=self.num_readable,
            num_blocks=self.num_blocks,
            run=run,
            used=used,
            readable=readable,
            ends=np.array(self.ends, dtype=np.int64),
            phase=np.fromiter(mixed, dtype=np.uint64, count=len(self.numbers)),
        )


def _mixed(key: int) -> int:
    bits = (key * _MIX) & _MASK
    return ((bits ^ (bits >> 29)) * _MIX) & _MASK


def runs(segments: Iterable[Segment], block_size: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of full blocks of concatenated segments, ``(key, num_blocks)``.

    The key chains all that is before the run. A block that spans segments is a run of
    one. Two paths have equal leading blocks if, and only if, their ``(key, index in the
    run)`` are equal. O(segments).
    """
    key = num_blocks = 0
    spanning: list[tuple[int, int, int]] = []
    num_missing = 0  # tokens that the block in `spanning` still lacks
    for segment_id, length in segments:
        offset = min(num_missing, length)
        if offset:
            spanning.append((segment_id, 0, offset))
            num_missing -= offset
            if num_missing:
                continue
            key, num_blocks = hash((key, num_blocks, tuple(spanning))), 1
            yield key, 1
        num_full, num_left = divmod(length - offset, block_size)
        if num_full:
            key, num_blocks = hash((key, num_blocks, segment_id, offset)), num_full
            yield key, num_full
        if num_left:
            spanning = [(segment_id, offset + num_full * block_size, num_left)]
            num_missing = block_size - num_left


class Marks:
    """The mark of each block, such as the request that touched it last.

    A run is always touched from its first block on, so the marks of a run are a stack:
    reading and replacing the first blocks takes the pieces that end there off it and
    puts at most two on. All calls together cost O(calls).
    """

    __slots__ = ("_pieces",)

    def __init__(self, num_runs: int) -> None:
        # Of each run (block behind the piece, mark), the deepest piece first.
        self._pieces: list[list[Piece] | None] = [None] * num_runs

    def replace(
        self, run: int, num_blocks: int, num_marked: int, mark: int
    ) -> list[Piece]:
        """Mark the first blocks of a run; return the pieces before, front first.

        Of the `num_blocks` blocks read, the first `num_marked` get `mark`, the others
        `NEVER`.
        """
        pieces = self._pieces[run]
        if pieces is None:
            pieces = self._pieces[run] = []
        found = list(_taken(pieces, num_blocks))
        if num_marked < num_blocks:
            pieces.append((num_blocks, NEVER))
        if num_marked:
            pieces.append((num_marked, mark))
        return found


def _taken(pieces: list[Piece], num_blocks: int) -> Iterator[Piece]:
    """Yield the first blocks' pieces, front first, and take them off the stack."""
    begin = 0
    while pieces and begin < num_blocks:
        end, mark = pieces[-1]
        if end <= num_blocks:
            pieces.pop()
        yield min(end, num_blocks) - begin, mark
        begin = min(end, num_blocks)
    if begin < num_blocks:
        yield num_blocks - begin, NEVER
