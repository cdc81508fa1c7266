"""The device that the harness times: every operation, bound to kernels and memory."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from calibrate.gpu import checks, facts
from calibrate.gpu.arena import Arena, batches, lengths
from calibrate.gpu.attention import Engines, attention_call
from calibrate.gpu.backends import choices_here
from calibrate.gpu.faults import refusing
from calibrate.gpu.layers import Inputs, layer_call, layer_inputs
from calibrate.gpu.overlap import overlap_times
from calibrate.gpu.tasks import KernelTask, TransferTask, num_pools
from calibrate.gpu.timers import CudaTimers, Timers
from calibrate.gpu.transfers import Memory, Transfers, copy_call
from calibrate.harness.device import Check, UnsupportedPointError, said
from calibrate.harness.grid import GIB, Limits
from calibrate.harness.plan import seed_of
from calibrate.harness.work import least_bytes
from calibrate.kernels.cuda_build import CudaBuildError
from calibrate.kernels.cuda_kernels import cuda_kernels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrate.harness.device import Physics, Task
    from calibrate.harness.geometry import Geometry
    from calibrate.harness.grid import Choice
    from calibrate.kernels.cuda_library import CudaKernels
    from calibrate.measurement import Curve, Point

ARENA_SHARE = 0.4
"""Part of the free memory that keys and values take."""
ARENA_BYTES = 39 * GIB
"""Bytes that they take at most."""
TRANSFER_BYTES = GIB
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a device is, apart from what is run on it."""

    physics: Physics
    num_sms: int
    l2_bytes: int
    arena_bytes: int
    transfer_bytes: int

    @property
    def limits(self) -> Limits:
        """What the grid may ask for."""
        return Limits(self.arena_bytes // 3, self.transfer_bytes, self.arena_bytes // 2)


class GpuDevice:
    """Kernels under a stopwatch.

    Parameters
    ----------
    timers
        The stopwatch, which knows the torch device.
    hardware
        Rates and sizes.
    backends
        Of `calibrate.gpu.detect.backends_here`.
    library
        The CUDA kernels, or None.
    """

    def __init__(
        self,
        timers: Timers,
        hardware: Hardware,
        backends: Mapping[str, str],
        library: CudaKernels | None,
    ) -> None:
        self.timers = timers
        self.physics = hardware.physics
        self.limits = hardware.limits
        self.num_sms = hardware.num_sms
        self.library = library
        self.engines = Engines(timers.device, hardware.num_sms, library)
        self._hardware = hardware
        self._backends = dict(backends)
        self._arenas: dict[torch.dtype, Arena] = {}
        self._transfers: Transfers | None = None

    @classmethod
    def on_gpu(cls, backends: Mapping[str, str], seed: int) -> GpuDevice:
        """Return the current CUDA device; builds the CUDA kernels where that can be.

        Parameters
        ----------
        backends
            What is here; a failed build takes "cuda" out.
        seed
            Of torch's own random numbers.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(seed)
        properties = torch.cuda.get_device_properties(device)
        usable, library = dict(backends), None
        if not usable["cuda"]:
            try:
                library = cuda_kernels(10 * properties.major + properties.minor)
            except (CudaBuildError, OSError) as error:
                usable["cuda"] = said(error)
        free_bytes, _ = torch.cuda.mem_get_info(device)
        hardware = Hardware(
            facts.physics_of(device),
            properties.multi_processor_count,
            properties.L2_cache_size,
            # a whole GiB: the free bytes differ a little from run to run
            min(ARENA_BYTES, int(ARENA_SHARE * free_bytes)) // GIB * GIB,
            TRANSFER_BYTES,
        )
        timers = CudaTimers(device, hardware.l2_bytes)
        return cls(timers, hardware, usable, library)

    def facts(self) -> dict[str, Any]:
        """Return what identifies device, host and software, and what is missing."""
        missing = {name: why for name, why in self._backends.items() if why}
        found = facts.facts_of(self.timers.device)
        compiler = self.library.compiler if self.library else None
        found["versions"]["cuda_kernels"] = compiler
        return {**found, "missing_backends": missing}

    def clocks(self) -> dict[str, Any]:
        """Return clock rates and reasons to throttle."""
        return facts.clock_rates(self.timers.device)

    def now_s(self) -> float:
        """Return the host's monotonic clock."""
        return time.monotonic()

    def date(self) -> str:
        """Return the time of day in UTC."""
        return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def choices(self, backend: str, operations: Sequence[str]) -> list[Choice]:
        """Return the variants that the backends here offer."""
        return choices_here(self._backends, backend, operations)

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        """Hold a variant against high precision."""
        del geometry
        return checks.check(self, at, backend)

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        """Set a point up; what it needs beside the arena is freed with the task."""
        with refusing(self.timers.device):
            return self._prepare(point, backend, seed_of(seed, point.key))

    def overlap(
        self, points: Mapping[str, Point], backends: Mapping[str, str], seed: int
    ) -> dict[str, list[float]]:
        """Time a step and a transfer alone and together."""
        step = self.prepare(points["step"], backends["step"], seed)
        if not isinstance(step, KernelTask):
            raise TypeError(f"a step is a kernel; got {points['step'].key}")
        generator = torch.Generator().manual_seed(seed % 2**63)
        moving = points["transfer"]
        try:
            with refusing(self.timers.device):
                pairs = self.transfers().pairs(moving, generator)
                transfer = self.transfers().call(moving, backends["transfer"], pairs)
                return overlap_times(self.timers, step, transfer)
        finally:
            step.close()

    def arena(self, dtype: torch.dtype) -> Arena:
        """Return the memory that caches of a precision are views of; one is kept."""
        if dtype not in self._arenas:
            self._arenas.clear()
            generator = self.generator(0)
            size = self._hardware.arena_bytes
            self._arenas[dtype] = Arena(size, dtype, self.timers.device, generator)
        return self._arenas[dtype]

    def generator(self, seed: int) -> torch.Generator:
        """Return random numbers of the device."""
        return torch.Generator(self.timers.device).manual_seed(seed % 2**63)

    def transfers(self) -> Transfers:
        """Return the regions of host and device, allocated when first asked for."""
        if self._transfers is None:
            size = self._hardware.transfer_bytes
            pin = self.timers.device.type == "cuda"
            regions = [
                torch.empty(size, dtype=torch.uint8, device=self.timers.device),
                torch.empty(size, dtype=torch.uint8, pin_memory=pin),
                torch.empty(size, dtype=torch.uint8),
            ]
            for region in regions:
                # pages that were never written are all the same page of the host
                region.view(torch.int64).random_()
            memory = Memory(*regions)
            self._transfers = Transfers(memory, self.library, self.num_sms)
        return self._transfers

    def _prepare(self, point: Point, backend: str, seed: int) -> Task:
        at = point.curve
        if at.operation == "swap":
            generator = torch.Generator().manual_seed(seed % 2**63)
            moving = self.transfers()
            # three orders of pages: no two transfers in a row move the same
            orders = [moving.pairs(point, generator) for _ in range(3)]
            calls = [moving.call(point, backend, pairs) for pairs in orders]
            return TransferTask(self.timers, calls, ahead=at.variant != "loop")
        if at.operation == "copy_blocks":
            return KernelTask(self.timers, self._copies(point, backend, seed))
        wanted = num_pools(least_bytes(point), self._hardware.l2_bytes, 64)
        if at.operation.endswith("_attention"):
            arena = self.arena(DTYPES[at.dtype])
            made = batches(arena, at, lengths(point), wanted, self.generator(seed))
            return KernelTask(
                self.timers,
                [attention_call(at.variant, batch, self.engines)[0] for batch in made],
            )
        dtype = DTYPES.get(at.dtype, torch.float32)
        draw = Inputs(dtype, self.timers.device, self.generator(seed))
        pools = min(wanted, 16)
        made_inputs = [layer_inputs(point, draw) for _ in range(pools)]
        return KernelTask(
            self.timers, [layer_call(point, inputs) for inputs in made_inputs]
        )

    def _copies(self, point: Point, backend: str, seed: int) -> list[Any]:
        at = point.curve
        dtype = DTYPES[at.dtype]
        pool = self.arena(dtype).pool(
            at.constant("num_layers"), at.constant("page_bytes"), self.limits.pool_bytes
        )
        count, blocks = point.values[0], pool.shape[2]
        if 2 * count > blocks:
            raise UnsupportedPointError(f"{count} pairs do not fit {blocks} blocks")
        generator = torch.Generator().manual_seed(seed % 2**63)
        order = torch.randperm(blocks, generator=generator).tolist()
        most = blocks // (2 * count)
        size = least_bytes(point)
        calls = []
        for number in range(num_pools(size, self._hardware.l2_bytes, most)):
            mine = order[2 * count * number : 2 * count * (number + 1)]
            pairs = list(zip(mine[::2], mine[1::2], strict=True))
            calls.append(copy_call(pool, pairs, backend, self.library))
        return calls
