"""Prompts as chains of block hashes, and which engines were sent which blocks."""

from __future__ import annotations

from collections import deque
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

    A hash is known by its latest number, and forgotten when that is the oldest::

        order    [ a  b  c  a  d ]       b is the oldest: the first a has come again
        latest   a: 3, b: 1, c: 2, d: 4

    The number of a prompt's first hash is kept as ``~number``: prompts whose first hash
    no engine was sent, most of all, are told by a look at these.

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
        self._latest: list[dict[int, int]] = [{} for _ in capacities]
        self._order: list[deque[int]] = [deque() for _ in capacities]
        self._num_added = [0] * len(self.capacities)
        self._num_with_first: dict[int, int] = {}

    def num_matched(self, hashes: Sequence[int]) -> list[int]:
        """Return by place how many blocks it has, up to the first that none has.

        A place whose first block was forgotten gets credit for later ones. Hashes are
        chained, so that each stands at one place in all prompts that have it.
        """
        every = self._latest
        num_known = 0
        if hashes and hashes[0] in self._num_with_first:
            unknown = (
                i
                for i, each in enumerate(hashes)
                if not any(each in own for own in every)
            )
            num_known = next(unknown, len(hashes))
        if not num_known:
            return [0] * len(every)
        known = hashes[:num_known]
        return [sum(each in own for each in known) for own in every]

    def add(self, hashes: Sequence[int], place: int) -> None:
        """Remember a prompt, head first: so heads are forgotten before tails."""
        if not hashes:
            return
        own, order, first = self._latest[place], self._order[place], hashes[0]
        if first not in own:
            with_first = self._num_with_first
            with_first[first] = with_first.get(first, 0) + 1
        begin = self._num_added[place]
        end = self._num_added[place] = begin + len(hashes)
        own.update(zip(hashes, range(begin, end), strict=True))
        own[first] = ~begin
        order.extend(hashes)
        if len(own) > self.capacities[place]:
            self._forget_oldest(place, len(own) - self.capacities[place])
        if len(order) > 4 * len(own) + 64:
            self._tidy(place)

    def _forget_oldest(self, place: int, num_hashes: int) -> None:
        own, order = self._latest[place], self._order[place]
        number = self._num_added[place] - len(order)
        while num_hashes:
            each = order.popleft()
            latest = own.get(each)
            if latest == number:
                del own[each]
                num_hashes -= 1
            elif latest == ~number:
                self._forget_first(each)
                del own[each]
                num_hashes -= 1
            number += 1

    def _forget_first(self, each: int) -> None:
        with_first = self._num_with_first
        with_first[each] -= 1
        if not with_first[each]:
            del with_first[each]

    def _tidy(self, place: int) -> None:
        """Leave only the latest of each hash in the order."""
        own, order = self._latest[place], self._order[place]
        oldest = self._num_added[place] - len(order)
        left = [
            each
            for number, each in enumerate(order, oldest)
            if own.get(each) in {number, ~number}
        ]
        order.clear()
        order.extend(left)
        begin = self._num_added[place] - len(left)
        for number, each in enumerate(left, begin):
            own[each] = number if own[each] >= 0 else ~number

    def forget(self, place: int) -> None:
        """Forget all that the engine at `place` was sent."""
        own = self._latest[place]
        for each, number in own.items():
            if number < 0:
                self._forget_first(each)
        own.clear()
        self._order[place].clear()

    def check(self) -> None:
        """Prove that first hashes are counted right, and all that is known is in order.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        counted: dict[int, int] = {}
        for place, (own, capacity) in enumerate(
            zip(self._latest, self.capacities, strict=True)
        ):
            require(len(own) <= capacity, "block index: more hashes than its capacity")
            order = self._order[place]
            oldest = self._num_added[place] - len(order)
            for each, number in own.items():
                at = (number if number >= 0 else ~number) - oldest
                require(order[at] == each, "block index: a hash is not in order")
                if number < 0:
                    counted[each] = counted.get(each, 0) + 1
        require(counted == self._num_with_first, "block index: first hashes miscounted")
