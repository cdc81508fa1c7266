"""Identity of full blocks: chained hashes, and runs of blocks that need fewer.

A block's key depends on all tokens before it as well: key = H(parent key, content).
Equal keys therefore mean equal prefixes, and a lookup walks the chain to the first
miss. The real engine hashes token ids with SHA-256; the content here is symbolic
(`cache.tokens`), and the key is Python's 64-bit tuple hash, which for integers does
not depend on the process. Among ten million distinct blocks two keys collide with a
probability of about 3 in a million.

Keys cost a hash a block. Where tokens are segments, most neighbours need none of their
own: full blocks that follow each other inside one segment form a *run*, and block ``j``
of a run is identified by ``(run key, j)``::

    tokens   | segment 14, 40 tokens        | segment 80, 60 tokens             |
    blocks   |  0 | 1 |      2      |  3 | 4 | 5 |           (16 tokens each)
    runs     [  a    ][      b      ][     c    ]      keys of a, b, c; ends 2, 3, 6

A block that spans segments is a run of one. A run's key chains what is before it: the
key of the run before, how many blocks of that there are, and its own content. So two
requests have equal leading blocks if, and only if, their ``(run key, j)`` are equal; a
run may well be longer in one of them. Longer runs, of prompts that know each other, are
those of `cache.prompt_tree`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


NONE_HASH = 0
"""Parent key of a request's first block."""


def hash_block(parent: int, content: Hashable) -> int:
    """Return the key of a full block."""
    return hash((parent, content))


def group_salt(number: int) -> int:
    """Return the number xored into keys of a KV cache group; 0 for the first."""
    return hash((number, NONE_HASH)) if number else 0


class BlockRuns:
    """The runs of a request's full blocks."""

    __slots__ = ("ends", "keys")

    def __init__(self, keys: list[int], ends: list[int]) -> None:
        # Identity of each run.
        self.keys = keys
        # Index of the block behind each run; ascending.
        self.ends = ends

    def cover(self, num_blocks: int) -> None:
        """Make sure that the runs reach over `num_blocks` full blocks."""
        num_known = self.ends[-1] if self.ends else 0
        if num_blocks > num_known:
            raise CacheError(
                f"these tokens fill {num_known} blocks, not {num_blocks}; give tokens "
                f"that reach as far as the request"
            )


def runs_of_pieces(
    pieces: Iterable[tuple[int, int, int]], block_size: int
) -> BlockRuns:
    """Return the runs of full blocks of concatenated pieces. O(pieces)."""
    keys: list[int] = []
    ends: list[int] = []
    key, num_blocks, end = NONE_HASH, 0, 0
    spanning: list[tuple[int, int, int]] = []
    num_missing = 0  # tokens that the block in `spanning` still lacks
    for segment_id, first, length in pieces:
        offset, num_tokens = first, length
        if num_missing:
            taken = min(num_missing, num_tokens)
            if taken:
                spanning.append((segment_id, offset, taken))
            num_missing -= taken
            if num_missing:
                continue
            key, num_blocks = hash((key, num_blocks, tuple(spanning))), 1
            end += 1
            keys.append(key)
            ends.append(end)
            offset += taken
            num_tokens -= taken
        num_full, num_left = divmod(num_tokens, block_size)
        if num_full:
            key, num_blocks = hash((key, num_blocks, segment_id, offset)), num_full
            end += num_full
            keys.append(key)
            ends.append(end)
        if num_left:
            spanning = [(segment_id, offset + num_full * block_size, num_left)]
            num_missing = block_size - num_left
    return BlockRuns(keys, ends)
