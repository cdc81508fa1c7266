"""`kvsim calibrate replay`: choosing, comparing, the command."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from calibrate.harness.device import DeviceFaultError, UnsupportedPointError
from calibrate.replay.command import facts_without_schedule
from calibrate.replay.log import Schedule, kind_of
from calibrate.replay.memory import GIB, Needs, check_memory
from calibrate.replay.predict import Prediction, Target
from calibrate.replay.run import Plan, Replay, chosen, shares
from calibrate.replay.whole import BATCHES, measured_steps, whole_steps, with_steps
from calibrate.tabulate import with_tables
from calibrate.writing import write_profile
from sim.cli.main import run as kvsim
from sim.costs.measured.profile import read_profile
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from sim.scheduler.generation import SwapRule
from tests.calibrate.calibrations import calibration
from tests.calibrate.missing import torch_only
from tests.calibrate.replays import (
    SeemingExecutor,
    facts,
    small_run,
    written,
)
from tests.sim.commands import refused

if TYPE_CHECKING:
    from pathlib import Path

    from calibrate.replay.log import Step

LLAMA = load_model("meta-llama/Llama-3.1-8B")
H200 = Target(LLAMA, load_gpu("h200_sxm"), 16, SwapRule(), uses_graphs=True)


# -- which steps --------------------------------------------------------------------


def test_rare_kinds_are_taken_whole_and_the_others_share() -> None:
    counts = {"decode": 10_000, "mixed": 900, "swap": 30}
    assert shares(counts, 2000) == {"swap": 30, "mixed": 900, "decode": 1070}
    assert shares(counts, 90) == {"swap": 30, "mixed": 30, "decode": 30}


def test_chosen_steps_are_spread_over_the_schedule() -> None:
    kinds = ["decode"] * 500 + ["swap"] * 5 + ["decode"] * 500
    places = chosen(kinds, 105)
    assert Counter(kinds[place] for place in places) == {"decode": 100, "swap": 5}
    decodes = [place for place in places if kinds[place] == "decode"]
    assert all(9 <= b - a <= 16 for a, b in pairwise(decodes))
    assert places == sorted(set(places))
    assert chosen(kinds, None) == chosen(kinds, 9999) == list(range(1005))


# -- the loop and the comparison ------------------------------------------------------


def roofline_s(step: Step) -> float:
    return Prediction(H200, None).device(step.shape).total_s


def schedule_of(tmp_path: Path, **keys: Any) -> Schedule:
    return written(small_run("v0", {"preemption_mode": "swap"} | keys, 2), tmp_path)


def silent(_: object) -> None:
    pass


def test_a_device_that_is_a_tenth_slower_is_found_to_be_so(tmp_path: Path) -> None:
    schedule = schedule_of(tmp_path)
    executor = SeemingExecutor(lambda step: 1.1 * roofline_s(step), host_s=0.002)
    prediction = Prediction(H200, None)
    found = Replay(schedule, executor, prediction, Plan(), tell=silent).run()
    comparison = found.comparison
    assert not comparison.judges_whole  # a roofline knows no host of ours
    for of in comparison.kinds:
        assert of.device.median == pytest.approx(100 / 11)
        assert of.device.bias == pytest.approx(-100 / 11)
        assert of.host_p50_s == pytest.approx(0.002)
        assert comparison.passes(of) == (of.kind != "decode")
    assert comparison.makespan_error == pytest.approx(-100 / 11)
    assert {of.kind for of in comparison.kinds} >= {"decode", "swap", "copy"}
    assert executor.executed == [step.number for step in schedule.steps()]


def test_a_sample_stands_for_the_whole_schedule(tmp_path: Path) -> None:
    schedule = schedule_of(tmp_path)
    executor = SeemingExecutor(lambda step: {"swap": 5.0}.get(step.kind, 1.0))
    plan = Plan(sample=12)
    prediction = Prediction(H200, None)
    found = Replay(schedule, executor, prediction, plan, tell=silent).run()
    assert found.num_chosen == 12
    counts = Counter(step.kind for step in schedule.steps())
    _, measured_s = found.comparison.makespan()
    assert measured_s == pytest.approx(counts.total() + 4 * counts["swap"])


def test_the_worst_steps_come_first(tmp_path: Path) -> None:
    executor = SeemingExecutor(
        lambda step: roofline_s(step) * (2.0 if step.number == 7 else 1.0)
    )
    found = Replay(
        schedule_of(tmp_path), executor, Prediction(H200, None), Plan(), tell=silent
    ).run()
    worst = found.comparison.worst()
    assert worst[0].step == 7
    assert found.comparison.error_of(worst[0]) == pytest.approx(-0.5)


def test_the_time_limit_ends_it_with_what_there_is(tmp_path: Path) -> None:
    now_s = iter(range(1000))
    found = Replay(
        schedule_of(tmp_path),
        SeemingExecutor(lambda _: 1.0),
        Prediction(H200, None),
        Plan(time_limit_s=5.0),
        tell=silent,
        clock=lambda: float(next(now_s)),
    ).run()
    assert len(found.comparison.rows) == 5
    assert found.stopped == "time limit of 5 s"


def test_steps_that_do_not_fit_are_skipped_and_a_lost_device_ends_it(
    tmp_path: Path,
) -> None:
    def tight(step: Step) -> float:
        if step.number == 3:
            raise UnsupportedPointError("it does not fit the device's memory")
        return 1.0

    arguments = schedule_of(tmp_path), SeemingExecutor(tight)
    prediction = Prediction(H200, None)
    found = Replay(*arguments, prediction, Plan(), tell=silent).run()
    assert found.skipped == {3: "it does not fit the device's memory"}

    def broken(_: Step) -> float:
        raise DeviceFaultError("an illegal address")

    replay = Replay(
        arguments[0], SeemingExecutor(broken), prediction, Plan(), tell=silent
    )
    with pytest.raises(UserError, match="failed in step 0: an illegal address"):
        replay.run()


def test_ctrl_c_keeps_what_was_executed(tmp_path: Path) -> None:
    def interrupted(step: Step) -> float:
        if step.number == 4:
            raise KeyboardInterrupt
        return 1.0

    found = Replay(
        schedule_of(tmp_path),
        SeemingExecutor(interrupted),
        Prediction(H200, None),
        Plan(),
        tell=silent,
    ).run()
    assert found.stopped == "interruption"
    assert [row.step for row in found.comparison.rows] == [0, 1, 2, 3]


def test_memory_is_checked_before_any_is_taken() -> None:
    wanted = Needs(weights=15 * GIB, pool=60 * GIB, host_pool=4 * GIB)
    check_memory(wanted, 32, 80 * GIB, 64 * GIB)
    with pytest.raises(UserError, match="--num-layers 15"):
        check_memory(wanted, 32, 40 * GIB, 64 * GIB)
    with pytest.raises(UserError, match=r"4\.0 GiB of pinned memory"):
        check_memory(wanted, 32, 80 * GIB, 4 * GIB)


# -- whole steps for a profile --------------------------------------------------------


def test_whole_steps_are_random_blocks_that_nobody_shares() -> None:
    steps = list(whole_steps(facts(), 0))
    assert len(steps) == len(BATCHES) == 17
    for step in steps:
        ids = [block for query in step.queries for block in query.table]
        assert len(set(ids)) == len(ids)
        assert max(ids) < 20_000
    assert {kind_of(step.shape) for step in steps} == {"decode", "prefill", "mixed"}
    assert [step.queries for step in whole_steps(facts(), 0)] == (
        [step.queries for step in steps]
    )
    few = list(whole_steps(facts(num_gpu_blocks=300, max_model_len=4096), 0))
    assert 0 < len(few) < 17


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    """A profile of an H200 with tables for Llama-3.1-8B."""
    whole = calibration()
    path = tmp_path / "profile.json"
    write_profile(with_tables(whole, whole, LLAMA), path)
    return path


@pytest.mark.slow
def test_whole_steps_correct_the_profile_that_they_are_written_into(
    fitted: Path, tmp_path: Path
) -> None:
    prediction = Prediction(H200, fitted)
    assert not prediction.knows_host
    executor = SeemingExecutor(
        lambda step: (
            1.07 * prediction.device(step.shape).total_s + 2e-6 * len(step.queries)
        ),
        host_s=0.0008,
    )
    steps = measured_steps(executor, facts(), LLAMA.num_hidden_layers, 0)
    corrected = with_steps(calibration(), steps, LLAMA)
    assert corrected.fit["step_correction"]["num_steps"] == 17
    assert corrected.fit["step_correction"]["factor"] == pytest.approx(1.07, rel=0.01)
    path = tmp_path / "corrected.json"
    write_profile(corrected, path)
    again = Prediction(H200, path)
    assert again.knows_host
    for step in whole_steps(facts(), 1):
        got = again.whole(step.shape).total_s
        assert got == pytest.approx(executor.time(step, 1).wall_s, rel=0.01)


@pytest.mark.slow
def test_fewer_layers_are_fitted_anew_and_steps_of_others_left_out(
    fitted: Path, tmp_path: Path
) -> None:
    executor = SeemingExecutor(lambda _: 1.0)
    corrected = with_steps(
        calibration(), measured_steps(executor, facts(), 32, 0), LLAMA
    )
    path = tmp_path / "corrected.json"
    write_profile(corrected, path)
    shape = BatchShape(64, 64 * 2048, 0, 0, 0, 0)
    half = replace(H200, model=replace(LLAMA, num_hidden_layers=16))
    few = Prediction(half, path).device(shape)
    many = Prediction(H200, fitted).device(shape)
    assert few.decode_attention_s == pytest.approx(many.decode_attention_s / 2)
    assert few.head_s == many.head_s


# -- the command ----------------------------------------------------------------------


def test_steps_are_priced_for_the_gpu_that_executes_them(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A schedule that was simulated on another GPU, replayed with an H200's profile."""
    torch_only()
    folder = tmp_path / "other"
    folder.mkdir()
    path = str(schedule_of(folder, gpu="h100_sxm").path)
    command = ["calibrate", "replay", path, "--profile", str(fitted), "--dry-run"]
    assert kvsim([*command, "--sample", "4", "--repeats", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["gpu"], content["schedule"]["gpu"]) == ("h200_sxm", "h100_sxm")


@pytest.fixture
def schedule(tmp_path: Path) -> str:
    """The schedule of a small run, as a file."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    return str(schedule_of(folder).path)


def test_a_dry_run_executes_compares_and_writes(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_only()
    out = tmp_path / "out"
    command = ["calibrate", "replay", schedule, "--dry-run", "--repeats", "1"]
    assert kvsim([*command, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "errors mean nothing" in shown
    assert "makespan: predicted" in shown
    assert {path.name for path in out.iterdir()} == {
        "replay.json",
        "replay.csv",
        "replay.png",
    }
    content = json.loads((out / "replay.json").read_text())
    num_steps = sum(1 for _ in Schedule(tmp_path / schedule).steps())
    assert len((out / "replay.csv").read_text().splitlines()) == 1 + num_steps
    assert content["dry_run"]
    assert content["variants"] == {
        "decode_attention": "sdpa",
        "mixed_attention": "sdpa",
        "swap": "torch loop",
        "copy": "torch",
        "graphs": "none",
    }
    assert sum(kind["num_executed"] for kind in content["kinds"]) == num_steps
    assert (out / "replay.png").read_bytes().startswith(b"\x89PNG")
    line = refused([*command, "--out", str(out)], capsys, tmp_path)
    assert "--overwrite" in line


def test_check_says_what_was_proved(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_only()
    assert kvsim(["calibrate", "replay", schedule, "--check", "--json"]) == 0
    truth = json.loads(capsys.readouterr().out)
    assert truth["worst_error"] < 1e-12
    assert truth["kinds"]["swap"] > 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--sample", "0"], "--sample must be 1 or more; got 0"),
        (["--time-limit", "-1"], "--time-limit must be a number of seconds above 0"),
        (["--check", "--sample", "3"], "--check executes all steps"),
        (["--into", "new.json"], "--into writes a measured --profile"),
        (["--dry-run", "--num-layers", "33"], "--num-layers must be 1 to 32"),
        (["--dry-run", "--profile", "none.json"], "there is no profile 'none.json'"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(
    schedule: str,
    more: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch_only()
    line = refused(["calibrate", "replay", schedule, *more], capsys, tmp_path)
    assert said in line


def test_without_a_gpu_it_says_what_is_missing(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_only()
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    line = refused(["calibrate", "replay", schedule], capsys, tmp_path)
    assert "--dry-run" in line
    assert refused(["calibrate", "replay"], capsys, tmp_path).startswith("kvsim: give ")


@pytest.mark.parametrize(
    "changes",
    [{"tensor_parallel_size": 2}, {"kv_cache_dtype": "fp8"}, {"model": "moe"}],
)
def test_a_stack_that_is_not_the_model_is_refused(changes: dict[str, Any]) -> None:
    torch_only()
    from calibrate.replay.setup import replay_geometry  # noqa: PLC0415

    moe = changes.get("model") == "moe"
    model = load_model("Qwen/Qwen3-30B-A3B") if moe else LLAMA
    with pytest.raises(UserError, match="cannot be replayed"):
        replay_geometry(model, facts(**changes), None)


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.slow
def test_the_command_runs_the_model_itself_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code for a GPU, all but CUDA, on a device that is a CPU."""
    torch_only()
    from tests.calibrate.bench_device import cpu_device  # noqa: PLC0415

    monkeypatch.setattr(
        "calibrate.gpu.detect.find_gpu", lambda _seed: cpu_device("torch")
    )
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (64 * GIB, 64 * GIB))
    model = tmp_path / "tiny" / "config.json"
    model.parent.mkdir()
    model.write_text(json.dumps(TINY_LLAMA))
    config = small_run("v0", {"preemption_mode": "swap", "model": str(model)}, 2)
    path = str(written(config, tmp_path).path)
    command = ["calibrate", "replay", path, "--repeats", "1", "--json", "--quiet"]
    assert kvsim([*command, "--num-layers", "1"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num_layers"] == 1
    assert not content["dry_run"]
    assert content["variants"]["decode_attention"] == "sdpa"
    assert {kind["kind"] for kind in content["kinds"]} >= {"decode", "swap", "copy"}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (4 * GIB, 4 * GIB))
    line = refused(command, capsys, tmp_path)
    assert "GiB of weights and KV pool on the GPU (0.0 are free)" in line


def test_a_profile_is_replayed_by_the_variants_that_it_stands_on(fitted: Path) -> None:
    torch_only()
    from calibrate.replay.setup import _variant  # noqa: PLC0415
    from tests.calibrate.bench_device import cpu_device  # noqa: PLC0415

    named = read_profile(fitted).fit["variants"]["decode_attention"]
    assert _variant(cpu_device("cuda", "triton"), "decode_attention", named) in named


def test_a_variant_that_is_not_here_is_refused() -> None:
    torch_only()
    from calibrate.replay.setup import _layer_variant, _variant  # noqa: PLC0415
    from tests.calibrate.bench_device import cpu_device  # noqa: PLC0415

    device = cpu_device("torch")
    assert _variant(device, "decode_attention", ()) == "sdpa"
    with pytest.raises(UserError, match="is flash_attn, but here are sdpa"):
        _variant(device, "decode_attention", ["flash_attn"])
    assert _layer_variant(device, ()) == _layer_variant(device, ["torch"]) == "torch"
    with pytest.raises(UserError, match="norm is fused, but here are torch"):
        _layer_variant(device, ["fused", "torch"])


def test_whole_steps_that_do_not_fit_are_left_out_and_a_lost_device_ends_it() -> None:
    def tight(step: Step) -> float:
        if step.number % 2:
            raise UnsupportedPointError("it does not fit the device's memory")
        return 0.01

    numbers = [step.number for step in whole_steps(facts(), 0)]
    steps = measured_steps(SeemingExecutor(tight), facts(), 32, 0)
    assert len(steps) == sum(1 for number in numbers if number % 2 == 0)

    def refused_all(_: Step) -> float:
        raise UnsupportedPointError("it does not fit the device's memory")

    with pytest.raises(UserError, match="no whole step was executed: it does not fit"):
        measured_steps(SeemingExecutor(refused_all), facts(), 32, 0)

    def broken(_: Step) -> float:
        raise DeviceFaultError("an illegal address")

    with pytest.raises(UserError, match="failed in whole step 0: an illegal address"):
        measured_steps(SeemingExecutor(broken), facts(), 32, 0)


def test_whole_steps_need_no_schedule(fitted: Path) -> None:
    """A profile says of which model and GPU it is; all steps fit the pool."""
    found = facts_without_schedule(read_profile(fitted))
    assert (found.model, found.gpu) == ("meta-llama/Llama-3.1-8B", "h200_sxm")
    assert len(list(whole_steps(found, 0))) == len(BATCHES)
