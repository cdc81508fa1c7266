"""`kvsim conform` as a user meets it, and what it is made of; the vLLM is a fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.scheduler.hosted import api as vllm_api
from sim.scheduler.hosted import scheduler as hosting
from sim.simulation.simulate import simulate
from sim.studies.conformance import DecisionDriver, load_workload, read_log
from sim.studies.conformance.conform import as_file, compare, smallest
from sim.studies.conformance.random_v1 import random_workload
from sim.studies.conformance.shrink import shrunk
from tests.shared import ROOT
from tests.sim.commands import refused
from tests.sim.scheduler.fake_vllm import fake_api
from tests.sim.studies.conformance.decision_files import (
    request,
    workload,
    write_workload,
)

if TYPE_CHECKING:
    from pathlib import Path

    from sim.scheduler.hosted.api import VllmApi
    from sim.studies.conformance import DecisionWorkload

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a vLLM be the installed one."""

    def put(api: VllmApi) -> None:
        for module in (hosting, vllm_api):
            monkeypatch.setattr(module, "load_api", lambda: api)
        monkeypatch.setattr(vllm_api, "version", lambda _: api.installed)

    return put


# -- kvsim conform ----------------------------------------------------------------


def test_equal_schedulers_are_said_to_be_equal(install: Any, capsys: Capture) -> None:
    install(fake_api())
    assert kvsim(["conform", "--num", "8", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vLLM 0.33.0 hosted, beside our v1 as 0.33.0"
    assert lines[1].startswith("workloads 8, steps ")
    assert lines[2] == "equal: every field of every step"
    assert kvsim(["conform", "--num", "8", "--seed", "3", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_the_first_difference_is_made_small_and_shown(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    """A 0.33 that decides as 0.32 does."""
    install(fake_api("0.32", installed="0.33.0"))
    out = tmp_path / "small.json"
    command = ["conform", "--num", "20", "--out", str(out)]
    assert kvsim(command) == 1
    said = capsys.readouterr().out
    assert "of 20 differ: seed " in said
    assert f"requests, in {out}\nstep " in said
    assert "expected (vLLM 0.33.0): " in said
    small = load_workload(out)
    assert len(small.requests) <= 4
    assert compare(small).difference is not None
    assert "exists; name another --out" in refused(command, capsys, tmp_path)
    assert kvsim([*command, "--overwrite", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["installed"] == "0.33.0"
    assert found["num_workloads"] == 20
    assert found["differing"]
    assert found["smallest"] == as_file(small)
    assert found["first_difference"]["field"]


def test_out_is_checked_before_the_work(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    install(fake_api())
    nowhere = str(tmp_path / "no" / "small.json")
    said = refused(["conform", "--out", nowhere], capsys, tmp_path)
    assert said == f"kvsim: --out: there is no folder {tmp_path / 'no'}; make it"
    path = str(write_workload(tmp_path / "w.json", workload("0.33.0", [])))
    command = ["conform", path, "--out", path, "--overwrite"]
    assert "is a workload itself" in refused(command, capsys, tmp_path)


def test_another_release_of_ours_may_be_asked_for(
    install: Any, capsys: Capture
) -> None:
    install(fake_api("0.32", installed="0.33.0"))
    assert kvsim(["conform", "--num", "20", "--engine-version", "0.32"]) == 0
    assert "hosted, beside our v1 as 0.32\n" in capsys.readouterr().out


def test_files_are_compared_under_the_installed_release(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    install(fake_api("0.11"))
    path = write_workload(tmp_path / "w.json", workload("0.33.0", [request("a", 9, 2)]))
    assert kvsim(["conform", str(path)]) == 0
    assert "beside our v1 as 0.11.0\nworkloads 1, " in capsys.readouterr().out
    late = workload("0.33.0", [request("a", 9, 2)], watermark=0.1)
    path = write_workload(tmp_path / "late.json", late)
    assert refused(["conform", str(path)], capsys, tmp_path).startswith(
        f"kvsim: {path}: watermark exists from 0.24 on"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num", "0"], "--num takes a number of at least 1, got 0"),
        (["--seed", "-1"], "--seed takes a number of at least 0, got -1"),
        (["--engine-version", "0.5"], "engine_version must be from 0.8 to 0.33"),
        (["--engine-version", "5.17", "w.json"], "must be from 0.8 to 0.33"),
        (["nothing.json"], "nothing.json: No such file"),
        (["--offload", "--speculative"], "give it without --speculative"),
        (["--pairs", "--offload", "--groups"], "one of --groups and --pairs"),
        (["--decoders", "2"], "say how many engines --pairs draws"),
        (
            ["--pairs", "--prefillers", "-1"],
            "--prefillers takes a number of at least 0",
        ),
        (["--offload", "--engine", "sglang"], "has no drafts and tiers here"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], said: str, install: Any, capsys: Capture, tmp_path: Path
) -> None:
    install(fake_api())
    assert said in refused(["conform", *arguments], capsys, tmp_path)


def test_settings_that_vllm_refuses_are_counted(install: Any, capsys: Capture) -> None:
    api = fake_api()

    def picky(**arguments: Any) -> Any:
        if arguments["policy"] == "priority":
            raise ValueError("no priorities today")
        return kind(**arguments)

    from inspect import signature  # noqa: PLC0415

    kind = api.SchedulerConfig
    picky.__signature__ = signature(kind)  # type: ignore[attr-defined]
    vars(api)["_found"]["SchedulerConfig"] = picky
    install(api)
    assert kvsim(["conform", "--num", "12"]) == 0
    said = capsys.readouterr().out
    assert "more could not be set up, the first because: vLLM 0.33.0 refuses" in said
    assert "no priorities today" in said


def test_what_the_hosted_engine_dies_of_is_shown(install: Any, capsys: Capture) -> None:
    api = fake_api()

    def schedule(self: Any) -> Any:
        output = super(kind, self).schedule()
        if len(output.num_scheduled_tokens) > 1:
            raise ValueError("Cannot get 1 free blocks from the pool")
        return output

    kind = type("S", (api.Scheduler,), {"schedule": schedule})
    vars(api)["_found"]["Scheduler"] = kind
    install(api)
    assert kvsim(["conform", "--num", "5"]) == 1
    said = capsys.readouterr().out
    assert "error: vLLM 0.33.0 refuses or fails in Scheduler.schedule: " in said
    assert "made small: 2 requests" in said


def test_files_of_other_generations_are_refused(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    install(fake_api())
    path = write_workload(tmp_path / "old.json", workload("0.1.0", []))
    assert refused(["conform", str(path)], capsys, tmp_path) == (
        f"kvsim: {path}: a hosted vLLM takes workloads of v1, and the reference 'vllm "
        f"0.1.0' is of cacheflow; leave it out"
    )


def test_nothing_compared_is_not_called_equal(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    api = fake_api()

    def broken(num_blocks: int) -> None:
        del num_blocks

    vars(api)["_found"]["KVCacheConfig"] = broken
    install(api)
    said = refused(["conform", "--num", "3"], capsys, tmp_path)
    assert "none of 3 random workloads could be set up: the API of vLLM" in said
    assert "KVCacheConfig takes no kv_cache_tensors" in said


def test_groups_are_drawn_where_they_are_asked_for(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    """The fake vLLM has no groups, as a release without the rules of 0.33."""
    install(fake_api("0.30"))
    said = refused(["conform", "--groups", "--num", "3"], capsys, tmp_path)
    assert "none of 3 random workloads could be set up: " in said
    assert kvsim(["conform", "--num", "3"]) == 0


def test_steps_in_flight_that_cannot_be_hosted_are_refused(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    install(fake_api())
    command = ["conform", "--async-scheduling", "--num", "2"]
    said = refused(command, capsys, tmp_path)
    assert "none of 2 random workloads could be set up: vLLM 0.33.0 refuses" in said
    staged = workload("0.33.0", [request("a", 9, 2)], pipeline_parallel_size=2)
    path = write_workload(tmp_path / "w.json", staged)
    assert "a hosted vLLM runs in one stage" in refused(
        ["conform", str(path)], capsys, tmp_path
    )


def test_the_scheduler_has_no_keys_of_its_own(install: Any) -> None:
    install(fake_api())
    config = parse_config(run_config({"kind": "vllm"}))  # type: ignore[arg-type]
    assert simulate(config).summary["hosted_vllm"] == "0.33.0"
    config = parse_config(run_config({"kind": "vllm", "api": 1}))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"engine\.scheduler\.api: 'vllm' has no such"
    ):
        simulate(config)


# -- kvsim decisions and kvsim run ------------------------------------------------


def test_decisions_are_those_of_the_installed_vllm(
    install: Any, capsys: Capture, tmp_path: Path
) -> None:
    install(fake_api("0.11"))
    asked = workload("0.33.0", [request("a", 9, 2), request("b", 8, 8)])
    path = write_workload(tmp_path / "w.json", asked)
    out = tmp_path / "log.jsonl"
    command = ["decisions", str(path), "--scheduler", "vllm", "--out", str(out)]
    assert kvsim([*command, "--check"]) == 0
    said = capsys.readouterr().out
    assert ": vLLM 0.11.0 itself (reference: vllm 0.33.0), 2 requests" in said
    ours = load_workload(path).model_copy(update={"reference": "vllm 0.11"})
    assert list(read_log(out)) == list(DecisionDriver(ours).lines())
    assert kvsim([*command, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hosted_vllm"] == "0.11.0"


def test_diff_takes_no_scheduler(capsys: Capture, tmp_path: Path) -> None:
    logs = [str(tmp_path / "a"), str(tmp_path / "b")]
    said = refused(
        ["decisions", "--diff", *logs, "--scheduler", "vllm"], capsys, tmp_path
    )
    assert "--diff compares two logs that exist" in said


def run_config(scheduler: str, **engine: Any) -> dict[str, Any]:
    return {
        "workload": {
            "synthetic": {
                "num_requests": 60,
                "arrivals": {"kind": "poisson", "rate": 50.0},
                "prompt_tokens": {"kind": "uniform", "low": 5, "high": 90},
                "output_tokens": {"kind": "uniform", "low": 1, "high": 60},
            },
            "best_of": 2,
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "num_gpu_blocks_override": 60,
            "scheduler": scheduler,
            "async_scheduling": False,
        }
        | engine,
        "cost": {"kind": "roofline"},
        "seed": 0,
    }


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("caching", [True, False])
def test_a_run_hosted_is_the_same_run(
    caching: bool, window: int | None, install: Any
) -> None:
    """Times, usage and preemptions, over the whole run."""
    install(fake_api())
    keys = {"enable_prefix_caching": caching, "sliding_window": window}
    hosted = simulate(parse_config(run_config("vllm", **keys)))
    ours = simulate(parse_config(run_config("v1", **keys, engine_version="0.33.0")))
    assert hosted.requests.equals(ours.requests)
    assert hosted.steps.equals(ours.steps)
    assert len(hosted.preemptions) == len(ours.preemptions) > (5 if not window else -1)
    same = [name for name in hosted.preemptions if name != "reason"]
    assert hosted.preemptions[same].equals(ours.preemptions[same])
    for name in ("prefix_cache_queries", "prefix_cache_hits"):
        assert hosted.summary[name] == ours.summary[name]
    assert hosted.summary["hosted_vllm"] == "0.33.0"
    assert hosted.summary["path"] == "stepwise"


def test_a_release_without_retention_is_told_what_to_keep(install: Any) -> None:
    install(fake_api("0.24"))
    config = run_config("vllm", model="openai/gpt-oss-20b") | {}
    config["engine"]["num_gpu_blocks_override"] = 900
    config["engine"]["max_model_len"] = 2000
    with pytest.raises(
        ConfigError,
        match=r"engine.prefix_cache_retention_interval is not known to vLLM 0.24.0, "
        r"which keeps every window and state: give 'dense'",
    ):
        simulate(parse_config(config))  # type: ignore[arg-type]


def test_the_configuration_names_the_installed_release(install: Any) -> None:
    install(fake_api("0.11"))
    config = parse_config(run_config("vllm"))
    assert config.engine.engine_version == "0.11.0"
    assert "engine_version: 0.11.0" in config.to_yaml()
    table = parse_config(run_config("v1") | {}).engine
    assert table.engine_version is None
    install(fake_api(installed="0.35.0"))
    assert parse_config(run_config("vllm")).engine.engine_version == "0.33"


def test_blocks_are_not_timed(install: Any, capsys: Capture, tmp_path: Path) -> None:
    install(fake_api())
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run_config("vllm")))
    out = tmp_path / "out"
    command = ["run", str(path), "--out", str(out), "--record", "blocks"]
    assert "VllmScheduler keeps blocks elsewhere" in refused(command, capsys, tmp_path)
    assert not out.exists()


# -- without vLLM -----------------------------------------------------------------


def test_missing_vllm_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    def version(package: str) -> str:
        raise vllm_api.PackageNotFoundError(package)

    monkeypatch.setattr(vllm_api, "version", version)
    vllm_api.load_api.cache_clear()
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run_config("vllm")))
    asked = write_workload(tmp_path / "w.json", workload("0.33.0", []))
    for command in (
        ["conform"],
        ["run", str(path)],
        ["decisions", str(asked), "--scheduler", "vllm"],
    ):
        said = refused(command, capsys, tmp_path)
        assert "there is none here; install it (docs/hosting.md" in said


def test_nothing_else_imports_vllm(tmp_path: Path) -> None:
    """A vLLM that ends the process when it is imported stands in every way."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os._exit(77)\n")
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(run_config("v1")))
    asked = write_workload(
        tmp_path / "w.json", workload("0.33.0", [request("a", 9, 2)])
    )
    script = (
        "import sys, sim.scheduler, sim.results.recording.schedule\n"
        "import sim.studies.conformance.conform\n"
        "from sim.cli.main import run\n"
        f"assert run(['run', {str(config)!r}, '--out', {str(tmp_path / 'out')!r},"
        " '--quiet', '--no-figures']) == 0\n"
        f"assert run(['decisions', {str(asked)!r}, '--out',"
        f" {str(tmp_path / 'log.jsonl')!r}]) == 0\n"
        "assert run(['--help']) == 0\n"
        "assert 'vllm' not in sys.modules\n"
        "import vllm\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 77, ended.stderr  # by the last line, not before


# -- random workloads and their smallest parts ------------------------------------


def test_a_seed_names_a_workload() -> None:
    first, second = random_workload(5, "0.33.0"), random_workload(5, "0.33.0")
    assert as_file(first) == as_file(second)
    assert as_file(first) != as_file(random_workload(6, "0.33.0"))


def test_random_workloads_have_no_key_that_the_release_lacks() -> None:
    def keys(release: str) -> set[str]:
        return set().union(*(random_workload(s, release).config for s in range(40)))

    assert keys("0.33.0") - keys("0.11.2") == {
        "watermark",
        "scheduler_reserve_full_isl",
        "long_prefill_token_threshold_adaptive",
        "max_num_active_seqs",
        "prefill_schedule_interval",
        "max_num_scheduled_tokens",
    }


def test_random_workloads_are_short_of_blocks() -> None:
    preempting = 0
    for seed in range(60):
        driver = DecisionDriver(random_workload(seed, "0.11.2"))
        list(driver.lines())
        preempting += driver.num_preemptions > 0
    assert preempting >= 30


def test_a_workload_is_shrunk_to_what_shows_it() -> None:
    original = random_workload(3, "0.33.0")
    wanted = max(original.requests, key=lambda each: each.output_len).id

    def shows(part: DecisionWorkload) -> bool:
        return any(r.id == wanted and r.output_len >= 2 for r in part.requests)

    small = shrunk(original, shows)
    (only,) = small.requests
    assert (only.id, only.output_len, only.num_prompt_tokens) == (wanted, 2, 1)
    assert only.arrival_step == 0
    assert only.abort_step is None
    assert small.config["policy"] == "fcfs"
    assert "sliding_window" not in small.config


def test_shrinking_ends_after_so_many_tries() -> None:
    tried: list[DecisionWorkload] = []

    def shows(part: DecisionWorkload) -> bool:
        tried.append(part)
        return False

    original = random_workload(3, "0.33.0")
    assert shrunk(original, shows, most_tries=7) is original
    assert len(tried) == 7


def test_the_smallest_difference_is_that_of_its_workload(install: Any) -> None:
    install(fake_api("0.32", installed="0.33.0"))
    differing = next(
        workload
        for workload in (random_workload(seed, "0.33.0") for seed in range(20))
        if compare(workload).difference is not None
    )
    small, difference = smallest(differing)
    again = compare(small).difference
    assert again is not None
    assert again.to_dict() == difference.to_dict()
    assert len(small.requests) <= len(differing.requests)
