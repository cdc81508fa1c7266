"""Tasks: a point's calls, one a pool, under a stopwatch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from calibrate.gpu.faults import refusing
from calibrate.gpu.timers import HEAD_START_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from calibrate.gpu.timers import Timers

GRAPH_S = 1e-3
"""Seconds that a replayed graph should take at least: the start of it then vanishes."""
MAX_CALLS = 256
"""Calls of a graph at most."""
MAX_AHEAD_S = 0.1
"""Seconds for which the device waits for the host to enqueue a transfer, at most."""


def num_pools(pool_bytes: float, l2_bytes: int, most: int) -> int:
    """Return the pools to rotate over: three at least, together over four times the L2.

    Parameters
    ----------
    pool_bytes
        Bytes that one call reads.
    l2_bytes
        The cache's.
    most
        Pools that fit; the answer is never more, and never less than one.
    """
    wanted = max(3, math.ceil(4 * l2_bytes / max(pool_bytes, 1.0)))
    return max(1, min(wanted, most, 64))


class KernelTask:
    """An operation on the device, as equal calls that rotate over pools.

    Parameters
    ----------
    timers
        The stopwatch.
    calls
        One a pool; each enqueues the same work on other memory.
    """

    def __init__(self, timers: Timers, calls: Sequence[Callable[[], object]]) -> None:
        self._timers = timers
        self._calls = list(calls)
        self._next = 0
        for call in self._calls:  # compiled and checked before anything is captured
            call()
        rough_s = max(timers.eager(self._rotated()), 1e-7)
        rounds = math.ceil(GRAPH_S / rough_s / len(self._calls))
        rounds = max(1, min(rounds, MAX_CALLS // len(self._calls)))
        self._in_graph = self._calls * rounds
        self._replay = timers.graph(self._in_graph)
        captured = self._replay is not None
        self.metrics = ("device", "eager", "host") if captured else ("eager", "host")

    def repeats(self, metric: str) -> int:
        """Return the calls that one sample takes."""
        return len(self._in_graph) if metric == "device" else 1

    def sample(self, metric: str, count: int) -> list[float]:
        """Return `count` samples, in seconds a call.

        Raises
        ------
        UnsupportedPointError, DeviceFaultError
            See `calibrate.gpu.faults`.
        """
        with refusing(self._timers.device):
            return [self._sample(metric) for _ in range(count)]

    def _sample(self, metric: str) -> float:
        if metric == "eager":
            return self._timers.eager(self._rotated())
        if metric == "host":
            return self._timers.host(self._rotated())
        if self._replay is None:
            raise RuntimeError("a task without a graph was asked for its device time")
        return self._replay.seconds() / len(self._in_graph)

    def enqueue(self) -> None:
        """Run the graph, or the calls where there is none, without waiting."""
        if self._replay is not None:
            self._replay.run()
            return
        for call in self._calls:
            call()

    def _rotated(self) -> Callable[[], object]:
        self._next = (self._next + 1) % len(self._calls)
        return self._calls[self._next]

    def close(self) -> None:
        """Let go of the graph and of what the calls hold."""
        self._replay = None
        self._calls = []
        self._in_graph = []


class TransferTask:
    """A transfer between host and device, on a stream of its own.

    Parameters
    ----------
    timers
        The stopwatch.
    calls
        Transfers of equal size in different orders.
    ahead
        Whether the host's part is kept out of the device's time. Not for a loop of
        copies, which blocks the host: there both are one.
    """

    metrics = ("device", "host")

    def __init__(
        self, timers: Timers, calls: Sequence[Callable[[], None]], ahead: bool
    ) -> None:
        self._timers = timers
        self._calls = list(calls)
        self._next = 0
        timers.transfer(self._calls[0])
        self._ahead_s = 0.0
        if ahead:
            host_s = timers.transfer_host(self._calls[0])
            self._ahead_s = min(MAX_AHEAD_S, max(HEAD_START_S, 1.5 * host_s))

    def repeats(self, metric: str) -> int:
        """Return 1: each sample is one transfer."""
        del metric
        return 1

    def sample(self, metric: str, count: int) -> list[float]:
        """Return `count` samples, in seconds a call.

        Raises
        ------
        UnsupportedPointError, DeviceFaultError
            See `calibrate.gpu.faults`.
        """
        with refusing(self._timers.device):
            return [self._sample(metric) for _ in range(count)]

    def _sample(self, metric: str) -> float:
        self._next = (self._next + 1) % len(self._calls)
        call = self._calls[self._next]
        if metric == "host":
            return self._timers.transfer_host(call)
        return self._timers.transfer(call, self._ahead_s)

    def close(self) -> None:
        """Let go of what the calls hold."""
        self._calls = []
