"""The same on a GPU, where there is one: correct, captured, slower than physics.

Nothing here says how fast it must be.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest

from tests.calibrate.missing import torch_and_triton

torch_and_triton()

# ruff: noqa: E402
import torch

from calibrate.gpu.attention import attention_call
from calibrate.gpu.backends import OFFERS
from calibrate.gpu.detect import backends_here
from calibrate.gpu.gpu_device import GpuDevice
from calibrate.gpu.tasks import KernelTask
from calibrate.harness.checkpoint import Checkpoint
from calibrate.harness.device import UnsupportedPointError
from calibrate.harness.grid import PRESETS, Choice, build_grid
from calibrate.harness.outcome import Settings
from calibrate.harness.output import profile_of
from calibrate.harness.plan import sentinels
from calibrate.harness.session import Session
from calibrate.harness.work import floor_s
from calibrate.kernels import reference
from calibrate.kernels.paged import paged_batch
from calibrate.measurement import OPERATIONS, Point
from tests.calibrate.paged import Shape, random_batch, tolerance
from tests.calibrate.runs import Killed, geometry

if TYPE_CHECKING:
    from pathlib import Path

    from calibrate.harness.device import Task

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

SHAPES = list(itertools.product((1, 3, 4, 8), (64, 128), (8, 16, 32)))
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def device() -> GpuDevice:
    return GpuDevice.on_gpu(backends_here(), 0)


def every_choice() -> list[Choice]:
    """Return all variants that the backends here offer, not the best ones only."""
    here = {name for name, missing in backends_here().items() if not missing}
    return [
        Choice(operation, variant, backend)
        for operation in OPERATIONS
        for variant, backend in OFFERS.get(operation, (("torch", "torch"),))
        if backend in here
    ]


def largest(device: GpuDevice, choice: Choice) -> Point:
    """Return a quick grid's point of the most work, 20 ms at best at most."""
    points = build_grid(PRESETS["quick"], geometry(), device.limits, [choice])
    floors = {point: floor_s(point, device.physics) for point in points}
    return max((p for p in points if floors[p] < 0.02), key=lambda p: floors[p])


@pytest.mark.parametrize("choice", every_choice(), ids=str)
def test_every_variant_is_right_and_slower_than_physics(
    device: GpuDevice, choice: Choice
) -> None:
    points = build_grid(PRESETS["quick"], geometry(), device.limits, [choice])
    for at in dict.fromkeys(point.curve for point in points):
        check = device.check(geometry(), at, choice.backend)
        assert check.passed, (at.key, check)
    point = largest(device, choice)
    task = device.prepare(point, choice.backend, 1)
    if isinstance(task, KernelTask):
        assert task.metrics[0] == "device", "it was not captured in a graph"
    for metric in task.metrics:
        samples = task.sample(metric, 5)
        assert all(sample > 0 and math.isfinite(sample) for sample in samples)
    least_s = floor_s(point, device.physics)
    assert min(task.sample(task.metrics[0], 5)) * 1.1 > least_s
    task.close()


@pytest.mark.parametrize("variant", ["split_kv", "mixed", "paged_v1", "paged_v2"])
def test_attention_of_many_shapes(device: GpuDevice, variant: str) -> None:
    prefill = variant == "mixed"
    query_lens = [1, 35, 0, 200, 1] if prefill else [1] * 5
    lens = [1, 96, 20, 200, 3000] if prefill else [0, 1, 513, 70, 9000]
    there = device.timers.device
    for number, (group, head_dim, block_size) in enumerate(SHAPES):
        shape = Shape(group, 2, head_dim, block_size, DTYPES[number % 2])
        host = random_batch(shape, query_lens, lens)
        batch = paged_batch(
            host.query.to(there),
            (host.key_cache.to(there), host.value_cache.to(there)),
            host.block_tables.to(there),
            query_lens,
            lens,
        )
        try:
            call, out = attention_call(variant, batch, device.engines)
        except UnsupportedPointError as error:
            pytest.skip(str(error))
        call()
        expected = reference.paged_attention(batch)
        assert reference.worst_row_error(out, expected) < tolerance(shape.dtype), shape


def test_a_step_beside_a_transfer(device: GpuDevice) -> None:
    choices = device.choices("auto", ("decode_attention", "swap"))
    found = sentinels(geometry(), device.limits, choices)
    points = {"step": found["decode_attention"], "transfer": found["swap"]}
    times = device.overlap(
        {name: point for name, (point, _) in points.items()},
        {name: choice.backend for name, (_, choice) in points.items()},
        seed=1,
    )
    for samples in times.values():
        assert all(sample > 0 and math.isfinite(sample) for sample in samples)


class DyingGpu(GpuDevice):
    """Is killed at its n-th visit."""

    visits_left = 25

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        self.visits_left -= 1
        if self.visits_left == 0:
            raise Killed
        return super().prepare(point, backend, seed)


@pytest.mark.timeout(600)
def test_a_calibration_is_killed_and_resumed(tmp_path: Path) -> None:
    asked = Settings(geometry(), "quick", "auto", ("gemm", "decode_attention"), 0)
    checkpoint = Checkpoint(tmp_path / "c")
    dying = DyingGpu.on_gpu(backends_here(), 0)
    with pytest.raises(Killed):
        Session(dying, asked, checkpoint).run(resume=False)
    del dying  # its arena is a third of the device
    torch.cuda.empty_cache()
    device = GpuDevice.on_gpu(backends_here(), 0)
    outcome = Session(device, asked, checkpoint).run(resume=True)
    profile = profile_of(outcome, asked, device)
    assert profile["kind"] == "measured"
    provenance = profile["provenance"]
    for key in ("name", "num_sms", "l2_bytes", "memory_bytes", "driver", "cuda"):
        assert provenance["device"][key], key
    assert not provenance["refused"]
    assert {t["operation"] for t in profile["ops"]} >= {"gemm", "decode_attention"}
