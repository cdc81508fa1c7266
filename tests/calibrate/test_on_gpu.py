"""The same on a GPU, where there is one: correct, captured, slower than physics.

Nothing here says how fast it must be; the figures are a table at the end.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.calibrate.missing import torch_and_triton

torch_and_triton()

# ruff: noqa: E402
import numpy as np
import torch

from calibrate.gpu.arena import batches
from calibrate.gpu.attention import Engines, attention_call
from calibrate.gpu.backends import OFFERS
from calibrate.gpu.detect import backends_here
from calibrate.gpu.device import GpuDevice
from calibrate.gpu.tasks import KernelTask
from calibrate.gpu.transfers import Transfers, copy_call
from calibrate.harness.checkpoint import Checkpoint
from calibrate.harness.device import UnsupportedPointError
from calibrate.harness.grid import GIB, PRESETS, Choice, build_grid
from calibrate.harness.outcome import Settings
from calibrate.harness.output import profile_of
from calibrate.harness.plan import sentinels
from calibrate.harness.session import Session
from calibrate.harness.work import floor_s, least_bytes
from calibrate.kernels import reference
from calibrate.kernels.cuda_compile import find_nvrtc
from calibrate.kernels.cuda_kernels import by_nvrtc
from calibrate.kernels.paged import paged_batch
from calibrate.measurement import OPERATIONS, Point, curve, median
from calibrate.replay.executor import TorchExecutor
from calibrate.replay.setup import moves_on_gpu, tiny_geometry
from calibrate.replay.stack import Stack
from calibrate.replay.tokens import TokenPool
from tests.calibrate.paged import Shape, random_batch, tolerance
from tests.calibrate.replays import small_run, texts_of, written
from tests.calibrate.runs import Killed, geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from calibrate.harness.device import Task
    from calibrate.harness.geometry import Geometry
    from calibrate.kernels.paged import PagedBatch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

ARENA_BYTES = 12 * GIB
"""Keys alone are then more elements than 32 bits count."""
SHAPES = (
    Shape(1, 2, 64, 8, torch.bfloat16),
    Shape(3, 2, 128, 16, torch.float16),
    Shape(4, 8, 128, 32, torch.bfloat16),
    Shape(8, 1, 128, 16, torch.bfloat16),
    Shape(7, 1, 64, 16, torch.float16),
    Shape(2, 2, 256, 16, torch.bfloat16),
)
KERNELS = ("split_kv", "mixed", "paged_v1", "paged_v2")
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}


@pytest.fixture(scope="module")
def found() -> Iterator[list[str]]:
    """Lines of figures, shown when all is done."""
    lines: list[str] = []
    yield lines
    print("\n" + "\n".join(lines))


@pytest.fixture(scope="module")
def device(found: list[str]) -> GpuDevice:
    begin_s = time.perf_counter()
    made = GpuDevice.on_gpu(backends_here(), 0, ARENA_BYTES)
    facts = made.facts()
    found += [
        f"device {facts['device']}",
        f"versions {facts['versions']}",
        f"clocks {made.clocks()}",
        f"missing {facts['missing_backends']}",
        f"set up in {time.perf_counter() - begin_s:.1f} s",
        f"{'variant and shape':68} {'device us':>11} {'eager us':>11} {'host us':>11}"
        f" {'of peak':>8} {'prepared s':>10}",
    ]
    return made


def every_choice() -> list[Choice]:
    """Return all variants that the backends here offer, not the best ones only."""
    here = {name for name, missing in backends_here().items() if not missing}
    return [
        Choice(operation, variant, backend)
        for operation in OPERATIONS
        for variant, backend in OFFERS.get(operation, (("torch", "torch"),))
        if backend in here
    ]


def geometry_for(choice: Choice) -> Geometry:
    """Return the shapes of a model that has the operation, of a precision it takes."""
    if choice.operation not in {"router", "routed_experts"}:
        return geometry()
    packed = choice.variant in {"matmul_ogs", "marlin"}
    return geometry("openai/gpt-oss-20b" if packed else "Qwen/Qwen3-30B-A3B")


def largest(device: GpuDevice, choice: Choice) -> Point:
    """Return a quick grid's point of the most work, 5 ms at best at most."""
    here = geometry_for(choice)
    points = build_grid(PRESETS["quick"], here, device.limits, [choice])
    floors = {point: floor_s(point, device.physics) for point in points}
    return max((p for p in points if floors[p] < 5e-3), key=lambda p: floors[p])


def timed(
    device: GpuDevice, point: Point, backend: str
) -> tuple[str, dict[str, float]]:
    """Return a line about a point, and its medians by metric."""
    begin_s = time.perf_counter()
    task = device.prepare(point, backend, 1)
    prepared_s = time.perf_counter() - begin_s
    if isinstance(task, KernelTask):
        assert task.metrics[0] == "device", "it was not captured in a graph"
    medians: dict[str, float] = {}
    for metric in task.metrics:
        task.sample(metric, 2)
        samples = task.sample(metric, 5)
        assert all(sample > 0 and math.isfinite(sample) for sample in samples)
        medians[metric] = median(samples)
    task.close()
    share = floor_s(point, device.physics) / medians["device"]
    name = f"{backend} {point.curve.operation}/{point.curve.variant}{point.values}"
    columns = [
        f"{1e6 * medians[metric]:11,.1f}" if metric in medians else f"{'-':>11}"
        for metric in ("device", "eager", "host")
    ]
    return f"{name:68} {' '.join(columns)} {share:8.0%} {prepared_s:10.2f}", medians


@pytest.mark.parametrize("choice", every_choice(), ids=str)
def test_every_variant_is_right_and_slower_than_physics(
    device: GpuDevice, found: list[str], choice: Choice
) -> None:
    here = geometry_for(choice)
    points = build_grid(PRESETS["quick"], here, device.limits, [choice])
    for at in dict.fromkeys(point.curve for point in points):
        check = device.check(here, at, choice.backend)
        assert check.passed, (at.key, check)
    point = largest(device, choice)
    line, medians = timed(device, point, choice.backend)
    found.append(line)
    # a loop of a thousand copies may be all host
    assert medians["device"] * 1.1 > floor_s(point, device.physics), line


@pytest.mark.parametrize("dtype", ["float16", "fp8", "fp8_block"])
def test_experts_of_other_precisions(
    device: GpuDevice, found: list[str], dtype: str
) -> None:
    if device._backends["vllm"]:
        pytest.skip(device._backends["vllm"])
    constants = {"hidden_size": 2048, "intermediate_size": 768}
    constants |= {"num_experts": 128, "experts_per_token": 8}
    at = curve("routed_experts", "fused_moe", dtype, constants)
    check = device.check(geometry(), at, "vllm")
    assert check.passed, check
    points = [Point(at, values) for values in ((16, 82), (1024, 128))]
    found += [f"{timed(device, point, 'vllm')[0]}  {dtype}" for point in points]


def test_time_grows_with_the_experts_that_are_touched(
    device: GpuDevice, found: list[str]
) -> None:
    """As many tokens take longer where they read more weights."""
    choices = device.choices("auto", ("routed_experts",))
    here = geometry("Qwen/Qwen3-30B-A3B")
    (at,) = {
        point.curve
        for point in build_grid(PRESETS["quick"], here, device.limits, choices)
    }
    backend = next(c.backend for c in choices if c.variant == at.variant)
    medians = []
    for touched in (8, 30, 60, 112):
        line, times = timed(device, Point(at, (32, touched)), backend)
        found.append(line)
        medians.append(times["device"])
    assert medians == sorted(medians)
    assert medians[-1] > 2 * medians[0]


def on_gpu(host: PagedBatch, device: torch.device) -> PagedBatch:
    caches = (host.key_cache.to(device), host.value_cache.to(device))
    tables = host.block_tables.to(device)
    lens = (host.query_lens, host.context_lens)
    return paged_batch(host.query.to(device), caches, tables, *lens)


def error_of(variant: str, batch: PagedBatch, engines: Engines) -> float:
    """Return a call's error; the second call, from a graph, must give the same."""
    try:
        call, out = attention_call(variant, batch, engines)
    except UnsupportedPointError as error:
        pytest.skip(str(error))
    call()
    torch.cuda.synchronize()
    first = out.clone()
    replayed(call, lambda: out.fill_(math.nan))
    assert torch.equal(first, out), "a replayed graph gives something else"
    return reference.worst_row_error(out, reference.paged_attention(batch))


def replayed(call: Callable[[], object], before: Callable[[], object]) -> None:
    """Capture a call on a stream of its own, as an engine does, and replay it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    before()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("variant", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_many_shapes(
    device: GpuDevice, variant: str, shape: Shape
) -> None:
    prefill = variant == "mixed"
    query_lens = [1, 35, 0, 200, 1] if prefill else [1] * 5
    lens = [1, 96, 20, 200, 3000] if prefill else [0, 1, 513, 70, 9000]
    host = random_batch(shape, query_lens, lens)
    batch = on_gpu(host, device.timers.device)
    assert error_of(variant, batch, device.engines) < tolerance(shape.dtype)


@pytest.mark.parametrize("variant", KERNELS)
def test_attention_at_the_far_end_of_memory(device: GpuDevice, variant: str) -> None:
    """Offsets of more than 32 bits: blocks at the end of a large cache."""
    arena = device.arena(torch.bfloat16)
    at = curve("decode_attention", variant, "bfloat16", HEADS)
    lens = ([1, 60], [700, 130]) if variant == "mixed" else ([1, 1], [700, 130])
    (batch,) = batches(arena, at, lens, 1, device.generator(1))
    num_blocks = batch.key_cache.shape[0]
    assert batch.key_cache.numel() > 2**31
    width = batch.block_tables.shape[1]
    order = num_blocks - 1 - torch.arange(2 * width, dtype=torch.int32)
    batch.block_tables.copy_(order.view(2, width))
    assert error_of(variant, batch, device.engines) < tolerance(torch.bfloat16)


def test_a_cache_of_eight_bits(device: GpuDevice) -> None:
    host = random_batch(Shape(4, 2, 128, 16, torch.bfloat16), [1] * 3, [70, 1, 900])
    caches = [
        torch.nan_to_num(cache).to(torch.float8_e4m3fn).to(device.timers.device)
        for cache in (host.key_cache, host.value_cache)
    ]
    there = device.timers.device
    batch = paged_batch(
        host.query.to(there),
        (caches[0], caches[1]),
        host.block_tables.to(there),
        host.query_lens,
        host.context_lens,
    )
    assert error_of("split_kv", batch, device.engines) < tolerance(torch.bfloat16)


@pytest.mark.parametrize("backend", ["cuda", "triton", "torch"])
def test_blocks_at_the_far_end_of_memory_are_copied(
    device: GpuDevice, backend: str
) -> None:
    if device._backends[backend]:
        pytest.skip(device._backends[backend])
    pool = device.arena(torch.bfloat16).pool(32, 32768, ARENA_BYTES // 2)
    last = pool.shape[2] - 1
    pairs = [(0, last), (last - 1, 1), (last - 2, last - 3)]
    expected = [pool[:, :, first].clone() for first, _ in pairs]
    call = copy_call(pool, pairs, backend, device.library)
    call()
    replayed(call, lambda: None)
    for (_, second), page in zip(pairs, expected, strict=True):
        assert torch.equal(pool[:, :, second], page)


def test_nvrtc_gives_the_same_kernels(device: GpuDevice) -> None:
    path = find_nvrtc()
    if path is None:
        pytest.skip("there is no libnvrtc")
    properties = torch.cuda.get_device_properties(device.timers.device)
    library = by_nvrtc(path, 10 * properties.major + properties.minor)
    engines = Engines(device.timers.device, device.num_sms, library)
    for variant, shape in itertools.product(("paged_v1", "paged_v2"), SHAPES[:3]):
        batch = on_gpu(random_batch(shape, [1, 1], [0, 1300]), device.timers.device)
        assert error_of(variant, batch, engines) < tolerance(shape.dtype)
    pool = torch.randn(2, 2, 6, 1, 1, 2048, device=device.timers.device).bfloat16()
    expected = pool[:, :, 1].clone()
    copy_call(pool, [(1, 4)], "cuda", library)()
    assert torch.equal(pool[:, :, 4], expected)
    memory = device.transfers().memory
    moving = Transfers(memory, library, device.num_sms)
    for variant, direction in itertools.product(("loop", "batch"), ("h2d", "d2h")):
        if variant == "batch" and not library.has_batch_copy:
            continue
        constants = {"direction": direction, "memory": "pinned"}
        point = Point(curve("swap", variant, "bytes", constants), (50, 4096))
        pairs = moving.pairs(point, torch.Generator().manual_seed(3))
        ends = (memory.pinned, memory.device_bytes)
        source, target = ends if direction == "h2d" else ends[::-1]
        pages = [source[4096 * i : 4096 * (i + 1)].cpu().clone() for i, _ in pairs]
        device.timers.transfer(moving.call(point, "cuda", pairs))
        torch.cuda.synchronize()
        for page, (_, number) in zip(pages, pairs, strict=True):
            assert torch.equal(page, target[4096 * number :][:4096].cpu())


def test_what_a_task_held_is_given_back(device: GpuDevice) -> None:
    point = largest(device, Choice("decode_attention", "split_kv", "triton"))
    device.prepare(point, "triton", 1).close()  # the arena is there from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    task = device.prepare(point, "triton", 2)
    task.sample("device", 2)
    task.close()
    del task
    assert torch.cuda.memory_allocated() == before


def test_a_gibibyte_of_keys_and_values(device: GpuDevice, found: list[str]) -> None:
    """Decode reaches at most 1.1 times the bandwidth of a copy on this device."""
    at = curve("decode_attention", "split_kv", "bfloat16", HEADS)
    point = Point(at, (128, 128 * 2048, 2048))
    assert least_bytes(point) == GIB
    line, medians = timed(device, point, "triton")
    source = torch.empty(2 * GIB, dtype=torch.uint8, device=device.timers.device)
    target = torch.empty_like(source)
    copy_s = median(
        [device.timers.eager(lambda: target.copy_(source)) for _ in range(5)]
    )
    decode, copy = GIB / medians["device"], 2 * source.numel() / copy_s
    ratio = f"decode of 1 GiB {decode / 1e12:.2f} TB/s, copy {copy / 1e12:.2f} TB/s"
    found += [line, f"{ratio}: {decode / copy:.0%} of it"]
    assert decode < 1.1 * copy


def test_a_step_beside_a_transfer(device: GpuDevice, found: list[str]) -> None:
    choices = device.choices("auto", ("decode_attention", "swap"))
    watched = sentinels(geometry(), device.limits, choices)
    points = {"step": watched["decode_attention"], "transfer": watched["swap"]}
    times = device.overlap(
        {name: point for name, (point, _) in points.items()},
        {name: choice.backend for name, (_, choice) in points.items()},
        seed=1,
    )
    for samples in times.values():
        assert all(sample > 0 and math.isfinite(sample) for sample in samples)
    for name in points:
        slower = median(times[f"{name}_with"]) / median(times[f"{name}_alone"])
        found.append(f"{name} beside the other: {slower:.3f} of its time alone")


def test_the_same_point_takes_the_same_time(
    device: GpuDevice, found: list[str]
) -> None:
    """The spread of sentinels over visits: reported, not judged."""
    choices = device.choices("auto", ("gemm", "decode_attention", "swap"))
    for name, (point, choice) in sentinels(geometry(), device.limits, choices).items():
        medians = []
        for seed in range(6):
            task = device.prepare(point, choice.backend, seed)
            task.sample("device", 3)
            medians.append(median(task.sample("device", 5)))
            task.close()
        spread = max(medians) / min(medians)
        found.append(f"sentinel {name}: {1e6 * median(medians):,.1f} us, {spread:.3f}")
        assert spread >= 1.0


class DyingGpu(GpuDevice):
    """Is killed at its n-th visit."""

    visits_left = 25

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        self.visits_left -= 1
        if self.visits_left == 0:
            raise Killed
        return super().prepare(point, backend, seed)


def test_a_calibration_is_killed_and_resumed(
    tmp_path: Path, device: GpuDevice, found: list[str]
) -> None:
    operations = ("decode_attention", "swap", "copy_blocks", "norm")
    asked = Settings(geometry(), "quick", "auto", operations, 0)
    device._arenas.clear()
    checkpoint = Checkpoint(tmp_path / "c")
    with pytest.raises(Killed):
        Session(
            DyingGpu.on_gpu(backends_here(), 0, ARENA_BYTES), asked, checkpoint
        ).run(resume=False)
    gc.collect()  # a traceback still held its arena
    torch.cuda.empty_cache()
    again = GpuDevice.on_gpu(backends_here(), 0, ARENA_BYTES)
    outcome = Session(again, asked, checkpoint).run(resume=True)
    profile = profile_of(outcome, asked, again)
    assert profile["kind"] == "measured"
    provenance = profile["provenance"]
    for key in ("name", "num_sms", "l2_bytes", "memory_bytes", "cuda"):
        assert provenance["device"][key], key
    assert not provenance["refused"]
    assert {t["operation"] for t in profile["ops"]} >= {"swap", "decode_attention"}
    found.append(
        f"{len(outcome.measurements)} points of a quick calibration in"
        f" {outcome.duration_s:.1f} s; skipped {outcome.skipped};"
        f" stability {provenance['stability']}"
    )


def test_a_schedule_is_replayed(
    device: GpuDevice, found: list[str], tmp_path: Path
) -> None:
    """Every way to run a step gives the same logits: graphs, kernels, plain torch."""
    generator = torch.Generator(device=device.timers.device).manual_seed(0)
    config = small_run("v0", {"preemption_mode": "swap"}, 2)
    schedule = written(config, tmp_path)
    here = replace(tiny_geometry(schedule.facts), dtype="bfloat16", head_dim=64)
    stack = Stack(here, 64, generator, torch.bfloat16, device.timers.device)
    ways = [("split_kv", "mixed", True), ("split_kv", "mixed", False)]
    if not device._backends["vllm"]:
        ways += [("flash_attn", "flash_attn", graphs) for graphs in (True, False)]
    ways.append(("sdpa", "sdpa", False))
    results = []
    for decode, mixed, graphs in ways:
        variants = {"decode_attention": decode, "mixed_attention": mixed}
        moves = moves_on_gpu(device, here, schedule.facts, generator)
        executor = TorchExecutor(stack, moves, device.engines, variants, graphs)
        assert executor.uses_graphs == graphs
        pool = TokenPool(schedule.facts, texts_of(config))
        rows = []
        for step in schedule.steps():
            pool.move(step)
            tokens = [ids % here.vocab_size for ids in pool.write(step)]
            rows.append(executor.logits(step, tokens))
        results.append(np.concatenate(rows))
        timing = executor.time(next(iter(schedule.steps())), 3)
        assert 0.0 < timing.device_s <= timing.wall_s
        found.append(f"replay {decode} graphs={graphs}: {1e3 * timing.wall_s:.2f} ms")
    for other in results[:-1]:
        error = np.linalg.norm(other - results[-1]) / np.linalg.norm(results[-1])
        assert error < 0.02  # of 16 bits
