"""A tree of prompts: a run of blocks goes on until another prompt leaves it.

Runs of segments (`cache.hashing`) end with each segment, since others may go on
differently from there. Which do is known only once they have come. In a tree of the
prompts so far a run ends where a prompt leaves what came before it, and nowhere else::

    segments of a prompt     run a   [14 16 80 22 24, answer 1 ...
    one that begins alike    run b    14 16 80|[30 32, answer 3 ...
    a later one              run c    14 16 80|30 32|[34, answer 5 ...

so that the third has three runs: 3 segments of a, 2 of b, and its own. A run that came
first goes on behind the branches of others. Blocks are equal if, and only if, their
``(run key, j)`` are, as they are without a tree; but keys of one tree say nothing to
another, and nothing to requests without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.hashing import NONE_HASH, BlockRuns

if TYPE_CHECKING:
    from collections.abc import Sequence

Segment = tuple[int, int]
"""See `cache.tokens`."""
Stretch = tuple[int, int]
"""Key of a run, and the token of the prompt at which it is left."""


class PromptTree:
    """The texts of all prompts so far, each but for what it begins with of others.

    It grows with what prompts do not share, and forgets nothing: what an engine, a tier
    or a router has of a text is theirs to say.
    """

    def __init__(self) -> None:
        # Segments of each run from where it leaves another one, by its key. Of the
        # first of them some tokens may lie before that: the key chains how many.
        self._paths: dict[int, Sequence[Segment]] = {}

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._paths)

    def stretches(self, segments: Sequence[Segment]) -> list[Stretch]:
        """Return which runs a text is made of, and remember it. O(segments).

        Parameters
        ----------
        segments
            Of one token at least each; the last one is the text's own and has no end.
        """
        paths = self._paths
        found: list[Stretch] = []
        key, left = NONE_HASH, 0  # the run that is left, and at which token
        segment_id, offset = segments[0][0], 0  # of the token there
        begin = 0  # of the first segment
        while True:
            key = hash((key, left, segment_id, offset))
            path = paths.get(key)
            if path is None:
                paths[key] = segments
                break
            num_common = 0
            for own, other in zip(segments, path, strict=False):
                if own != other:
                    break
                num_common += 1
                begin += own[1]
            else:
                break  # the same text again
            (segment_id, length), (other_id, other_length) = own, other
            left, offset = begin, 0
            if segment_id == other_id:
                offset = min(length, other_length)
                left += offset
                if offset == length:
                    num_common += 1
                    begin, offset = left, 0
                    segment_id = segments[num_common][0]
            found.append((key, left))
            segments = segments[num_common:]
        found.append((key, segments[-1][1]))
        return found


def runs_of_stretches(stretches: Sequence[Stretch], block_size: int) -> BlockRuns:
    """Return the runs of full blocks; a block is of the run that ends it."""
    keys: list[int] = []
    ends: list[int] = []
    num_blocks = 0
    for key, left in stretches:
        end = left // block_size
        if end > num_blocks:
            keys.append(key)
            ends.append(end)
            num_blocks = end
    return BlockRuns(keys, ends)
