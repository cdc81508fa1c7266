"""Routers that know what they have sent themselves, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import TYPE_CHECKING

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from sim.scheduler.request import Request


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
        """Forget what the engine at `place` was sent: it is gone."""

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


class RoundRobin(CountingRouter):
    """One engine after the other."""

    def __init__(self, num_engines: int) -> None:
        super().__init__(num_engines)
        self._turns = count()

    def _pick(self, request: Request) -> int:
        del request
        return self.places[next(self._turns) % len(self.places)]


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
        self._stream = stream

    def _pick(self, request: Request) -> int:
        del request
        return self.places[int(self._stream.integers(len(self.places)))]


class LeastRequests(RandomRouter):
    """The engine with the fewest requests in flight, any of equals."""

    def _pick(self, request: Request) -> int:
        del request
        loads = self.num_in_flight
        least = min(loads[place] for place in self.places)
        places = [place for place in self.places if loads[place] == least]
        return places[int(self._stream.integers(len(places)))]


class PowerOfTwo(RandomRouter):
    """The less loaded of two engines that are drawn.

    Source: sglang-router 0.3.2: two different healthy workers are drawn, the first one
    is taken if it has no more in flight than the second.
    """

    def _pick(self, request: Request) -> int:
        del request
        num_engines = len(self.places)
        if num_engines == 1:
            return self.places[0]
        first = int(self._stream.integers(num_engines))
        second = int(self._stream.integers(num_engines - 1))
        second += second >= first
        return self._least_loaded((self.places[first], self.places[second]))
