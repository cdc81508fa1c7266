"""Routers that know what they have sent themselves, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.request import Request

_MOST_WORD: Final = (1 << 32) - 1


class CountingRouter(ABC):
    """Counts its requests in flight at each engine: exactly, and at once.

    Parameters
    ----------
    num_engines
        Places to choose from, at least 1.

    Attributes
    ----------
    num_in_flight
        By place, requests that were sent there and have not ended.
    places
        Of the engines that are ready, in order.

    Raises
    ------
    ConfigError
        Without an engine.
    """

    def __init__(self, num_engines: int) -> None:
        if num_engines < 1:
            raise ConfigError(
                f"a router needs an engine to choose, got {num_engines}; give the pool "
                f"one replica or more"
            )
        self.num_in_flight = [0] * num_engines
        self.places = list(range(num_engines))

    def set_ready(self, places: Sequence[int]) -> None:
        """Choose among these places from now on, and forget the others' prompts."""
        for place in set(self.places).difference(places):
            self._forget(place)
        self.places = list(places)

    def _forget(self, place: int) -> None:  # noqa: B027 - most remember nothing
        """Forget the requests sent to the engine at `place`: it is gone."""

    def choose(self, request: Request) -> int:
        """Return the place of the engine that a request goes to, and count it there."""
        place = self._pick(request)
        self.num_in_flight[place] += 1
        return place

    def ended(self, request: Request, place: int) -> None:
        """Take note of the end of a request."""
        del request
        self.num_in_flight[place] -= 1

    @abstractmethod
    def _pick(self, request: Request) -> int:
        """Return the place of an engine."""

    def _least_loaded(self, places: Sequence[int]) -> int:
        """Return the place with the fewest in flight, the first of equals."""
        return min(places, key=self.num_in_flight.__getitem__)

    def _least_loaded_places(self, places: Sequence[int]) -> list[int]:
        """Return the places with the fewest in flight."""
        loads = self.num_in_flight
        least = min(loads[place] for place in places)
        return [place for place in places if loads[place] == least]


class RoundRobin(CountingRouter):
    """One engine after the other."""

    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines)
        self._turns = count()

    def _pick(self, request: Request) -> int:
        del request
        return self.places[next(self._turns) % len(self.places)]


class Draws:
    """Whole numbers as `Generator.integers` draws them, in a tenth of the time.

    Parameters
    ----------
    stream
        Drawn from ahead, so that nothing else may draw from it; PCG64, as all are.

    Notes
    -----
    Source: numpy's ``distributions.c`` (`bounded_lemire_uint32`).
    """

    def __init__(self, stream: np.random.Generator) -> None:
        self._stream = stream
        self._words: list[int] = []

    def below(self, bound: int) -> int:
        """Return a number from 0 on below `bound`, at most 2**32 - 1."""
        if bound == 1:
            return 0
        least = (_MOST_WORD + 1) % bound
        while True:
            if not self._words:
                self._draw()
            product = self._words.pop() * bound
            if product & _MOST_WORD >= least:
                return product >> 32

    def _draw(self) -> None:
        drawn = self._stream.integers(_MOST_WORD + 1, size=1024, dtype=np.uint32)
        self._words = drawn[::-1].tolist()


class RandomRouter(CountingRouter):
    """Any engine, each as likely.

    Parameters
    ----------
    num_engines
        Places to choose from.
    stream
        A random stream of its own.
    """

    def __init__(self, num_engines: int, stream: np.random.Generator) -> None:
        super().__init__(num_engines)
        self._draw = Draws(stream).below

    def _pick(self, request: Request) -> int:
        del request
        return self.places[self._draw(len(self.places))]


class LeastRequests(RandomRouter):
    """The engine with the fewest requests in flight, any of equals.

    Places of equal counts stand together, so that no choice looks at all engines::

        0: [ ]   1: [2, 5, 9]   2: [0, 1, 3]   ...     the fewest: 1
    """

    def __init__(self, num_engines: int, stream: np.random.Generator) -> None:
        super().__init__(num_engines, stream)
        self._least = 0
        self._by_count: list[list[int]] = [[*self.places]]

    def set_ready(self, places: Sequence[int]) -> None:
        super().set_ready(places)
        loads = self.num_in_flight
        self._by_count = [[] for _ in range(max(loads) + 1)]
        for place in self.places:
            self._by_count[loads[place]].append(place)
        self._least = min(loads[place] for place in self.places)

    def _pick(self, request: Request) -> int:
        del request
        least, by_count = self._least, self._by_count
        places = by_count[least]
        place = places.pop(self._draw(len(places)))
        if least + 1 == len(by_count):
            by_count.append([])
        insort(by_count[least + 1], place)
        if not places:
            self._least = least + 1
        return place

    def ended(self, request: Request, place: int) -> None:
        del request
        num_before = self.num_in_flight[place]
        self.num_in_flight[place] = num_before - 1
        equals = self._by_count[num_before]
        index = bisect_left(equals, place)
        if index == len(equals) or equals[index] != place:
            return  # it is not ready
        del equals[index]
        insort(self._by_count[num_before - 1], place)
        self._least = min(self._least, num_before - 1)


class PowerOfTwo(RandomRouter):
    """The less loaded of two engines that are drawn.

    Source: SMG 1.13.0 with `--power-of-two-load-metric requests`, and by default where
    engines report nothing: of two different ones the first, if it has no more in flight
    than the second. sglang-router 0.3.2 has the rule, but does not count what is in
    flight: where engines report no tokens, it takes any.
    """

    def _pick(self, request: Request) -> int:
        del request
        num_engines = len(self.places)
        if num_engines == 1:
            return self.places[0]
        first = self._draw(num_engines)
        second = self._draw(num_engines - 1)
        second += second >= first
        return self._least_loaded((self.places[first], self.places[second]))
