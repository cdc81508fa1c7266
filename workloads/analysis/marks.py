"""A mark on every block of the prefix tree: who touched it last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NEVER = -1
"""Mark of a block that nobody touched."""

Piece = tuple[int, int]
"""``(num_blocks, mark)``: neighbours in a run that carry the same mark."""


class Marks:
    """The mark of each block, kept by pieces of runs.

    Whoever touches a run touches it from its first block on, so the marks of a run are
    a stack: reading and replacing the first blocks takes the pieces that end there
    off it and puts at most two on. All calls together cost O(calls).

    Parameters
    ----------
    num_runs
        Runs are numbered from 0.
    """

    __slots__ = ("_pieces",)

    def __init__(self, num_runs: int) -> None:
        # Of each run (block behind the piece, mark), the deepest piece first.
        self._pieces: list[list[Piece] | None] = [None] * num_runs

    def replace(
        self, run: int, num_blocks: int, num_marked: int, mark: int
    ) -> list[Piece]:
        """Mark the first blocks of a run; return what they were marked with.

        Parameters
        ----------
        run
            Its number.
        num_blocks
            Blocks to read, from the run's first on.
        num_marked
            How many of them get `mark`, from the first on; the others get `NEVER`.
        mark
            The new mark, at least 0.

        Returns
        -------
        list of Piece
            What was there, from the first block down, of `num_blocks` blocks.
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
