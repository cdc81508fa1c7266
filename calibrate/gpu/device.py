"""The device that the harness times: operations bound to kernels, and their gate."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from calibrate.gpu import facts
from calibrate.gpu.arena import Arena, batches, lengths
from calibrate.gpu.attention import Engines, attention_call
from calibrate.gpu.backends import choices_here
from calibrate.gpu.experts import (
    FP8_TOLERANCE,
    ExpertLayers,
    token_dtype,
    worst_error,
)
from calibrate.gpu.layers import Inputs, layer_call, layer_inputs, precise
from calibrate.gpu.tasks import (
    KernelTask,
    TransferTask,
    is_broken,
    num_pools,
    overlap_times,
    refusing,
)
from calibrate.gpu.timers import CudaTimers, Timers
from calibrate.gpu.transfers import Memory, Transfers, copy_call
from calibrate.harness.device import (
    Check,
    DeviceFaultError,
    UnsupportedPointError,
    said,
)
from calibrate.harness.grid import GIB, Limits
from calibrate.harness.plan import seed_of
from calibrate.harness.work import least_bytes
from calibrate.kernels import reference
from calibrate.kernels.cuda_compile import CudaBuildError
from calibrate.kernels.cuda_kernels import cuda_kernels
from calibrate.measurement import Point

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrate.harness.device import Physics, Task
    from calibrate.harness.geometry import Geometry
    from calibrate.harness.grid import Choice
    from calibrate.kernels.cuda_library import CudaKernels
    from calibrate.measurement import Curve

    Lens = tuple[list[int], list[int]]

ARENA_SHARE = 0.4
"""Part of the free memory that keys and values take."""
ARENA_BYTES = 39 * GIB
"""Bytes that they take at most."""
TRANSFER_BYTES = GIB
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
"""Relative errors of a row that the precision explains."""
DECODES: Lens = ([1] * 5, [1, 17, 80, 600, 1100])
PREFILLS: tuple[Lens, ...] = (([130], [130]), ([37], [87]), ([1], [65]))
MIXED: Lens = ([40, 1, 1, 70], [73, 17, 300, 70])
SWAPS = ((7, 4096), (3, 32768))
"""(pages, bytes of a page)"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates and sizes of a device, whatever runs on it."""

    physics: Physics
    num_sms: int
    l2_bytes: int
    arena_bytes: int
    transfer_bytes: int

    @property
    def limits(self) -> Limits:
        return Limits(self.arena_bytes // 3, self.transfer_bytes, self.arena_bytes // 2)


class GpuDevice:
    """Kernels under a stopwatch."""

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
        self._experts = ExpertLayers(timers.device, hardware.l2_bytes)

    @classmethod
    def on_gpu(
        cls, backends: Mapping[str, str], seed: int, arena_bytes: int = ARENA_BYTES
    ) -> GpuDevice:
        """Return the current CUDA device.

        A failed build of CUDA kernels takes "cuda" out.
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
            min(arena_bytes, int(ARENA_SHARE * free_bytes)) // GIB * GIB,
            TRANSFER_BYTES,
        )
        timers = CudaTimers(device, hardware.l2_bytes)
        return cls(timers, hardware, usable, library)

    def facts(self) -> dict[str, Any]:
        missing = {name: why for name, why in self._backends.items() if why}
        found = facts.facts_of(self.timers.device)
        compiler = self.library.compiler if self.library else None
        found["versions"]["cuda_kernels"] = compiler
        return {**found, "missing_backends": missing}

    def clocks(self) -> dict[str, Any]:
        return facts.clock_rates(self.timers.device)

    def now_s(self) -> float:
        return time.monotonic()

    def date(self) -> str:
        return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def choices(self, backend: str, operations: Sequence[str]) -> list[Choice]:
        return choices_here(self._backends, backend, operations)

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        del geometry
        return check_variant(self, at, backend)

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        """Set a point up; its memory beside the arena is freed with the task."""
        with refusing(self.timers.device):
            return self._prepare(point, backend, seed_of(seed, point.key))

    def overlap(
        self, points: Mapping[str, Point], backends: Mapping[str, str], seed: int
    ) -> dict[str, list[float]]:
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
        if at.operation == "routed_experts":
            return KernelTask(self.timers, self._experts.calls(point, seed))
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


def check_variant(device: GpuDevice, at: Curve, backend: str) -> Check:
    """Return how far a variant is off on small shapes of its curve.

    A variant that cannot even be called is refused with its reason: an engine's
    functions change between releases, and a calibration goes on without it.
    """
    try:
        if at.operation.endswith("_attention"):
            return _attention(device, at)
        if at.operation == "swap":
            return _exact(all(_swapped(device, at, backend, s) for s in SWAPS))
        if at.operation == "copy_blocks":
            return _exact(_copied(device, at, backend))
        if at.operation == "routed_experts":
            return _experts(device, at)
        return _layer(device, at)
    except Exception as error:
        if is_broken(device.timers.device):
            raise DeviceFaultError(said(error)) from error
        return Check(error=float("inf"), tolerance=0.0, reason=said(error))


def _exact(holds: bool) -> Check:
    return Check(error=0.0 if holds else float("inf"), tolerance=0.0)


def _wait(device: GpuDevice) -> None:
    if device.timers.device.type == "cuda":
        torch.cuda.synchronize(device.timers.device)


def _attention(device: GpuDevice, at: Curve) -> Check:
    shapes = {
        "decode_attention": (DECODES,),
        "prefill_attention": PREFILLS,
        "mixed_attention": (MIXED,),
    }[at.operation]
    arena = device.arena(_dtype(at))
    worst = 0.0
    for lens in shapes:
        (batch,) = batches(arena, at, lens, 1, device.generator(7))
        call, out = attention_call(at.variant, batch, device.engines)
        call()
        _wait(device)
        expected = reference.paged_attention(batch)
        worst = max(worst, reference.worst_row_error(out, expected))
    return Check(worst, TOLERANCES[arena.dtype])


def _experts(device: GpuDevice, at: Curve) -> Check:
    is_fp8 = at.dtype.startswith("fp8")
    tolerance = FP8_TOLERANCE if is_fp8 else TOLERANCES[token_dtype(at)]
    return Check(worst_error(at, device.timers.device), tolerance)


def _swapped(
    device: GpuDevice, at: Curve, backend: str, shape: tuple[int, int]
) -> bool:
    """Return whether all pages arrived, and the source is unchanged."""
    transfers = device.transfers()
    pairs = transfers.pairs(Point(at, shape), torch.Generator().manual_seed(7))
    page_bytes = shape[1]
    host = transfers.memory.host[at.text("memory")]
    there = transfers.memory.device_bytes
    half = (len(pairs) + 1) // 2
    ways = {
        "h2d": [(host, there, pairs)],
        "d2h": [(there, host, pairs)],
        "both": [(host, there, pairs[:half]), (there, host, pairs[half:])],
    }[at.text("direction")]
    sent = [
        torch.stack([_page(source, first, page_bytes).cpu() for first, _ in moved])
        for source, _, moved in ways
        if moved
    ]
    seconds = device.timers.transfer(transfers.call(Point(at, shape), backend, pairs))
    _wait(device)
    arrived = [
        torch.stack([_page(target, second, page_bytes).cpu() for _, second in moved])
        for _, target, moved in ways
        if moved
    ]
    return seconds > 0 and all(map(torch.equal, sent, arrived))


def _page(region: torch.Tensor, index: int, page_bytes: int) -> torch.Tensor:
    return region[index * page_bytes : (index + 1) * page_bytes]


def _copied(device: GpuDevice, at: Curve, backend: str) -> bool:
    """Return whether targets hold their sources, and nothing else has changed."""
    page = at.constant("page_bytes") // _dtype(at).itemsize
    draw = Inputs(_dtype(at), device.timers.device, device.generator(7))
    pool = draw.normal(at.constant("num_layers"), 2, 9, 1, 1, page)
    expected = pool.clone()
    pairs = [(4, 0), (8, 2), (1, 7)]
    for first, second in pairs:
        expected[:, :, second] = pool[:, :, first]
    copy_call(pool, pairs, backend, device.library)()
    _wait(device)
    return torch.equal(pool, expected)


def _layer(device: GpuDevice, at: Curve) -> Check:
    if at.operation == "launch":
        return _exact(True)
    draw = Inputs(_dtype(at), device.timers.device, device.generator(7))
    if at.operation == "sampler":
        return _exact(_sampled(at, draw))
    point = Point(at, (24,))
    inputs = layer_inputs(point, draw)
    exact = layer_call(point, precise(inputs), "torch")()
    got = layer_call(point, inputs)()
    _wait(device)
    return Check(reference.relative_error(got, exact), TOLERANCES[draw.dtype])


def _sampled(at: Curve, draw: Inputs) -> bool:
    """Return whether a token without a rival is drawn, in every row."""
    point = Point(at, (3,))
    logits, noise = layer_inputs(point, draw)
    logits[:, 5] += 1000.0
    return layer_call(point, (logits, noise))().tolist() == [5] * 3


def _dtype(at: Curve) -> torch.dtype:
    dtype = getattr(torch, at.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{at.dtype} is no dtype of torch")
    return dtype
