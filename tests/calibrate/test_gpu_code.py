"""Code for a GPU, run on a CPU: memory, calls, gate, tasks and whole sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.calibrate.missing import torch_only

torch_only()

# ruff: noqa: E402
import torch

from calibrate.gpu import detect, facts, tasks
from calibrate.gpu import device as gpu_device
from calibrate.gpu.arena import batches, lengths
from calibrate.gpu.attention import Engines, attention_call
from calibrate.gpu.backends import choices_here
from calibrate.gpu.tasks import KernelTask, TransferTask, num_pools
from calibrate.harness.device import (
    DeviceFaultError,
    MissingError,
    UnsupportedPointError,
)
from calibrate.harness.grid import Choice
from calibrate.kernels import reference, torch_ops
from calibrate.measurement import OPERATIONS, Point, curve
from sim.cli.main import run
from sim.hardware.gpus import datasheet_of
from tests.calibrate.bench_device import HEADS, TINY, cpu_device, small_points
from tests.calibrate.cpu_timers import CpuTimers
from tests.calibrate.flash import stand_in
from tests.calibrate.paged import Shape, random_batch, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VARIANTS = {
    "decode_attention": "sdpa",
    "prefill_attention": "sdpa",
    "mixed_attention": "sdpa",
    "swap": "loop",
    "copy_blocks": "loop",
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_passes_the_gate_and_yields_times(operation: str) -> None:
    device = cpu_device("torch")
    for point in small_points(operation, VARIANTS.get(operation, "torch")):
        check = device.check(TINY, point.curve, "torch")
        assert check.passed, check
        task = device.prepare(point, "torch", seed=3)
        expected = ("device", "host") if operation == "swap" else (
            "device", "eager", "host",
        )  # fmt: skip
        assert task.metrics == expected
        for metric in task.metrics:
            assert all(time_s > 0 for time_s in task.sample(metric, 3))
            assert task.repeats(metric) >= 1
        task.close()


def test_the_gate_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cpu_device("torch")
    (point, _) = small_points("decode_attention", "sdpa")
    right = torch_ops.attention

    def wrong(out: torch.Tensor, batch: object) -> None:
        right(out, batch)  # type: ignore[arg-type]
        out[-1] *= 1.05

    monkeypatch.setattr(torch_ops, "attention", wrong)
    check = device.check(TINY, point.curve, "torch")
    assert not check.passed
    assert 0.04 < check.error < 0.1
    monkeypatch.setattr(torch_ops, "attention", lambda out, batch: None)
    assert device.check(TINY, point.curve, "torch").error == float("inf")
    monkeypatch.setattr(torch_ops, "copy_blocks", lambda pool, pairs: None)
    (copy,) = small_points("copy_blocks", "loop")
    assert not device.check(TINY, copy.curve, "torch").passed


def test_a_variant_that_cannot_be_called_is_refused_with_its_reason() -> None:
    device = cpu_device("torch")
    (point, _) = small_points("decode_attention", "flashinfer")
    check = device.check(TINY, point.curve, "flashinfer")
    assert not check.passed
    assert "flashinfer" in check.reason


def test_block_tables_of_pools_share_no_block() -> None:
    device = cpu_device("torch")
    at = curve("decode_attention", "sdpa", "bfloat16", HEADS)
    arena = device.arena(torch.bfloat16)
    lens = lengths(Point(at, (4, 300, 150)))
    made = batches(arena, at, lens, 3, device.generator(1))
    assert len(made) == 3
    held = [
        int(block)
        for batch in made
        for row, length in zip(batch.block_tables, batch.context_lens, strict=True)
        for block in row[: -(-length // 16)]
    ]
    assert len(held) == len(set(held))
    assert max(held) < arena.caches(at)[0].shape[0]
    assert held != sorted(held)
    assert not bool((arena.flat == 0).all())


@pytest.mark.parametrize(
    ("operation", "values", "expected"),
    [
        ("decode_attention", (3, 30, 10), ([1, 1, 1], [10, 10, 10])),
        ("decode_attention", (4, 107, 100), ([1] * 4, [100, 3, 2, 2])),
        ("prefill_attention", (8, 5), ([8], [13])),
        ("mixed_attention", (8, 5, 2, 9), ([8, 1, 1], [13, 5, 4])),
    ],
)
def test_lengths(
    operation: str, values: tuple[int, ...], expected: tuple[list[int], list[int]]
) -> None:
    at = curve(operation, "mixed", "bfloat16", HEADS)
    assert lengths(Point(at, values)) == expected


def test_pools_outgrow_the_cache() -> None:
    assert num_pools(10e6, 50_000_000, 100) == 20
    assert num_pools(1e9, 50_000_000, 100) == 3
    assert num_pools(1e9, 50_000_000, 2) == 2
    assert num_pools(1.0, 50_000_000, 10**6) == 64


def test_what_does_not_fit_is_left_out() -> None:
    device = cpu_device("torch")
    swap = small_points("swap", "loop")[0]
    with pytest.raises(UnsupportedPointError, match="2048 pages do not fit the 1024"):
        device.prepare(Point(swap.curve, (2048, 4096)), "torch", 0)
    (copy,) = small_points("copy_blocks", "loop")
    with pytest.raises(UnsupportedPointError, match="pairs do not fit"):
        device.prepare(Point(copy.curve, (10**5,)), "torch", 0)


def test_overlap_on_one_clock() -> None:
    device = cpu_device("torch")
    points = {
        "step": small_points("norm", "torch")[0],
        "transfer": small_points("swap", "loop")[0],
    }
    times = device.overlap(points, {"step": "torch", "transfer": "torch"}, seed=1)
    assert sorted(times) == [
        "step_alone",
        "step_with",
        "transfer_alone",
        "transfer_with",
    ]
    assert all(time_s > 0 for samples in times.values() for time_s in samples)


class Stopwatch(CpuTimers):
    """Takes a second to enqueue a transfer, and notes the head starts."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead: list[float] = []

    def transfer(self, call: Callable[[], None], ahead_s: float = 0.0) -> float:
        self.ahead.append(ahead_s)
        return 1.0

    def transfer_host(self, call: Callable[[], None]) -> float:
        return 0.02


def test_a_batch_gets_the_head_start_that_its_host_needs() -> None:
    watch = Stopwatch()
    TransferTask(watch, [lambda: None], ahead=True).sample("device", 2)
    assert watch.ahead == [0.0, *[pytest.approx(0.03)] * 2]
    loop = Stopwatch()
    TransferTask(loop, [lambda: None], ahead=False).sample("device", 2)
    assert loop.ahead == [0.0] * 3


def failing(error: Exception) -> KernelTask:
    def call() -> None:
        if armed:
            raise error

    armed: list[bool] = []
    task = KernelTask(CpuTimers(), [call])
    armed.append(True)
    return task


def test_errors_while_sampling_lose_the_point_or_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsupportedPointError, match="does not fit the device's mem"):
        failing(torch.cuda.OutOfMemoryError("2 GiB")).sample("device", 1)
    with pytest.raises(UnsupportedPointError, match=r"RuntimeError: bad file\.cu"):
        failing(RuntimeError("bad /usr/lib/file.cu")).sample("eager", 1)
    with pytest.raises(ZeroDivisionError):
        failing(ZeroDivisionError()).sample("host", 1)
    monkeypatch.setattr(tasks, "is_broken", lambda device: True)
    with pytest.raises(DeviceFaultError, match="RuntimeError: illegal address"):
        failing(RuntimeError("illegal address")).sample("device", 1)


def test_the_gate_stops_at_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cpu_device("torch")
    (point, _) = small_points("decode_attention", "sdpa")

    def bad(out: torch.Tensor, batch: object) -> None:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(torch_ops, "attention", bad)
    check = device.check(TINY, point.curve, "torch")
    assert check.reason == "RuntimeError: illegal address"
    monkeypatch.setattr(gpu_device, "is_broken", lambda device: True)
    with pytest.raises(DeviceFaultError, match="illegal address"):
        device.check(TINY, point.curve, "torch")


@pytest.mark.parametrize(
    "helper", ["vllm.v1.attention.backends.fa_utils", "vllm.attention.utils.fa_utils"]
)
def test_flash_attention_is_of_the_version_that_the_engine_takes(
    monkeypatch: pytest.MonkeyPatch, helper: str
) -> None:
    made = stand_in(monkeypatch, helper)
    batch = random_batch(Shape(2, 1, 64, 16, torch.float16), [1, 1], [5, 20])
    engines = Engines(torch.device("cpu"), 4, None)
    call, out = attention_call("flash_attn", batch, engines)
    call()
    call()  # planned once
    assert len(made.plans) == 1
    (called, _) = made.calls
    assert called["fa_version"] == 3
    assert called["max_seqlen_k"] == 20
    assert called["seqused_k"] is batch.contexts
    assert (called["num_splits"], called["scheduler_metadata"].item()) == (32, 1)
    expected = reference.paged_attention(batch)
    assert reference.worst_row_error(out, expected) < tolerance(torch.float16)


def test_flash_attention_of_another_version_is_not_scheduled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stand_in(monkeypatch, version=2)
    batch = random_batch(Shape(2, 1, 64, 16, torch.float16), [1, 1], [5, 20])
    attention_call("flash_attn", batch, Engines(torch.device("cpu"), 4, None))[0]()
    assert not made.plans
    assert made.calls[0]["scheduler_metadata"] is None
    assert made.calls[0]["num_splits"] == 0


def test_the_driver_is_asked_about_one_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there are several, the first is not always ours."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$*" in *--id=GPU-4b*) echo 580.1;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert facts.versions("4b")["driver"] == "580.1"
    assert facts.versions("GPU-4b")["driver"] == "580.1"
    assert facts.versions("77")["driver"] is None


HERE = {"vllm": "no", "flashinfer": "no", "cuda": "", "triton": "", "torch": ""}


def test_the_best_backend_of_each_operation_is_taken() -> None:
    chosen = choices_here(HERE, "auto", ("decode_attention", "swap", "gemm"))
    assert chosen == [
        Choice("decode_attention", "split_kv", "triton"),
        Choice("decode_attention", "paged_v2", "cuda"),
        Choice("decode_attention", "paged_v1", "cuda"),
        Choice("swap", "loop", "cuda"),
        Choice("swap", "batch", "cuda"),
        Choice("swap", "kernel", "triton"),
        Choice("gemm", "torch", "torch"),
    ]
    with_engine = {**HERE, "vllm": ""}
    first = choices_here(with_engine, "auto", ("decode_attention", "swap"))
    assert first[0] == Choice("decode_attention", "flash_attn", "vllm")
    assert Choice("swap", "loop", "vllm") in first
    preferred = choices_here(with_engine, "cuda", ("decode_attention", "swap"))
    assert preferred[0] == Choice("decode_attention", "paged_v2", "cuda")
    assert Choice("swap", "loop", "cuda") in preferred
    alone = dict.fromkeys(HERE, "no") | {"torch": ""}
    assert choices_here(alone, "auto", ("prefill_attention", "swap")) == [
        Choice("prefill_attention", "sdpa", "torch"),
        Choice("swap", "loop", "torch"),
    ]


def test_a_backend_that_is_not_here_is_refused() -> None:
    with pytest.raises(MissingError, match="--backend vllm cannot be used here: no;"):
        choices_here(HERE, "vllm", ("gemm",))


@pytest.mark.parametrize(
    ("name", "gib", "sheet"),
    [
        ("NVIDIA H200", 139.8, "h200_sxm"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100_sxm"),
        ("NVIDIA H100 PCIe", 79.2, "h100_pcie"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100_sxm_40gb"),
        ("NVIDIA A100 80GB PCIe", 79.25, "a100_pcie"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx_4090"),
        ("NVIDIA B200", 178.4, "b200_sxm"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("Tesla T4", 14.7, "t4"),
        ("Tesla M60", 7.5, None),
    ],
)
def test_datasheets_are_found_by_the_drivers_names(
    name: str, gib: float, sheet: str | None
) -> None:
    found = datasheet_of(name, int(gib * 2**30))
    assert (found.name if found else None) == sheet


def test_versions_are_named_also_where_something_is_missing() -> None:
    found = facts.versions()
    assert found["torch"] == torch.__version__
    assert found["vllm"] is None


def calibrate_line(
    capsys: pytest.CaptureFixture[str], tmp_path: object, *extra: str
) -> str:
    arguments = ["calibrate", "--model", "meta-llama/Llama-3.1-8B", *extra]
    assert run([*arguments, "--out", f"{tmp_path}/p.json"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_without_a_gpu_one_line_says_so(
    capsys: pytest.CaptureFixture[str],
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    said = calibrate_line(capsys, tmp_path)
    assert "is built without it: install a CUDA build of torch" in said
    assert "--dry-run" in said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs an NVIDIA GPU and its driver" in calibrate_line(capsys, tmp_path)


def test_without_torch_one_line_says_so(
    capsys: pytest.CaptureFixture[str],
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: None)
    said = calibrate_line(capsys, tmp_path)
    assert "needs torch, which is not installed: pip install 'kvsim[calibrate]'" in said
    assert detect.backends_here()["triton"].startswith("triton is not installed")
