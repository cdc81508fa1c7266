"""Stopwatches: CUDA events and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

Call = Callable[[], object]

HEAD_START_S = 250e-6
"""Seconds for which the device is kept busy, about, so that the host has enqueued
everything, a graph of hundreds of kernels too, before the first event passes."""
CYCLES_PER_S = 2e9
"""Of a multiprocessor, about: what a head start is counted in."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Calls that run back to back at once."""

    run: Call
    """Enqueues all of them, and does not wait."""
    seconds: Callable[[], float]
    """Runs all of them and returns the device's time."""


class Timers(Protocol):
    """How calls are timed; all results are seconds."""

    device: torch.device

    def graph(self, calls: Sequence[Call]) -> Replay | None:
        """Return all calls as one graph; None where they cannot be captured."""

    def eager(self, call: Call) -> float:
        """Return the device's time of one call, the L2 cache flushed before it."""

    def host(self, call: Call) -> float:
        """Return the host's time of enqueuing one call on an idle device."""

    def transfer(self, call: Callable[[], None], ahead_s: float = 0.0) -> float:
        """Return the time between two events around a call on the transfer stream.

        For `ahead_s` seconds the device is kept busy while the host enqueues; what the
        host takes beyond them is part of the time.
        """

    def transfer_host(self, call: Callable[[], None]) -> float:
        """Return the host's time of enqueuing a call on the transfer stream."""

    def beside_transfers(
        self, call: Callable[[], None], count: int
    ) -> AbstractContextManager[None]:
        """Keep the transfer stream busy with `count` calls; wait for them at last."""

    def transfer_beside(
        self, call: Callable[[], None], load: Call, count: int
    ) -> float:
        """Time a transfer while `count` runs of `load` keep the device busy."""


class CudaTimers:
    """Events and graphs of one GPU.

    Transfers have a stream of their own: batched copies fall back to single copies on
    the legacy default stream.
    """

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self.device = device
        self.transfer_stream = torch.cuda.Stream(device)
        self._capture_stream = torch.cuda.Stream(device)
        self._flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def graph(self, calls: Sequence[Call]) -> Replay | None:
        """Return the replay of a captured graph of all calls.

        Each runs once before, on a side stream, as capturing demands: kernels are
        compiled and workspaces allocated by then.
        """
        side = self._capture_stream
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for call in dict.fromkeys(calls):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # not `torch.cuda.graph`: it empties the allocator's cache each time
        try:
            with torch.cuda.stream(side):
                graph.capture_begin()
                try:
                    for call in calls:
                        call()
                finally:
                    graph.capture_end()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            return None
        torch.cuda.current_stream(self.device).wait_stream(side)
        return Replay(graph.replay, lambda: self._between(graph.replay))

    def _between(self, run: Call) -> float:
        _keep_busy(HEAD_START_S)
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def eager(self, call: Call) -> float:
        self._flush.add_(1)
        return self._between(call)

    def host(self, call: Call) -> float:
        torch.cuda.synchronize(self.device)
        start_s = time.perf_counter()
        call()
        passed_s = time.perf_counter() - start_s
        torch.cuda.synchronize(self.device)
        return passed_s

    def transfer(self, call: Callable[[], None], ahead_s: float = 0.0) -> float:
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.transfer_stream):
            if ahead_s:
                _keep_busy(ahead_s)
            self._start.record(self.transfer_stream)
            call()
            self._end.record(self.transfer_stream)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def transfer_host(self, call: Callable[[], None]) -> float:
        with torch.cuda.stream(self.transfer_stream):
            return self.host(call)

    @contextmanager
    def beside_transfers(self, call: Callable[[], None], count: int) -> Iterator[None]:
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.transfer_stream):
            for _ in range(count):
                call()
        yield
        torch.cuda.synchronize(self.device)

    def transfer_beside(
        self, call: Callable[[], None], load: Call, count: int
    ) -> float:
        torch.cuda.synchronize(self.device)
        for _ in range(count):
            load()
        with torch.cuda.stream(self.transfer_stream):
            self._start.record(self.transfer_stream)
            call()
            self._end.record(self.transfer_stream)
        torch.cuda.synchronize(self.device)
        return float(self._start.elapsed_time(self._end)) / 1e3


def _keep_busy(seconds: float) -> None:
    """Enqueue a kernel that does nothing for about so long."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))
