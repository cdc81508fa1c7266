"""A stopwatch by the host's clock: for tests of everything else."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from calibrate.gpu.timers import Replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from calibrate.gpu.timers import Call


class CpuTimers:
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def graph(self, calls: Sequence[Call]) -> Replay | None:
        def run() -> None:
            for call in calls:
                call()

        return Replay(run, lambda: self.host(run))

    def eager(self, call: Call) -> float:
        return self.host(call)

    def host(self, call: Call) -> float:
        start_s = time.perf_counter()
        call()
        return max(time.perf_counter() - start_s, 1e-9)

    def transfer(self, call: Callable[[], None], ahead_s: float = 0.0) -> float:
        del ahead_s
        return self.host(call)

    def transfer_host(self, call: Callable[[], None]) -> float:
        return self.host(call)

    @contextmanager
    def beside_transfers(self, call: Callable[[], None], count: int) -> Iterator[None]:
        """Run the transfers first: nothing runs beside anything here."""
        for _ in range(count):
            call()
        yield

    def transfer_beside(
        self, call: Callable[[], None], load: Call, count: int
    ) -> float:
        for _ in range(count):
            load()
        return self.host(call)
