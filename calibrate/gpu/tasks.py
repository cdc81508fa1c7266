"""Tasks: a point's calls under a stopwatch, and what becomes of their errors."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from calibrate.gpu.timers import HEAD_START_S
from calibrate.harness.device import DeviceFaultError, UnsupportedPointError, said
from calibrate.kernels.cuda_library import CudaError
from calibrate.measurement import median

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from calibrate.gpu.timers import Timers

REFUSALS = ("OutOfResources", "CompilationError", "PTXASError")
"""Triton's errors, which cannot be named without importing it."""
GRAPH_S = 1e-3
"""Seconds that a replayed graph should take at least: the start of it then vanishes."""
MAX_CALLS = 256
"""Calls of a graph at most."""
MAX_AHEAD_S = 0.1
"""Seconds for which the device waits for the host to enqueue a transfer, at most."""
SAMPLES = 10


@contextmanager
def refusing(device: torch.device) -> Iterator[None]:
    """Run the body; say of its error whether a point or the device is lost.

    What did not fit or was refused raises `UnsupportedPointError`, a device that
    answers nothing more `DeviceFaultError`. An error of ours is neither, and passes as
    it is.
    """
    try:
        yield
    except UnsupportedPointError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise UnsupportedPointError("it does not fit the device's memory") from error
    except Exception as error:
        if is_broken(device):
            raise DeviceFaultError(said(error)) from error
        known = isinstance(error, RuntimeError | CudaError)
        if known or type(error).__name__ in REFUSALS:
            raise UnsupportedPointError(said(error)) from error
        raise


def is_broken(device: torch.device) -> bool:
    """Return whether every call fails from now on, as after an illegal address."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def num_pools(pool_bytes: float, l2_bytes: int, most: int) -> int:
    """Return the pools to rotate over.

    Three at least, together over four times the L2.
    """
    wanted = max(3, math.ceil(4 * l2_bytes / max(pool_bytes, 1.0)))
    return max(1, min(wanted, most, 64))


class KernelTask:
    """Equal calls that rotate over pools, one a pool, on other memory each."""

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
        return len(self._in_graph) if metric == "device" else 1

    def sample(self, metric: str, count: int) -> list[float]:
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
        self._replay = None
        self._calls = []
        self._in_graph = []


class TransferTask:
    """A transfer between host and device, on a stream of its own.

    `calls` are of equal size in different orders. With `ahead` the host's part is kept
    out of the device's time; not for a loop of copies, which blocks the host: both are
    one.
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
        del metric
        return 1

    def sample(self, metric: str, count: int) -> list[float]:
        with refusing(self._timers.device):
            return [self._sample(metric) for _ in range(count)]

    def _sample(self, metric: str) -> float:
        self._next = (self._next + 1) % len(self._calls)
        call = self._calls[self._next]
        if metric == "host":
            return self._timers.transfer_host(call)
        return self._timers.transfer(call, self._ahead_s)

    def close(self) -> None:
        self._calls = []


def overlap_times(
    timers: Timers, step: KernelTask, transfer: Callable[[], None]
) -> dict[str, list[float]]:
    """Return seconds of a call of the step and of the transfer, alone and together.

    While one is timed, so much of the other is enqueued that it never ends first. The
    step runs on the current stream, the transfer on its own. The leading metric of the
    step is a replayed graph.
    """
    metric = step.metrics[0]
    step.sample(metric, 2)
    step_alone = step.sample(metric, SAMPLES)
    transfer_alone = [timers.transfer(transfer) for _ in range(SAMPLES)]
    step_s = median(step_alone) * step.repeats(metric)
    transfer_s = median(transfer_alone)
    transfers = 1 + math.ceil(3 * step_s / transfer_s)
    replays = 1 + math.ceil(3 * transfer_s / step_s)
    step_with, transfer_with = [], []
    for _ in range(SAMPLES):
        with timers.beside_transfers(transfer, transfers):
            step_with += step.sample(metric, 1)
        transfer_with.append(timers.transfer_beside(transfer, step.enqueue, replays))
    return {
        "step_alone": step_alone,
        "step_with": step_with,
        "transfer_alone": transfer_alone,
        "transfer_with": transfer_with,
    }
