"""Traffic in place of the configuration's: what is offered, and what files give."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import load_config, parse_config
from sim.config.workload import WorkloadConfig
from sim.errors import ConfigError
from sim.simulation.simulate import simulate
from sim.simulation.workload import make_workload
from sim.views.explore.base import Base, base_of
from sim.views.explore.controls import TRAFFIC
from sim.views.explore.traffic import (
    AS_GIVEN,
    Traffic,
    bundled_traffic,
    measured,
    traffic_of,
)
from tests.sim.config.test_config import write
from tests.sim.views.explore.asking import JSON, ThreadWorker, ask, base
from tests.sim.views.report.pages import crowded

if TYPE_CHECKING:
    from pathlib import Path

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.0000000,120,20
2023-11-16 18:17:04.5000000,80,10
2023-11-16 18:17:05.0000000,100,40
"""
SHORT = {
    "preset": {"name": "azure_conv_2023", "num_requests": 12, "rate_scale": 2.0},
    "max_concurrent_users": 3,
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def start(tmp_path: Path, trace: Path) -> Base:
    table = tmp_path / "mine.yaml"
    table.write_text(json.dumps({"workload": SHORT}))
    config = write(tmp_path, crowded(max_model_len=None, num_gpu_blocks_override=600))
    return base_of(config, ["seed=3"], [trace, table])


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*", text)]


@pytest.mark.parametrize(
    "traffic",
    [each for each in bundled_traffic() if "preset" not in each.workload],
    ids=lambda traffic: traffic.name,
)
def test_what_is_said_of_traffic_is_so(traffic: Traffic) -> None:
    specs = make_workload(WorkloadConfig(**traffic.workload), 0).requests()
    requests, _, prompt, output = numbers(measured(specs))
    _, _, told = traffic.facts.rpartition(":")
    assert numbers(told) == pytest.approx([requests, prompt, output], rel=0.05)


def test_a_preset_is_an_hour_at_its_rate() -> None:
    (preset,) = [each for each in bundled_traffic() if "preset" in each.workload]
    specs = make_workload(WorkloadConfig(**preset.workload), 0).requests()
    assert "5.5 requests/s for an hour" in preset.facts
    assert len(specs) / 3600 == pytest.approx(5.5, rel=0.05)


@pytest.mark.parametrize("traffic", bundled_traffic(), ids=lambda traffic: traffic.name)
def test_each_has_a_rate_among_its_own_controls(traffic: Traffic) -> None:
    own = base().of({TRAFFIC: traffic.name})
    first = [each for each in own.controls.values() if each.rank is not None]
    assert first[0].key == TRAFFIC
    assert first[1].key.endswith(".rate_scale")
    for each in own.controls.values():
        if each.key.startswith("workload."):
            settings = own.checked({each.key: each.value, TRAFFIC: traffic.name})
            parse_config(own.with_settings(settings))


@pytest.mark.parametrize(
    "settings",
    [
        {TRAFFIC: "chat"},
        {TRAFFIC: "batch", "workload.synthetic.num_requests": 30, "seed": 4},
        {TRAFFIC: "mine.csv"},
        {TRAFFIC: "mine.csv", "workload.trace.rate_scale": 0.5},
        {TRAFFIC: "mine.yaml", "workload.max_concurrent_users": 2},
        {TRAFFIC: AS_GIVEN, "workload.synthetic.rate_scale": 2.0},
    ],
    ids=str,
)
def test_the_command_does_what_the_page_does(
    start: Base, settings: dict[str, Any]
) -> None:
    checked = start.checked(settings)
    ours = parse_config(start.with_settings(checked))
    words = shlex.split(start.command(checked))
    told = [word for name, word in pairwise(words) if name == "--set"]
    theirs = load_config(words[2], told)
    assert theirs.to_data() == ours.to_data()
    if TRAFFIC in checked:
        assert theirs.workload != start.config.workload


def test_a_run_with_a_file_is_that_of_kvsim_run(start: Base, tmp_path: Path) -> None:
    from sim.views.explore.explorer import Explorer  # noqa: PLC0415 - an extra
    from sim.views.explore.server import application  # noqa: PLC0415

    explorer = Explorer(start, ThreadWorker)
    served = application(explorer)

    def post(path: str, **asked: Any) -> Any:
        body = json.dumps(asked).encode()
        return ask(served, path, method="POST", headers=JSON, body=body)

    settings = {TRAFFIC: "mine.csv", "workload.trace.rate_scale": 2.0}
    *_, last = post("/run", settings=settings).events
    found = last["result"]
    assert found["summary"]["num_requests"] == 3
    out = tmp_path / "out"
    words = shlex.split(found["command"])[1:]
    assert kvsim([*words, "--out", str(out), "--quiet", "--no-figures"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_preemptions"] == found["summary"]["num_preemptions"]
    assert summary["p95_ttft_ms"] == found["summary"]["p95_ttft_ms"]
    assert (out / "config.yaml").read_text() == found["yaml"]
    path = tmp_path / "page.yaml"
    path.write_text(found["yaml"])
    assert simulate(load_config(path)).summary == summary

    told = json.loads(ask(served, "/start.json").body)
    names = [AS_GIVEN, *(each.name for each in start.traffics)]
    assert list(told["traffic"]) == names
    of_file = [each["key"] for each in told["traffic"]["mine.csv"]]
    assert "workload.trace.rate_scale" in of_file
    assert not any(key.startswith("workload.synthetic") for key in of_file)

    asked = {TRAFFIC: "mine.csv", "workload.synthetic.rate_scale": 2.0}
    assert "not a setting of this page" in post("/run", settings=asked).error
    for name in ("other.csv", "/etc/passwd", str(tmp_path / "mine.csv"), None, 1, {}):
        reply = post("/run", settings={TRAFFIC: name})
        assert reply.status == 400
        assert "\n" not in reply.error


def test_a_curve_over_traffic_begins_each_as_it_is(start: Base) -> None:
    from sim.views.explore.explorer import Explorer  # noqa: PLC0415 - an extra
    from sim.views.explore.server import application  # noqa: PLC0415

    short = tuple(each for each in start.traffics if each.is_file)
    explorer = Explorer(Base(start.name, start.data, start.words, short), ThreadWorker)
    settings = {TRAFFIC: "mine.yaml", "workload.max_concurrent_users": 2}
    body = json.dumps({"settings": settings, "key": TRAFFIC}).encode()
    served = application(explorer)
    first, *points = ask(
        served, "/curve", method="POST", headers=JSON, body=body
    ).events
    assert first["values"] == [AS_GIVEN, "mine.csv", "mine.yaml"]
    for each in points:
        data = start.with_settings(start.checked({TRAFFIC: each["value"]}))
        ours = simulate(parse_config(data)).summary
        assert each["numbers"]["p95_ttft_ms"] == ours["p95_ttft_ms"]


def test_drafts_and_classes_stay() -> None:
    data = crowded()
    data["workload"] |= {
        "acceptance": {"kind": "constant", "rate": 0.7},
        "slo_class": {"fast": 0.5, "slow": 0.5},
        "max_concurrent_users": 5,
    }
    other = Base("x", data).of({TRAFFIC: "chat"}).data["workload"]
    assert set(other) == {"sessions", "acceptance", "slo_class"}


def test_traces_of_files_are_read_beforehand(start: Base) -> None:
    (key,) = start.traces
    assert "mine.csv" in key


def test_files_of_one_name_are_told_by_their_folders(
    tmp_path: Path, trace: Path
) -> None:
    other = tmp_path / "other" / "mine.csv"
    other.parent.mkdir()
    other.write_text(TRACE)
    names = [each.name for each in traffic_of([trace, other])]
    assert names == [str(trace), str(other)]
    like_ours = tmp_path / "chat"
    like_ours.write_text(TRACE)
    (found,) = traffic_of([like_ours])
    assert found.name == str(like_ours)
    with pytest.raises(ConfigError, match="give each file once"):
        traffic_of([trace, trace])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.csv", None, "none.csv"),
        ("what.csv", "a,b\n1,2\n", "like no known format"),
        ("bad.csv", TRACE + "x,1,2\n", "bad.csv:5: TIMESTAMP"),
        ("empty.csv", TRACE.splitlines()[0] + "\n", "at least one request"),
        ("run.yaml", "engine: {model: x}\n", "workload"),
        ("run.yaml", "workload: {trace: {kind: azure, path: no.csv}}", "no.csv"),
        ("none.yaml", None, "none.yaml"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str | None,
    said: str,
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert kvsim(["explore", "--traffic", str(path), "--no-browser"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvsim: traffic")
    assert said in line
