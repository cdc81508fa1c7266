"""Ray Serve's router for language models: the longest known prefix, then queues."""

from __future__ import annotations

from math import inf
from sys import maxsize
from typing import TYPE_CHECKING

from sim.errors import ConfigError
from sim.fleet.checks import shares
from sim.fleet.routers.counting import PowerOfTwo
from sim.fleet.routers.prefix_tree import PrefixTree, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from cache.tokens import Piece
    from sim.scheduler.request import Request


class RayPrefix(PowerOfTwo):
    """Of the engines that know the longest prefix, the one with the fewest in flight.

    1. Out of balance, if the most loaded engine has more than `imbalanced_threshold`
       requests in flight above the least loaded one: the less loaded of two that are
       drawn.
    2. Else the engines that know the longest prefix, if that is `match_rate_threshold`
       of the prompt or more; else those of which the fewest tokens are remembered. Of
       these the one with the fewest in flight, the first of equals.

    The prompt is then remembered of the engine; nothing is forgotten, as by default.

    Parameters
    ----------
    num_engines
        Places to choose from.
    stream
        Draws two engines.
    imbalanced_threshold
        Requests; None, as by default, so that prefixes always decide.
    match_rate_threshold
        Share of the prompt, in tokens here and in characters there.

    Notes
    -----
    Source: Ray 2.60.0, ``llm/_internal/serve/routing_policies/prefix_aware``
    (`PrefixCacheAffinityRouter`) and ``serve/_private/request_router``. Its queue
    lengths go up with each request sent and down with each that ends; that they are
    asked for anew when none was sent for 10 s is left out, as nothing differs then.
    """

    def __init__(
        self,
        num_engines: int,
        stream: np.random.Generator,
        *,
        imbalanced_threshold: float | None = None,
        match_rate_threshold: float = 0.1,
    ) -> None:
        super().__init__(num_engines, stream)
        shares(match_rate_threshold=match_rate_threshold)
        if imbalanced_threshold is not None and not imbalanced_threshold >= 0:
            raise ConfigError(
                f"imbalanced_threshold: must be 0 or more, got {imbalanced_threshold}"
            )
        self.imbalanced_threshold = (
            inf if imbalanced_threshold is None else imbalanced_threshold
        )
        self.match_rate_threshold = match_rate_threshold
        self.tree = PrefixTree(maxsize)

    def _pick(self, request: Request) -> int:
        pieces = pieces_of(request.tokens.prompt())
        loads = [self.num_in_flight[place] for place in self.places]
        if max(loads) - min(loads) > self.imbalanced_threshold:
            place = super()._pick(request)
        else:
            place = self._least_loaded(self.candidates(pieces))
        self.tree.insert(pieces, place)
        return place

    def candidates(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the places among which queues decide while load is balanced."""
        num_tokens = sum(length for *_, length in pieces)
        num_known, places = self.tree.match(pieces)
        everywhere = self.places
        if num_known / num_tokens >= self.match_rate_threshold:
            return places or everywhere
        remembered = self.tree.num_tokens
        numbers = [remembered.get(place, 0) for place in everywhere]
        least = min(numbers)
        pairs = zip(everywhere, numbers, strict=True)
        return [place for place, number in pairs if number == least]

    def _forget(self, place: int) -> None:
        self.tree.forget(place)
