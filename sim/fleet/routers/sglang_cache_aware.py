"""SGLang's router: the longest known prefix, unless the load is out of balance."""

from __future__ import annotations

from math import ceil, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Final

from sim.fleet.checks import at_least, shares
from sim.fleet.routers.counting import RandomRouter
from sim.fleet.routers.prefix_tree import PrefixTree, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from cache.tokens import Piece
    from sim.fleet.balancer import Load
    from sim.scheduler.request import Request

CHARS_PER_TOKEN: Final = 4
"""Stands between characters, of which the router's tree is made, and tokens."""
LEAST_MARGIN: Final = 4
"""Requests in flight above the mean below which SMG's gate stays open."""


class SGLangCacheAware(RandomRouter):
    """Chooses by prefix where the load is balanced, and by load where it is not.

    1. Out of balance, if the most loaded engine has more than `balance_abs_threshold`
       requests in flight above the least loaded one, and more than
       `balance_rel_threshold` times its number: the least loaded one.
    2. Else the engine that knows the longest prefix, if that is more than
       `cache_threshold` of the prompt; else the least loaded one.

    With `spill_gate` balance is that of the engine which knows the prefix, of several
    the least loaded one: it is passed over for the least loaded of all if it has more
    than `balance_rel_threshold` times the mean, and more than `balance_abs_threshold`
    above it. That margin is at most what a count of this mean swings by, two standard
    deviations rounded up, though not less than `LEAST_MARGIN`.

    The prompt is then remembered of the engine. Ties go to the first engine, with
    `spill_gate` to any of them; those of sglang-router to the order in which its
    workers have registered, or to any that knows the prefix.

    Parameters
    ----------
    num_engines
        Places to choose from.
    stream
        Draws among equals.
    cache_threshold
        Share of the prompt, in tokens here and in characters there.
    balance_abs_threshold, balance_rel_threshold
        See above.
    spill_gate
        Whether to choose as SMG does, the router that came after.
    max_tree_size
        Characters that are remembered of an engine when the oldest are taken out; with
        `spill_gate` of all engines together.

    Attributes
    ----------
    interval_s
        Between two evictions.

    Notes
    -----
    Source: sglang-router 0.3.2, its launcher's defaults (`router_args.py`) and its
    policy `cache_aware`; with `spill_gate` SMG 1.13.0, as its server chooses. A token
    counts as `CHARS_PER_TOKEN` characters.
    """

    interval_s = 60.0

    def __init__(
        self,
        num_engines: int,
        stream: np.random.Generator,
        *,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        spill_gate: bool = False,
        max_tree_size: int = 1 << 26,
    ) -> None:
        super().__init__(num_engines, stream)
        shares(cache_threshold=cache_threshold)
        at_least(
            0,
            balance_abs_threshold=balance_abs_threshold,
            balance_rel_threshold=balance_rel_threshold,
            max_tree_size=max_tree_size,
        )
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold
        self.spill_gate = spill_gate
        self.tree = PrefixTree(max_tree_size // CHARS_PER_TOKEN, is_shared=spill_gate)

    def _pick(self, request: Request) -> int:
        pieces = pieces_of(request.tokens.prompt())
        places = self.candidates(pieces)
        place = places[self._draw(len(places)) if self.spill_gate else 0]
        self.tree.insert(pieces, place)
        return place

    def candidates(self, pieces: tuple[Piece, ...]) -> list[int]:
        """Return the places that a prompt may go to; nothing is remembered or counted.

        The real router takes any of them.
        """
        if self.spill_gate or not self._is_out_of_balance():
            num_known, places = self.tree.match(pieces)
            num_tokens = sum(length for *_, length in pieces)
            if num_tokens and num_known / num_tokens > self.cache_threshold:
                if not self.spill_gate:
                    return places
                places = self._least_loaded_places(places)
                if not self._spills(self.num_in_flight[places[0]]):
                    return places
        if self.spill_gate:
            return self._least_loaded_places(self.places)
        return [self._least_loaded(self.places)]

    def _spills(self, load: int) -> bool:
        """Whether an engine with so many in flight is passed over."""
        mean = fmean(self.num_in_flight[place] for place in self.places)
        swing = max(ceil(2.0 * sqrt(mean)), LEAST_MARGIN)
        margin = min(self.balance_abs_threshold, swing)
        return load > self.balance_rel_threshold * mean and load > mean + margin

    def _is_out_of_balance(self) -> bool:
        loads = [self.num_in_flight[place] for place in self.places]
        most, least = max(loads), min(loads)
        return (
            most - least > self.balance_abs_threshold
            and most > self.balance_rel_threshold * least
        )

    def _forget(self, place: int) -> None:
        self.tree.forget(place)

    def hear(self, loads: Sequence[Load]) -> None:
        """Take the oldest out of the tree; engines are not looked at."""
        del loads
        self.evict()

    def evict(self) -> None:
        """Take the oldest out of the tree."""
        self.tree.evict()
