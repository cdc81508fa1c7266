"""Settings put upon a configuration, and the command line that does the same."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.config.tables import load_config, parse_config
from sim.errors import ConfigError
from sim.views.explore.base import DRAFTS, REPLICAS, Base, base_of
from tests.shared import ROOT
from tests.sim.config.test_config import write
from tests.sim.views.report.pages import crowded, results

if TYPE_CHECKING:
    from pathlib import Path


CONNECTOR = "engine.kv_transfer_config.kv_connector_extra_config"


@pytest.fixture
def start(tmp_path: Path) -> Base:
    data = crowded()
    data["objectives"] = {"p95_ttft_ms": 2000, "p99_ttft_ms": 9000}
    return base_of(write(tmp_path, data), ["seed=3"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine.max_num_seqs": 7, "engine.enable_prefix_caching": False},
        {"engine.gpu": "l40s", "engine.watermark": 0.015},
        {REPLICAS: 3},
        {"objectives.p95_ttft_ms": 1500.5, "objectives.p95_e2el_ms": 10_000},
        {"objectives.p95_ttft_ms": None},
        {"objectives.p95_ttft_ms": None, "objectives.p99_ttft_ms": None},
        {"engine.max_num_batched_tokens": None, "engine.max_model_len": None},
        {"workload.synthetic.arrivals.rate": 9.5, "workload.synthetic.rate_scale": 2},
        {"cost.step_s": 0.0125},
        {"engine.kv_offloading_size": 8, f"{CONNECTOR}.eviction_policy": "arc"},
        {f"{DRAFTS}.num_speculative_tokens": 2, "workload.acceptance.rate": 0.6},
    ],
    ids=str,
)
def test_the_command_does_what_the_page_does(
    start: Base, settings: dict[str, Any]
) -> None:
    checked = start.checked(settings)
    ours = parse_config(start.with_settings(checked))
    words = shlex.split(start.command(checked))
    assert words[:2] == ["kvsim", "run"]
    told = [word for name, word in pairwise(words) if name == "--set"]
    theirs = load_config(words[2], told)
    assert theirs.to_data() == ours.to_data()


def test_a_page_starts_from_what_is_given(tmp_path: Path) -> None:
    demo = base_of(None)
    example = load_config(ROOT / "examples/demo.yaml")
    assert demo.config.to_data() == example.to_data()
    assert base_of(None, ["seed=5"]).config.seed == 5
    run = results(tmp_path / "run", crowded())
    again = base_of(run)
    assert again.name == "run"
    assert again.config.to_data() == load_config(run / "config.yaml").to_data()
    assert again.command({}) == f"kvsim run {run / 'config.yaml'}"


def test_a_plan_gives_its_first_candidate(tmp_path: Path) -> None:
    plan = yaml.safe_load((ROOT / "examples/plan_chat.yaml").read_text())
    plan["workload"] = crowded()["workload"]
    plan["prices"] = {
        "per_gpu_hour": dict.fromkeys(("h100_sxm", "h200_sxm", "l40s", "a100_sxm"), 1.0)
    }
    path = write(tmp_path, plan)
    base = base_of(path)
    assert base.config.engine.gpu == "h100_sxm"
    assert base.config.objectives == {"p95_ttft_ms": 2000, "p95_tpot_ms": 100}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere.yaml"], "no configuration file"),
        (["--port", "70000"], "--port takes 0 to 65535"),
        (["--set", "engine.gpu=no_such"], "no_such"),
        ([str(ROOT / "examples")], "holds no results"),
    ],
)
def test_mistakes_are_a_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("starlette", reason="the extra 'explore' is not installed")
    assert kvsim(["explore", *given, "--no-browser"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_taken_port_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("starlette", reason="the extra 'explore' is not installed")
    from sim.views.explore.server import bound  # noqa: PLC0415

    with bound(0) as taken:
        port = taken.getsockname()[1]
        assert kvsim(["explore", "--no-browser", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {port} of 127.0.0.1 cannot be used" in line
    assert "give another --port" in line


def test_a_missing_extra_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    monkeypatch.delitem(
        __import__("sys").modules, "sim.views.explore.server", raising=False
    )
    assert kvsim(["explore", "--no-browser"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'kvsim[explore]'" in line


def test_a_sweep_is_no_start(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a sweep"):
        base_of(tmp_path)
