"""Prompts as chains of block hashes, and which engines were sent which blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.request import Request


def prompt_hashes(
    request: Request, block_size: int, most_tokens: int | None = None
) -> list[int]:
    """Return the chained hashes of a prompt's full blocks.

    Parameters
    ----------
    request
        Whose prompt.
    block_size
        Tokens a block of the router's, whatever the engine's is.
    most_tokens
        Leading tokens that are looked at; None for all.
    """
    num_tokens = request.num_prompt_tokens
    if most_tokens is not None:
        num_tokens = min(num_tokens, most_tokens)
    hashes: list[int] = []
    request.tokens.extend_block_hashes(hashes, num_tokens // block_size, block_size)
    return hashes


class BlockIndex:
    """What each engine was sent: the latest so many block hashes of each.

    Parameters
    ----------
    capacities
        By place, hashes that are remembered of it.

    Notes
    -----
    Source: llm-d router of August 2026, ``approx-prefix-cache-producer``.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = list(capacities)
        self._hashes: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
        self._num_holders: dict[int, int] = {}

    def num_matched(self, hashes: Sequence[int]) -> list[int]:
        """Return by place how many blocks it has, up to the first that none has.

        A place whose first block was forgotten gets credit for later ones.
        """
        held = self._num_holders
        num_known = next(
            (i for i, each in enumerate(hashes) if each not in held), len(hashes)
        )
        if not num_known:
            return [0] * len(self._hashes)
        known = hashes[:num_known]
        return [sum(each in own for each in known) for own in self._hashes]

    def add(self, hashes: Sequence[int], place: int) -> None:
        """Remember a prompt, head first: so heads are forgotten before tails."""
        own, held = self._hashes[place], self._num_holders
        for each in hashes:
            if each in own:
                own.move_to_end(each)
                continue
            own[each] = None
            held[each] = held.get(each, 0) + 1
            if len(own) > self.capacities[place]:
                oldest, _ = own.popitem(last=False)
                held[oldest] -= 1
                if not held[oldest]:
                    del held[oldest]

    def forget(self, place: int) -> None:
        """Forget all that the engine at `place` was sent."""
        own, held = self._hashes[place], self._num_holders
        for each in own:
            held[each] -= 1
            if not held[each]:
                del held[each]
        own.clear()

    def check(self) -> None:
        """Prove that holders are counted right and no engine has more than it may.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        counted: dict[int, int] = {}
        for own, capacity in zip(self._hashes, self.capacities, strict=True):
            require(len(own) <= capacity, "block index: more hashes than its capacity")
            for each in own:
                counted[each] = counted.get(each, 0) + 1
        require(counted == self._num_holders, "block index: holders are miscounted")
