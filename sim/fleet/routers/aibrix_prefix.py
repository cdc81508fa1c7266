"""AIBrix's router: the longest known prefix, unless an engine is far above the mean."""

from __future__ import annotations

from collections import OrderedDict
from math import floor, inf
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final

from cache.errors import require
from sim.fleet.checks import at_least
from sim.fleet.routers.block_index import prompt_hashes
from sim.fleet.routers.counting import RandomRouter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np
    import simpy

    from sim.scheduler.request import Request

BLOCK_TOKENS: Final = 1
"""Of 4 characters, with 4 of them a token."""
MOST_BLOCKS: Final = 200_000
FORGOTTEN_AFTER_S: Final = 20 * 60.0
SWEEP_INTERVAL_S: Final = 1.0


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
    does not keep it.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.most_blocks = most_blocks
        self._places: OrderedDict[int, set[int]] = OrderedDict()
        self._sent_s: dict[int, float] = {}

    def percents(self, hashes: Sequence[int], among: Collection[int]) -> dict[int, int]:
        """Return by place how much of a prompt it knows, in whole percent.

        Only places that know the first block are in it.
        """
        found: dict[int, int] = {}
        table, nowhere = self._places, frozenset[int]()
        known, num_known = set(among), 0
        for each in hashes:
            own = table.get(each, nowhere)
            if not known <= own:
                if num_known:
                    percent = num_known * 100 // len(hashes)
                    found.update(dict.fromkeys(known - own, percent))
                known &= own
                if not known:
                    return found
            num_known += 1
        if num_known:
            found.update(dict.fromkeys(known, 100))
        return found

    def add(self, hashes: Sequence[int], place: int, now_s: float) -> None:
        """Remember that a prompt was sent to the engine at `place`, head first."""
        places, sent_s = self._places, self._sent_s
        for each in hashes:
            own = places.get(each)
            if own is None:
                places[each] = {place}
                if len(places) > self.most_blocks:  # maybe a later one of this prompt
                    oldest, _ = places.popitem(last=False)
                    del sent_s[oldest]
            else:
                own.add(place)
                places.move_to_end(each)
            sent_s[each] = now_s

    def forget(self, now_s: float) -> None:
        """Forget the blocks that the last sweep before `now_s` has found too old."""
        sweep_s = floor(now_s / SWEEP_INTERVAL_S) * SWEEP_INTERVAL_S
        places, sent_s = self._places, self._sent_s
        while places:
            oldest = next(iter(places))
            if sweep_s - sent_s[oldest] <= FORGOTTEN_AFTER_S:
                return
            del places[oldest], sent_s[oldest]

    def forget_engine(self, place: int) -> None:
        """Forget the engine at `place`, and what was sent to no other."""
        for each, own in [*self._places.items()]:
            own.discard(place)
            if not own:
                del self._places[each], self._sent_s[each]

    def check(self) -> None:
        """Prove that each block has an engine and a time, in the order of times.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        require(len(self._places) <= self.most_blocks, "block table: too many blocks")
        require(
            self._places.keys() == self._sent_s.keys(), "block table: times are missing"
        )
        last_s = -inf
        for each, places in self._places.items():
            require(bool(places), "block table: a block without an engine")
            require(self._sent_s[each] >= last_s, "block table: out of order")
            last_s = self._sent_s[each]


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
        hashes = prompt_hashes(request, BLOCK_TOKENS)
        self.table.forget(now_s)
        places = self.candidates(self.table.percents(hashes, self._looked_at()))
        places = places or self._least_loaded_places(self.places)
        place = places[self._draw(len(places))]
        self.table.add(hashes, place, now_s)
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
