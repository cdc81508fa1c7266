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
        return next(self._turns) % len(self.num_in_flight)


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
        return int(self._stream.integers(len(self.num_in_flight)))


class LeastRequests(RandomRouter):
    """The engine with the fewest requests in flight, any of equals."""

    def _pick(self, request: Request) -> int:
        del request
        least = min(self.num_in_flight)
        places = [i for i, number in enumerate(self.num_in_flight) if number == least]
        return places[int(self._stream.integers(len(places)))]


class PowerOfTwo(RandomRouter):
    """The less loaded of two engines that are drawn.

    Source: sglang-router 0.3.2: two different healthy workers are drawn, the first one
    is taken if it has no more in flight than the second.
    """

    def _pick(self, request: Request) -> int:
        del request
        num_engines = len(self.num_in_flight)
        if num_engines == 1:
            return 0
        first = int(self._stream.integers(num_engines))
        second = int(self._stream.integers(num_engines - 1))
        second += second >= first
        return self._least_loaded((first, second))
