"""Sessions with wrong variants, refused shapes and doubtful figures."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from calibrate.harness.checkpoint import Checkpoint
from calibrate.harness.command import Lines
from calibrate.harness.device import (
    Check,
    DeviceFaultError,
    UnsupportedPointError,
    said,
)
from calibrate.harness.dry_run import DryRunDevice, DryTask
from calibrate.harness.grid import Choice
from calibrate.harness.outcome import Outcome, Progress
from calibrate.harness.output import stability, tables
from calibrate.harness.session import Session
from calibrate.harness.summary import rows
from calibrate.measurement import Measurement, Point, curve, quantiles
from sim.errors import UserError
from tests.calibrate.runs import calibrated, settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from calibrate.harness.device import Task
    from calibrate.harness.geometry import Geometry
    from calibrate.measurement import Curve


class Doubtful(DryRunDevice):
    """Gets one variant wrong, cannot call another, and refuses large shapes."""

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        if at.variant == "loop":
            return Check(error=0.3, tolerance=0.0)
        if at.variant == "batch":
            return Check(float("inf"), 0.0, reason="CudaError: no such call")
        return super().check(geometry, at, backend)

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        assert point.curve.variant not in {"loop", "batch"}
        if point.curve.operation == "gemm" and point.values[0] > 1000:
            raise UnsupportedPointError("it does not fit")
        return super().prepare(point, backend, seed)


def test_what_the_gate_refuses_is_not_timed_and_named(tmp_path: Path) -> None:
    profile = calibrated(tmp_path / "c", settings(), Doubtful())
    variants = {t["variant"] for t in profile["ops"] if t["operation"] == "swap"}
    assert variants == {"kernel"}
    refused = profile["provenance"]["refused"]
    h2d = "bytes(direction=h2d,memory=pinned)"
    assert refused[f"swap/loop/{h2d}"] == "error 0.3 above 0"
    assert refused[f"swap/batch/{h2d}"] == "CudaError: no such call"
    assert f"swap/batch/{h2d}" not in profile["provenance"]["correctness"]
    assert profile["provenance"]["stability"]["ratios"].keys() == {
        "decode_attention",
        "swap",
    }  # the GEMM sentinel is one of the shapes that do not fit


class Checking(DryRunDevice):
    """Offers three ways of attention, of which those in `wrong` are."""

    def __init__(self, *wrong: str) -> None:
        super().__init__()
        self.wrong, self.checked = wrong, list[str]()

    def choices(self, backend: str, operations: Sequence[str]) -> list[Choice]:
        ways = ("flash_attn", "split_kv", "paged_v2")
        offered = [Choice("decode_attention", way, "dry-run") for way in ways]
        return offered + super().choices(backend, ["gemm", "launch"])

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        if at.operation == "decode_attention":
            self.checked.append(at.variant)
            if at.variant in self.wrong:
                return Check(error=0.3, tolerance=0.0)
        return super().check(geometry, at, backend)


@pytest.mark.parametrize(
    ("wrong", "checked"),
    [((), ["flash_attn"]), (("flash_attn",), ["flash_attn", "split_kv"])],
)
def test_ways_of_attention_are_checked_until_enough_are_right(
    wrong: tuple[str, ...], checked: list[str], tmp_path: Path
) -> None:
    """Compiling one that is not timed may take longer than timing all others."""
    device = Checking(*wrong)
    profile = calibrated(tmp_path / "c", settings(), device)
    assert device.checked == checked
    found = [t for t in profile["ops"] if t["operation"] == "decode_attention"]
    assert {table["variant"] for table in found} == {checked[-1]}
    device = Checking()
    calibrated(tmp_path / "d", settings("default"), device)
    assert device.checked == ["flash_attn", "split_kv"]  # two are timed


def test_a_shape_that_is_refused_is_left_out_with_the_reason(tmp_path: Path) -> None:
    profile = calibrated(tmp_path / "c", settings(), Doubtful())
    assert (
        max(
            tokens
            for table in profile["ops"]
            if table["operation"] == "gemm"
            for tokens in table["axes"]["m"]
        )
        == 128
    )
    skipped = profile["provenance"]["skipped"]
    assert len(skipped) == 8  # 1024 and 8192 tokens of four matrices
    assert set(skipped.values()) == {"it does not fit"}


class WithoutTheBest(DryRunDevice):
    """Has a best decode that is wrong."""

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        wrong = at.variant == "split_kv"
        return Check(error=1.0 if wrong else 0.0, tolerance=0.01)


def test_the_next_variant_stands_in_for_one_that_is_wrong(tmp_path: Path) -> None:
    """The quick preset times one variant: the best of those that are right."""
    asked = settings(operations=("decode_attention",))
    profile = calibrated(tmp_path / "c", asked, WithoutTheBest())
    variants = {table["variant"] for table in profile["ops"]}
    assert variants == {"paged_v2"}


class Fragile(DryRunDevice):
    """Breaks at some points, and stays broken until a new process."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        if at.variant == "batch":
            raise DeviceFaultError("AcceleratorError: misaligned address")
        return super().check(geometry, at, backend)

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        assert not self.broken
        task = super().prepare(point, backend, seed)
        if point.curve.operation == "gemm" and point.values == (16,):
            task.sample = self._fail  # type: ignore[method-assign]
        return task

    def _fail(self, metric: str, count: int) -> list[float]:
        self.broken = True
        raise DeviceFaultError("AcceleratorError: illegal address")

    def overlap(self, *args: object, **kwargs: object) -> dict[str, list[float]]:
        raise UnsupportedPointError("no memory")


def test_what_breaks_the_device_is_left_out_from_then_on(tmp_path: Path) -> None:
    asked = settings(operations=("gemm", "swap", "decode_attention"))
    path = tmp_path / "c"
    faults = []
    for attempt in range(20):
        try:
            profile = calibrated(path, asked, Fragile(), resume=attempt > 0)
        except UserError as error:
            faults.append(str(error))
            continue
        break
    assert len(faults) == 2 + 5  # two directions of a transfer, five matrices
    assert faults[0].startswith(
        "the device failed in swap/batch/bytes(direction=h2d,memory=pinned):"
        " AcceleratorError: misaligned address; finished blocks are in"
    )
    assert all("--resume, which leaves it out" in fault for fault in faults)
    assert len(profile["provenance"]["refused"]) == 2
    skipped = profile["provenance"]["skipped"]
    assert len(skipped) == 5
    assert set(skipped.values()) == {
        "it broke the device: AcceleratorError: illegal address"
    }
    assert profile["interference"]["points"] == []


def test_an_error_names_no_folder() -> None:
    error = RuntimeError("/home/me/x/kernels.cu(12): bad\n see ./a/b and c/d")
    assert said(error) == "RuntimeError: kernels.cu(12): bad see ./a/b and c/d"
    assert said(OSError("cannot open '/usr/lib/liba.so'")) == (
        "OSError: cannot open 'liba.so'"
    )


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), [100.0]
    lines = Lines(stream, lambda: now[0])
    for step in range(11):
        now[0] += 4.0
        lines.update(Progress("grid", 20 * step, 1000))
    assert stream.getvalue().splitlines() == [
        "kvsim: grid: 60/1000, 12 s, about 188 s left",
        "kvsim: grid: 140/1000, 28 s, about 172 s left",
    ]


class Broken(DryRunDevice):
    """Passes nothing."""

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        return Check(error=1.0, tolerance=0.01)


def test_nothing_correct_is_an_error(tmp_path: Path) -> None:
    rule = r"no variant is correct here: gemm/.*: error 1, at most 0.01"
    with pytest.raises(UserError, match=rule):
        calibrated(tmp_path / "c", settings(operations=("gemm",)), Broken())


def test_progress_goes_up_to_the_end(tmp_path: Path) -> None:
    seen: list[Progress] = []
    asked = settings("default", ("decode_attention",))
    path = Checkpoint(tmp_path / "c")
    Session(DryRunDevice(), asked, path, seen.append).run(resume=False)
    gate = [progress.done for progress in seen if progress.phase == "gate"]
    assert gate == list(range(2))  # two variants
    visits = [progress.done for progress in seen if progress.phase != "gate"]
    assert visits == sorted(visits)
    assert seen[-1].done == seen[-1].total
    assert {progress.phase for progress in seen} >= {"grid", "refinement 1"}


def outcome(
    measurements: list[Measurement], sentinels: dict[str, list[float]]
) -> Outcome:
    return Outcome(
        measurements=measurements,
        checks={},
        backends={},
        sentinels=sentinels,
        interference=[],
        skipped={},
        clocks=[],
        started="1970-01-01T00:00:00Z",
        duration_s=1.0,
    )


def timed(operation: str, values: tuple[int, ...], time_s: float) -> Measurement:
    constants: dict[str, dict[str, int | str]] = {
        "gemm": {"layer": "qkv", "n": 6144, "k": 4096},
        "decode_attention": {
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "block_size": 16,
        },
    }
    at = curve(operation, "torch", "bfloat16", constants[operation])
    return Measurement(Point(at, values), {"device": quantiles([time_s])})


def test_anchors_are_compared_on_their_device_only() -> None:
    found = [
        timed("gemm", (1,), 20e-6),
        timed("decode_attention", (64, 64 * 2048, 2048), 140e-6),
    ]
    lines = {
        line.what: line
        for line in rows(outcome(found, {}), DryRunDevice(), "NVIDIA H200")
    }
    gemm = lines["GEMM 6144 x 4096, M = 1"]
    assert (gemm.measured, gemm.reference) == ("20.0 us", "16 us published")
    assert gemm.remark == "1.25 x"
    decode = lines["decode, 64 x 2048 tokens, a layer"]
    assert decode.remark == "1.00 x"
    bandwidth = lines["decode, best KV bandwidth"]  # 512 MiB in 140 us
    assert (bandwidth.measured, bandwidth.remark) == ("3.8 TB/s", "80%")
    elsewhere = rows(outcome(found, {}), DryRunDevice(), "NVIDIA A100")
    assert not any("published" in line.reference for line in elsewhere)


def test_decode_is_held_against_a_copy() -> None:
    constants = {"num_layers": 32, "page_bytes": 32768}
    at = curve("copy_blocks", "kernel", "bfloat16", constants)
    copy = Measurement(Point(at, (512,)), {"device": quantiles([1e-3])})
    found = [
        copy,  # 2 GiB of reads and writes in a millisecond
        timed("decode_attention", (1, 16, 16), 1e-5),
        timed("decode_attention", (128, 128 * 2048, 2048), 1e-3),
        timed("decode_attention", (512, 512 * 2048, 2048), 1e-2),
    ]
    lines = {line.what: line for line in rows(outcome(found, {}), DryRunDevice(), "x")}
    beside = lines["decode of 1 GiB"]
    assert (beside.measured, beside.reference) == ("1.1 TB/s", "2.1 TB/s copied")
    assert beside.remark == "50%"


def test_faster_than_physics_is_said() -> None:
    found = [timed("decode_attention", (64, 64 * 2048, 2048), 50e-6)]
    lines = rows(outcome(found, {}), DryRunDevice(), "any")
    assert any(line.what == "faster than physics" for line in lines)


def test_stability_needs_a_few_blocks() -> None:
    steady = [1.0 + 0.001 * (n % 3) for n in range(40)]
    assert stability(outcome([], {"gemm": steady}))["stable"] is True
    assert stability(outcome([], {"gemm": [1.0, 1.2]}))["stable"] is None
    assert stability(outcome([], {}))["stable"] is None
    slow = [1.0] * 20 + [1.06] * 20
    assert stability(outcome([], {"gemm": slow, "swap": steady}))["stable"] is False


def test_an_unstable_profile_says_which_sentinel_and_how_the_clock_went() -> None:
    slow = [1.0] * 20 + [1.06] * 20
    found = outcome([], {"gemm": slow, "decode_attention": [1.0] * 40})
    readings: list[dict[str, object]] = [
        {"clocks.sm": 1980.0, "throttle_reasons": "0x0000000000000000"},
        {"clocks.sm": 1665.0, "throttle_reasons": "0x0000000000000004"},
        {"clocks.sm": 1700.0, "throttle_reasons": "[N/A]"},
    ]
    unstable = replace(found, clocks=readings)
    lines = {line.what: line for line in rows(unstable, DryRunDevice(), "x")}
    assert lines["sentinels, p95 over p5"].measured == "1.060 gemm"
    clock = lines["clock of the GPU"]
    assert (clock.measured, clock.remark) == ("1,665 to 1,980 MHz", "power limit")
    steady = replace(outcome([], {"gemm": [1.0] * 40}), clocks=readings)
    assert all("clock" not in line.what for line in rows(steady, DryRunDevice(), "x"))


def test_tables_by_hand() -> None:
    found = [
        timed("decode_attention", (2, 40, 20), 1e-5),
        timed("decode_attention", (2, 40, 30), 2e-5),
        timed("decode_attention", (4, 80, 20), 3e-5),
    ]
    even, skewed = tables(found)
    assert even["operation"] == "decode_attention"
    assert even["axes"] == {"batch": [2, 4], "context": [20, 20]}
    assert even["constants"]["kv_itemsize"] == 2
    assert even["quantiles"]["p50_s"] == [1e-5, 3e-5]
    assert even["n"] == [1, 1]
    assert skewed["operation"] == "decode_attention_skewed"
    assert skewed["axes"]["longest_context_tokens"] == [30]


def test_one_metric_stands_for_a_curve() -> None:
    """A call that could not be captured is no point among those that were."""
    captured = timed("gemm", (1,), 1e-5)
    eager = Measurement(timed("gemm", (2,), 1.0).point, {"eager": quantiles([3e-5])})
    device, beside = tables([captured, eager])
    assert (device["operation"], device["axes"]) == ("gemm", {"m": [1]})
    assert (beside["operation"], beside["axes"]) == ("gemm.eager", {"m": [2]})
    (alone,) = tables([eager])
    assert (alone["operation"], alone["metric"]) == ("gemm", "eager")


def test_a_task_yields_what_it_says() -> None:
    device = DryRunDevice()
    point = timed("gemm", (16,), 1.0).point
    task = device.prepare(point, "dry-run", 0)
    assert isinstance(task, DryTask)
    before_s = device.now_s()
    samples = task.sample("device", 4)
    assert device.now_s() - before_s == pytest.approx(8 * sum(samples))
    assert samples == device.prepare(point, "dry-run", 0).sample("device", 4)
    assert samples != device.prepare(point, "dry-run", 1).sample("device", 4)
