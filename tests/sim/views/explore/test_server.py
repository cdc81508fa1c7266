"""The page's server: what it gives, what a run comes to, what it refuses."""

from __future__ import annotations

import gc
import json
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the extra 'explore' is not installed")

from kvsim import explore
from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.views.explore import work
from sim.views.explore.controls import REPLICAS
from sim.views.explore.explorer import Explorer
from sim.views.explore.kept import live
from sim.views.explore.ranges import values_of
from sim.views.explore.server import application
from tests.sim.views.explore.asking import JSON, ThreadWorker, ask, base

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.applications import Starlette

    from sim.views.explore.control import Control

BASE = base(objectives={"p95_ttft_ms": 2000.0, "p50_tpot_ms": 60.0})


@pytest.fixture
def app() -> Iterator[Starlette]:
    explorer = Explorer(BASE, ThreadWorker)
    yield application(explorer)
    explorer.end()


def run(app: Starlette, settings: object, *beside: Any, **more: Any) -> Any:
    asked = {"settings": settings, "beside": list(beside)} | more
    return ask(
        app, "/run", method="POST", headers=JSON, body=json.dumps(asked).encode()
    )


def test_the_page_and_its_files_are_given(app: Starlette) -> None:
    page = ask(app, "/")
    assert page.status == 200
    assert b"<title>crowded - kvsim explore</title>" in page.body
    assert b"http" not in page.body.replace(b"http-equiv", b"")
    for name in ("plotly.js", "drawing.js", "theme.js", "explore.js"):
        assert f'src="{name}"'.encode() in page.body
        found = ask(app, f"/{name}")
        assert found.status == 200
        assert "javascript" in found.headers["content-type"]
    assert "css" in ask(app, "/looks.css").headers["content-type"]
    for other in ("/explore.css", "/../explorer.py", "/assets/explore.js", "/etc"):
        assert ask(app, other).status == 404


def test_the_start_has_every_control(app: Starlette) -> None:
    told = json.loads(ask(app, "/start.json").body)
    assert [each["key"] for each in told["controls"]] == list(BASE.controls)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"workload.synthetic.rate_scale": 2.5},
        {"engine.num_gpu_blocks_override": 64, "engine.max_num_seqs": 5},
        {REPLICAS: 2},
        {"engine.scheduler": "v0"},
    ],
    ids=str,
)
def test_a_run_is_that_of_kvsim_run(app: Starlette, settings: dict[str, Any]) -> None:
    *_, last = run(app, settings).events
    found = last["result"]
    ours = simulate(parse_config(BASE.with_settings(settings))).summary
    theirs = found["summary"]
    assert theirs["num_preemptions"] == ours["num_preemptions"]
    same = [key for key in ours if "interval" not in key]
    assert {key: theirs[key] for key in same} == json.loads(
        json.dumps({key: ours[key] for key in same})
    )
    (tile,) = [each for each in found["tiles"] if each["key"] == "num_preemptions"]
    assert tile["value"] == f"{ours['num_preemptions']:,}"
    assert {"kv-cache-usage", "queues", "latency-cdfs"} <= found["figures"].keys()


def test_what_was_run_is_not_run_again(app: Starlette) -> None:
    explorer = Explorer(BASE, ThreadWorker)
    served = application(explorer)
    first = run(served, {"engine.max_num_seqs": 9}).events[-1]
    other = run(served, {}).events[-1]
    again = run(served, {"engine.max_num_seqs": 9}).events[-1]
    assert explorer.front.num_runs == 2
    assert again == first != other
    taken = other["result"]["resolved"]
    assert taken["engine.gpu_memory_utilization"] == 0.92


def test_a_pinned_run_stands_behind(app: Starlette) -> None:
    pin = {"name": "pinned", "settings": {"engine.num_gpu_blocks_override": 80}}
    *_, last = run(app, {}, pin).events
    found = last["result"]
    names = {each["name"] for each in found["figures"]["kv-cache-usage"]["data"]}
    assert {"pinned: KV usage", "now: KV usage"} <= names
    first = found["figures"]["kv-cache-usage"]["data"][0]
    assert first["name"] == "pinned: KV usage"  # drawn first, so behind
    (tile,) = [each for each in found["tiles"] if each["key"] == "num_preemptions"]
    assert tile["before"].startswith("pinned: ")
    assert tile["change"] == "worse"
    assert "They differ in num_gpu_blocks_override (80, 40)" in found["said"]


def test_objectives_are_judged_and_drawn(app: Starlette) -> None:
    settings = {"objectives.p95_ttft_ms": 1.0}
    *_, last = run(app, settings).events
    tiles = {each["key"]: each for each in last["result"]["tiles"]}
    assert tiles["verdict"]["state"] == "fails"
    traces = last["result"]["figures"]["latency-cdfs"]["data"]
    crosses = [t for t in traces if t["name"] == "objective" and "marker" in t]
    assert [(t["x"], t["y"]) for t in crosses] == [([0.001], [95]), ([0.06], [50])]
    *_, none = run(
        app, dict.fromkeys(("objectives.p95_ttft_ms", "objectives.p50_tpot_ms"))
    ).events
    assert "verdict" not in {each["key"] for each in none["result"]["tiles"]}


def test_a_refused_configuration_is_a_line(app: Starlette) -> None:
    *_, event = run(
        app, {"engine.scheduler": "hf_fifo", "engine.watermark": 0.1}
    ).events
    assert "the hf_fifo generation has no such key" in event["error"]
    *_, event = run(app, {"engine.max_model_len": 10}).events
    assert "larger cache" in event["error"] or "max_model_len" in event["error"]
    assert run(app, {}).events[-1]["result"]  # the page lives on


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"settings": NaN}',
        b'{"settings": {"seed": Infinity}}',
        b'{"settings": {}, "path": "/etc/passwd"}',
        b'{"settings": []}',
        b'{"settings": {}, "beside": {}}',
        b'{"settings": {}, "beside": [1]}',
        b'{"settings": {}, "beside": [{"settings": {}}]}',
        b'{"settings": {}, "beside": [{"name": "", "settings": {}}]}',
        b'{"settings": {"engine.model": "/etc/passwd"}}',
        b'{"settings": {"engine.scheduler": "evil.py:Evil"}}',
        json.dumps({"settings": {}, "beside": [{"name": "x"}] * 4}).encode(),
        b"[" * 60_000,
        b'{"settings": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
def test_malformed_questions_are_refused_in_a_line(app: Starlette, body: bytes) -> None:
    reply = ask(app, "/run", method="POST", headers=JSON, body=body)
    assert reply.status == 400
    assert "\n" not in reply.error
    assert len(reply.error) < 300


def post(app: Starlette, path: str, **asked: Any) -> Any:
    body = json.dumps(asked).encode()
    return ask(app, path, method="POST", headers=JSON, body=body)


def test_a_curve_is_taken_over_the_range_of_a_control(app: Starlette) -> None:
    key = "workload.synthetic.rate_scale"
    first, *points = post(app, "/curve", settings={"seed": 4}, key=key).events
    values = first["values"]
    assert len(values) == 8
    assert values == sorted(values)
    assert 1.0 in values  # that of the page
    assert [each["place"] for each in points] == [0, 7, 3, 1, 5, 2, 4, 6]
    for each in (points[0], points[1]):
        data = BASE.with_settings({"seed": 4, key: each["value"]})
        ours = simulate(parse_config(data)).summary
        told = each["numbers"]
        assert told["num_preemptions"] == ours["num_preemptions"]
        assert told["p95_ttft_ms"] == ours["p95_ttft_ms"]
        assert told["p50_tpot_ms"] == ours["p50_tpot_ms"]
        assert each["holds"] is ours["verdict"]["holds"]


def test_a_point_without_a_result_is_a_line_of_its_own(app: Starlette) -> None:
    key = "engine.scheduler"
    _, *points = post(app, "/curve", settings={"engine.watermark": 0.1}, key=key).events
    told = {each["value"]: each for each in points}
    assert "no such key" in told["hf_fifo"]["error"]
    assert told["v1"]["numbers"]["num_preemptions"] >= 0


@pytest.mark.parametrize(
    "key", ["engine.model", "seed", "nothing", None, {}, "x" * 999]
)
def test_a_setting_without_a_range_has_no_curve(app: Starlette, key: Any) -> None:
    reply = post(app, "/curve", settings={}, key=key)
    assert reply.status == 400
    assert len(reply.error) < 200


@given(st.sampled_from(list(BASE.controls.values())), st.floats(0.01, 1e6))
def test_values_of_a_curve_are_ones_that_the_control_takes(
    control: Control, now: float
) -> None:
    try:
        values = values_of(control, round(now) if control.what == "whole" else now)
    except ConfigError:
        return
    assert 2 <= len(values) <= 16
    for value in values:
        assert control.checked(value) == value


def test_results_leave_as_kvsim_run_writes_them(app: Starlette, tmp_path: Path) -> None:
    settings = {"engine.max_num_seqs": 11}
    reply = post(app, "/file", settings=settings, what="results")
    assert 'filename="explored.zip"' in reply.headers["content-disposition"]
    with ZipFile(BytesIO(reply.body)) as archive:
        theirs = {name: archive.read(name) for name in archive.namelist()}
    (tmp_path / "run.yaml").write_bytes(theirs["explored/config.yaml"])
    given_ = ["run", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")]
    assert kvsim([*given_, "--quiet", "--no-figures"]) == 0
    ours = {f"explored/{p.name}": p.read_bytes() for p in (tmp_path / "out").iterdir()}
    del ours["explored/run.json"]  # wall time and machine
    assert theirs == ours


def test_a_report_leaves_the_page(app: Starlette) -> None:
    reply = post(app, "/file", settings={}, what="report")
    assert b"What matters first" in reply.body
    of_two = post(app, "/file", settings={REPLICAS: 2}, what="report")
    assert b"Engines beside each other" in of_two.body
    for what in ("/etc/passwd", None, "kept", ["report"]):
        assert post(app, "/file", settings={}, what=what).status == 400


def test_a_notebook_shows_the_page() -> None:
    page = explore(BASE.config)
    try:
        assert page.url in page._repr_html_()
        with urlopen(page.url, timeout=30) as reply:
            assert b"kvsim explore" in reply.read()
            policy = reply.headers["content-security-policy"]
        assert "frame-ancestors http://127.0.0.1:* http://localhost:*" in policy
    finally:
        page.stop()
    with pytest.raises(OSError, match="refused"):
        urlopen(page.url, timeout=5)


def test_script_in_names_is_text() -> None:
    evil = '<img src=x onerror="alert(1)">'
    data = BASE.with_settings({})
    explorer = Explorer(type(BASE)(evil, data), ThreadWorker)
    served = application(explorer)
    page = ask(served, "/").body.decode()
    assert "<img" not in page
    pin = {"name": "<b>pin</b>", "settings": {"engine.max_num_seqs": 4}}
    *_, last = run(served, {}, pin).events
    told = json.dumps(last["result"]["html"]) + last["result"]["said"]
    assert "<b>" not in told
    assert "&lt;b&gt;" in told


def test_of_a_fleet_queues_add_up_and_caches_lie_between(app: Starlette) -> None:
    explorer = Explorer(BASE, ThreadWorker)
    served = application(explorer)
    assert run(served, {REPLICAS: 3}).events[-1]["result"]
    (kept,) = explorer._kept.values()
    assert kept.num_engines == 3
    usage, running = (kept.steps.states[n] for n in ("kv_cache_usage", "num_running"))
    assert (usage.low <= usage.mean + 1e-12).all()
    assert (usage.mean <= usage.high + 1e-12).all()
    assert usage.high.max() <= 1.0
    mean = kept.summary["num_running_mean"]
    assert running.mean.mean() == pytest.approx(mean, rel=0.05)
    assert live(1, "now", kept).steps is kept.steps


def test_old_runs_are_forgotten_when_memory_is_used(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = Explorer(BASE, ThreadWorker)
    served = application(explorer)
    run(served, {})
    (kept,) = explorer._kept.values()
    monkeypatch.setattr(
        "sim.views.explore.explorer.MOST_KEPT_BYTES", int(2.5 * kept.num_bytes)
    )
    for number in (5, 6, 7):
        run(served, {"engine.max_num_seqs": number})
    assert len(explorer._kept) == 2


def test_a_worker_keeps_nothing_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    def simulations() -> int:
        return sum(isinstance(each, Simulation) for each in gc.get_objects())

    class Asking:
        """A pipe through which one run is asked for, and that is closed then."""

        def __init__(self) -> None:
            self.said: list[object] = []

        def recv(self) -> object:
            if not self.said:
                return BASE.config.to_data(), "numbers"
            left.append(simulations())
            raise EOFError

        def send(self, said: object) -> None:
            self.said.append(said)

    monkeypatch.setattr(work, "begin", lambda *_: None)
    asking: Any = Asking()
    gc.collect()
    before = simulations()
    gc.disable()
    try:
        work.serve(asking, {})
    finally:
        gc.enable()
    assert "num_preemptions" in asking.said[-1]
    assert left == [before]
