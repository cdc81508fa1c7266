"""Prompts as chains of runs of blocks, and which engines were sent which blocks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.scheduler.request import Request

Run = tuple[int, int]
"""Key of a run of blocks (`cache.hashing`), and how many a prompt has of it."""


def prompt_runs(
    request: Request, block_size: int, most_tokens: int | None = None
) -> list[Run]:
    """Return the runs of a prompt's full blocks.

    Parameters
    ----------
    request
        The request of the prompt.
    block_size
        Tokens a block of the router's, whatever the engine's is.
    most_tokens
        Leading tokens that are looked at; None for all.
    """
    num_tokens = request.num_prompt_tokens
    if most_tokens is not None:
        num_tokens = min(num_tokens, most_tokens)
    num_blocks = num_tokens // block_size
    if not num_blocks:
        return []
    runs = request.tokens.block_runs(block_size)
    runs.cover(num_blocks)
    found, start = [], 0
    for key, end in zip(runs.keys, runs.ends, strict=True):
        if end >= num_blocks:
            found.append((key, num_blocks - start))
            break
        found.append((key, end - start))
        start = end
    return found


class _Span:
    """Blocks of a run that an engine was sent together, and not again since.

    Attributes
    ----------
    key
        Of the run.
    start, stop
        The first block, and the one behind the last; both equal if none is left.
    older
        What the same engine was sent of the run before, behind these blocks.
    """

    __slots__ = ("key", "older", "start", "stop")

    def __init__(self, key: int, stop: int) -> None:
        self.key = key
        self.start = 0
        self.stop = stop
        self.older: _Span | None = None

    def chain(self) -> Iterable[_Span]:
        """Yield it and the older ones, in the order of their blocks."""
        span: _Span | None = self
        while span is not None:
            yield span
            span = span.older


class BlockIndex:
    """The latest blocks that each engine was sent, so many of each.

    Blocks are remembered by runs, which cost one entry, not one a block. What an engine
    was sent of a run last stands before what is older and longer::

        known   a: {0: [0 1 2] -> [3 4], 2: [0 1 2 3 4]}      the runs, by place
                b: {2: [0]}
        order   of place 0:  [3 4] of a, [0 1 2] of a          the oldest first

    Parameters
    ----------
    capacities
        By place, blocks that are remembered of it.

    Notes
    -----
    Source: llm-d router of August 2026, ``approx-prefix-cache-producer``.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = list(capacities)
        self._known: dict[int, dict[int, _Span]] = {}
        # Some are empty: their blocks have come again.
        self._order: list[deque[_Span]] = [deque() for _ in capacities]
        self._num_spans = [0] * len(self.capacities)  # that are not
        self._num_blocks = [0] * len(self.capacities)

    def num_matched(self, runs: Iterable[Run]) -> list[int]:
        """Return by place how many blocks it has, up to the first that none has.

        A place whose first block was forgotten gets credit for later ones.
        """
        matched = [0] * len(self.capacities)
        for key, num_blocks in runs:
            held = self._known.get(key)
            if held is None:
                break
            end = _end_of_known(held, num_blocks)
            for place, span in held.items():
                if span.older is None and not span.start and span.stop >= end:
                    matched[place] += end
                else:
                    matched[place] += sum(
                        max(min(each.stop, end) - each.start, 0)
                        for each in span.chain()
                    )
            if end < num_blocks:
                break
        return matched

    def add(self, runs: Iterable[Run], place: int) -> None:
        """Remember a prompt, head first: so heads are forgotten before tails."""
        known, order = self._known, self._order[place]
        num_new = num_spans = 0
        for key, num_blocks in runs:
            span = _Span(key, num_blocks)
            order.append(span)
            num_new += num_blocks
            num_spans += 1
            held = known.get(key)
            if held is None:
                known[key] = {place: span}
                continue
            older = held.get(place)
            held[place] = span
            while older is not None:
                num_again = min(older.stop, num_blocks) - older.start
                if num_again > 0:
                    older.start += num_again
                    num_new -= num_again
                if older.start < older.stop:
                    span.older = older
                    break
                num_spans -= 1
                older = older.older
        self._num_spans[place] += num_spans
        num_held = self._num_blocks[place] = self._num_blocks[place] + num_new
        if num_held > self.capacities[place]:
            self._forget_oldest(place, num_held - self.capacities[place])
        if len(order) > 4 * self._num_spans[place] + 64:
            self._order[place] = deque(each for each in order if each.start < each.stop)

    def _forget_oldest(self, place: int, num_blocks: int) -> None:
        self._num_blocks[place] -= num_blocks
        order = self._order[place]
        while num_blocks:
            span = order[0]
            num_left = span.stop - span.start
            if num_left > num_blocks:
                span.start += num_blocks
                return
            order.popleft()
            if num_left:
                num_blocks -= num_left
                span.start = span.stop
                self._num_spans[place] -= 1
                self._drop(span, place)

    def _drop(self, span: _Span, place: int) -> None:
        """Take the oldest span of its run at a place out of what is known."""
        held = self._known[span.key]
        newer = held[place]
        if newer is not span:
            while newer.older is not span:
                assert newer.older is not None
                newer = newer.older
            newer.older = None
            return
        del held[place]
        if not held:
            del self._known[span.key]

    def forget(self, place: int) -> None:
        """Forget all that the engine at `place` was sent."""
        self._forget_oldest(place, self._num_blocks[place])

    def check(self) -> None:
        """Prove that spans are in order, do not meet, and are counted right.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        num_spans, num_blocks = [0] * len(self.capacities), [0] * len(self.capacities)
        ages = [{each: i for i, each in enumerate(order)} for order in self._order]
        for key, held in self._known.items():
            require(held, "block index: a run is known of no engine")
            for place, newest in held.items():
                end, age = 0, len(ages[place])
                for span in newest.chain():
                    require(
                        span.key == key and end <= span.start < span.stop,
                        "block index: blocks of a run are out of order",
                    )
                    require(
                        ages[place].get(span, age) < age,
                        "block index: a span is younger than one of later blocks",
                    )
                    end, age = span.stop, ages[place][span]
                    num_spans[place] += 1
                    num_blocks[place] += span.stop - span.start
        require(num_spans == self._num_spans, "block index: spans miscounted")
        require(num_blocks == self._num_blocks, "block index: blocks miscounted")
        for place, (count, capacity) in enumerate(
            zip(num_blocks, self.capacities, strict=True)
        ):
            require(count <= capacity, "block index: more blocks than its capacity")
            left = sum(each.start < each.stop for each in self._order[place])
            require(left == num_spans[place], "block index: a span is not known")


def _end_of_known(held: dict[int, _Span], num_blocks: int) -> int:
    """Return the first block of a run's that no engine has, `num_blocks` at most."""
    for span in held.values():
        if not span.start and span.stop >= num_blocks:
            return num_blocks
    spans = [(e.start, e.stop) for newest in held.values() for e in newest.chain()]
    end = 0
    for start, stop in sorted(spans):
        if start > end:
            break
        end = max(end, stop)
    return min(end, num_blocks)
