"""AIBrix's router: the longest known prefix, unless an engine is far above the mean."""

from __future__ import annotations

from collections import OrderedDict
from math import floor, inf
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final

from cache.errors import require
from sim.fleet.checks import at_least
from sim.fleet.routers.block_index import prompt_runs
from sim.fleet.routers.counting import RandomRouter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import numpy as np
    import simpy

    from sim.fleet.routers.block_index import Run
    from sim.scheduler.request import Request

BLOCK_TOKENS: Final = 1
"""Of 4 characters, with 4 of them a token."""
MOST_BLOCKS: Final = 200_000
FORGOTTEN_AFTER_S: Final = 20 * 60.0
SWEEP_INTERVAL_S: Final = 1.0


class _Span:
    """Blocks of a run that went to the same engines, and stand side by side by age.

    Attributes
    ----------
    key
        Of the run.
    start, stop
        The first block, and the one behind the last.
    places
        Engines that were sent them.
    sent_s
        When that was last.
    """

    __slots__ = ("key", "places", "sent_s", "start", "stop")

    def __init__(
        self, key: int, start: int, stop: int, places: set[int], sent_s: float
    ) -> None:
        self.key = key
        self.start = start
        self.stop = stop
        self.places = places
        self.sent_s = sent_s


class BlockTable:
    """Which engines were sent which blocks: one table for all of them.

    Parameters
    ----------
    most_blocks
        Blocks that are remembered; the one not sent for longest is forgotten first.

    Notes
    -----
    Source: AIBrix of August 2026, ``pkg/utils/prefixcacheindexer/hash.go`` and
    ``pkg/utils/lrustore``. A block is forgotten with all its engines; looking it up
    does not keep it. There a block is an entry; here all of a run are that the same
    prompts had.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.most_blocks = most_blocks
        # Of each run, in the order of their blocks; none is empty, and none meet.
        self._known: dict[int, list[_Span]] = {}
        # Not sent for longest first; blocks of a span in their order.
        self._by_age: OrderedDict[_Span, None] = OrderedDict()
        self._num_blocks = 0

    def percents(self, runs: Sequence[Run], among: Collection[int]) -> dict[int, int]:
        """Return by place how much of a prompt it knows, in whole percent.

        Only places that know the first block are in it.
        """
        found: dict[int, int] = {}
        num_all = sum(num_blocks for _, num_blocks in runs)
        known, num_known = set(among), 0
        for own, num_blocks in self._spans_of(runs):
            if not known <= own:
                if num_known:
                    percent = num_known * 100 // num_all
                    found.update(dict.fromkeys(known - own, percent))
                known &= own
                if not known:
                    return found
            num_known += num_blocks
        if num_known:
            found.update(dict.fromkeys(known, 100))
        return found

    def _spans_of(
        self, runs: Iterable[Run]
    ) -> Iterator[tuple[set[int] | frozenset[int], int]]:
        """Yield the engines that know the next blocks of a prompt, and how many."""
        for key, num_blocks in runs:
            start = 0
            for span in self._known.get(key, ()):
                if span.start > start or start == num_blocks:
                    break
                stop = min(span.stop, num_blocks)
                yield span.places, stop - start
                start = stop
            if start < num_blocks:
                yield frozenset(), num_blocks - start

    def add(self, runs: Iterable[Run], place: int, now_s: float) -> None:
        """Remember that a prompt was sent to the engine at `place`, head first."""
        for key, num_blocks in runs:
            start = 0
            while start < num_blocks:
                start = self._send(key, start, num_blocks, place, now_s)

    def _send(self, key: int, start: int, end: int, place: int, now_s: float) -> int:
        """Send the blocks of a run that are alike from `start` on; return their end."""
        spans = self._known.setdefault(key, [])
        index = 0
        while index < len(spans) and spans[index].stop <= start:
            index += 1
        following = spans[index] if index < len(spans) else None
        if following is None or following.start > start:
            stop = end if following is None else min(following.start, end)
            places, num_new = {place}, stop - start
        else:
            stop, num_new = min(following.stop, end), 0
            places = following.places | {place}
            following.start = stop
            if stop == following.stop:
                del spans[index], self._by_age[following]
        before = spans[index - 1] if index else None
        if (
            before is not None
            and before.stop == start
            and before.places == places
            and before is next(reversed(self._by_age))
        ):
            before.stop = stop
        else:
            span = _Span(key, start, stop, places, now_s)
            spans.insert(index, span)
            self._by_age[span] = None
        self._num_blocks += num_new
        while self._num_blocks > self.most_blocks:  # maybe later ones of this prompt
            self._forget_oldest(self._num_blocks - self.most_blocks)
        return stop

    def _forget_oldest(self, num_blocks: int) -> None:
        """Forget the oldest span, `num_blocks` of it at most."""
        oldest = next(iter(self._by_age))
        num_blocks = min(num_blocks, oldest.stop - oldest.start)
        self._num_blocks -= num_blocks
        oldest.start += num_blocks
        if oldest.start == oldest.stop:
            self._drop(oldest)

    def _drop(self, span: _Span) -> None:
        del self._by_age[span]
        spans = self._known[span.key]
        spans.remove(span)
        if not spans:
            del self._known[span.key]

    def forget(self, now_s: float) -> None:
        """Forget the blocks that the last sweep before `now_s` has found too old."""
        sweep_s = floor(now_s / SWEEP_INTERVAL_S) * SWEEP_INTERVAL_S
        while self._by_age:
            oldest = next(iter(self._by_age))
            if sweep_s - oldest.sent_s <= FORGOTTEN_AFTER_S:
                return
            self._forget_oldest(self._num_blocks)

    def forget_engine(self, place: int) -> None:
        """Forget the engine at `place`, and what was sent to no other."""
        for span in [*self._by_age]:
            span.places.discard(place)
            if not span.places:
                self._num_blocks -= span.stop - span.start
                self._drop(span)

    def check(self) -> None:
        """Prove that spans have blocks, engines and times, in the order of times.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        num_blocks, num_spans = 0, 0
        for key, spans in self._known.items():
            require(bool(spans), "block table: a run without blocks")
            end = 0
            for span in spans:
                require(
                    span.key == key and end <= span.start < span.stop,
                    "block table: blocks of a run are out of order",
                )
                require(span in self._by_age, "block table: a span without an age")
                end = span.stop
                num_blocks += span.stop - span.start
            num_spans += len(spans)
        require(num_blocks == self._num_blocks, "block table: blocks miscounted")
        require(num_blocks <= self.most_blocks, "block table: too many blocks")
        require(num_spans == len(self._by_age), "block table: a span of no run")
        last_s = -inf
        for span in self._by_age:
            require(bool(span.places), "block table: a block without an engine")
            require(span.sent_s >= last_s, "block table: out of order")
            last_s = span.sent_s


class AIBrixPrefix(RandomRouter):
    """The engine that knows most of the prompt, if it is not far above the mean.

    1. Where the most loaded engine has more than `imbalance_abs_count` requests in
       flight above the least loaded one, prefixes are looked up among the least loaded
       ones only.
    2. Engines that know a prefix, the most known first, of equals the one with the
       fewest in flight, any of those: the first with no more in flight than the mean
       of all and `standard_deviation_factor` standard deviations.
    3. None: the fewest in flight, any of equals. This holds for a single engine.

    Parameters
    ----------
    num_engines
        Places to choose from.
    stream
        Draws among equals.
    env
        The clock, by which blocks are forgotten.
    imbalance_abs_count, standard_deviation_factor
        See above.

    Notes
    -----
    Source: AIBrix of August 2026, ``pkg/plugins/gateway/algorithms/prefix_cache.go``
    with its character tokenizer and without KV events.
    """

    def __init__(
        self,
        num_engines: int,
        stream: np.random.Generator,
        env: simpy.Environment,
        *,
        imbalance_abs_count: int = 8,
        standard_deviation_factor: int = 1,
    ) -> None:
        super().__init__(num_engines, stream)
        at_least(
            0,
            imbalance_abs_count=imbalance_abs_count,
            standard_deviation_factor=standard_deviation_factor,
        )
        self.imbalance_abs_count = imbalance_abs_count
        self.standard_deviation_factor = standard_deviation_factor
        self.table = BlockTable()
        self._env = env

    def _pick(self, request: Request) -> int:
        now_s = self._env.now
        runs = prompt_runs(request, BLOCK_TOKENS)
        self.table.forget(now_s)
        places = self.candidates(self.table.percents(runs, self._looked_at()))
        places = places or self._least_loaded_places(self.places)
        place = places[self._draw(len(places))]
        self.table.add(runs, place, now_s)
        return place

    def candidates(self, percents: dict[int, int]) -> list[int]:
        """Return the places among which it draws; none where load decides.

        Parameters
        ----------
        percents
            By place, how much it knows of the prompt.
        """
        if len(self.places) == 1:
            return []  # the deviation of one load is not a number
        loads = self.num_in_flight
        ready = [loads[place] for place in self.places]
        most = fmean(ready) + self.standard_deviation_factor * stdev(ready)
        ranks = [
            (-percent, loads[place])
            for place, percent in percents.items()
            if loads[place] <= most
        ]
        if not ranks:
            return []
        percent, load = min(ranks)
        return [
            place
            for place in sorted(percents)
            if (-percents[place], loads[place]) == (percent, load)
        ]

    def _looked_at(self) -> list[int]:
        """Return the places whose prefixes count."""
        loads = self.num_in_flight
        ready = [loads[place] for place in self.places]
        least = min(ready)
        most = inf if max(ready) - least <= self.imbalance_abs_count else least
        return [place for place in self.places if loads[place] <= most]

    def _forget(self, place: int) -> None:
        self.table.forget_engine(place)
