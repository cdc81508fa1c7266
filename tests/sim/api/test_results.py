"""Results in memory and on disk are the same thing; what cannot be read says why."""

from __future__ import annotations

import gc
import json
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from matplotlib.figure import Figure

from sim import Results, api, load_config, simulate, sweep
from sim.config.tables import parse_config
from sim.errors import ConfigError, ResultsError
from sim.results.recording.recorder import Recorder
from sim.views.plots import FIGURES
from sim.views.plots.style import to_png
from tests.shared import ROOT
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def results() -> Results:
    data = minimal(num_gpu_blocks_override=40, max_model_len=600)
    data["workload"]["synthetic"] |= {
        "num_requests": 120,
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 200},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 120},
    }
    return simulate(parse_config(data))


@pytest.fixture(scope="module")
def directory(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("results")
    results.write(directory)
    return directory


def test_its_repr_is_one_line(results: Results, directory: Path) -> None:
    """A notebook stores it beside the table: no arrays, no addresses."""
    for each in (results, Results.load(directory)):
        assert repr(each).startswith(f"<Results: {results.summary['title']}; ")
        assert repr(each).endswith("120 of 120 requests completed>")


def test_what_is_loaded_equals_what_was_found(
    results: Results, directory: Path
) -> None:
    again = Results.load(directory)
    assert results.summary["num_preemptions"] > 0
    assert again.summary == results.summary
    assert again.config == results.config
    for name in ("steps", "requests", "preemptions"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(results, name))
    assert again.step_table.num_steps == len(results.steps)


def test_summary_and_a_line_of_pandas_agree(results: Results) -> None:
    summary, requests = results.summary, results.requests
    assert summary["num_preemptions"] == len(results.preemptions)
    assert summary["recomputed_tokens"] == results.steps.num_recomputed_tokens.sum()
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * requests.ttft_s.mean())


@pytest.mark.parametrize("name", FIGURES)
def test_figures_from_memory_and_from_disk_are_the_same_bytes(
    name: str, results: Results, directory: Path
) -> None:
    assert name in dir(results.plot)
    drawn = getattr(results.plot, name)()
    assert isinstance(drawn, Figure)
    assert drawn._repr_png_() == to_png(getattr(Results.load(directory).plot, name)())
    assert to_png(drawn) == to_png(FIGURES[name](results.plot._found))


@pytest.mark.parametrize(
    ("name", "num"),
    [("kv_cache_usage", 1), ("queues", 2), ("steps", 3), ("latency_cdfs", 3)],
)
def test_figures_go_onto_axes_of_the_users(
    name: str, num: int, results: Results
) -> None:
    figure = Figure()
    axes = figure.subplots(num)
    assert getattr(results.plot, name)(ax=axes) is figure
    alone = getattr(results.plot, name)()
    given = list(figure.axes[:num])
    for mine, theirs in zip(given, alone.axes, strict=False):
        assert len(mine.get_lines()) == len(theirs.get_lines())
        assert len(mine.patches) == len(theirs.patches)
        label = theirs.get_xlabel() or alone.axes[num - 1].get_xlabel()
        assert mine.get_xlabel() == label  # none of these share their x axis
    if name != "latency_cdfs":
        assert given[0].get_title(loc="left") == alone.texts[0].get_text()
    with pytest.raises(ConfigError, match=f"has {num} panels, got {num + 1} axes"):
        getattr(results.plot, name)(ax=list(Figure().subplots(num + 1)))


def test_each_figure_that_is_listed_is_drawn() -> None:
    """A tier and drafts have figures of their own, of one engine as of several."""
    tier = {"kv_offloading_size": 1.0, "num_gpu_blocks_override": 40}
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    data = minimal(**tier, max_model_len=600)
    data["cost"] = {"kind": "roofline"}
    verified = minimal(speculative_config=drafts)
    verified["cost"] = {"kind": "roofline"}
    verified["workload"]["acceptance"] = {"kind": "constant", "rate": 0.5}
    fleet = {"fleet": {"pools": [{"name": "a", "replicas": 2}]}}
    for given, own in (
        (data, {"tier", "tier_ttft"}),
        (verified, {"drafts"}),
        (data | fleet, {"tier", "tier_ttft", "engines"}),
    ):
        plot = simulate(parse_config(given)).plot
        names = {each for each in dir(plot) if not each.startswith("_")}
        assert names >= own
        for name in names:
            assert isinstance(getattr(plot, name)(), Figure)
    with pytest.raises(ConfigError, match="each figure is drawn on axes of its own"):
        plot.queues(ax=Figure().subplots(2))


def test_a_misspelt_figure_says_which_there_are(results: Results) -> None:
    with pytest.raises(AttributeError, match="did you mean 'queues'"):
        results.plot.queue  # noqa: B018
    assert not hasattr(results.plot, "_repr_html_")


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_notebook_shows_the_summary_and_nothing_injected(
    results: Results,
) -> None:
    evil = {"title": "<script>alert(1)</script>", "warnings": ["<b>&", "two"]}
    shown = Results(results.config, results.recording, {**results.summary, **evil})
    parser = _Parser()
    html = shown._repr_html_()
    parser.feed(html)
    assert not parser.open
    assert "<script>" not in html
    assert "<b>" not in html
    text = " ".join(parser.text)
    assert "<script>alert(1)</script>" in text
    assert f"{results.summary['num_preemptions']:,}, of" in text
    assert f"{results.summary['p99_ttft_ms']:,.1f}" in text


def test_overrides_by_table_and_by_text_are_the_same() -> None:
    demo = ROOT / "examples/demo.yaml"
    by_text = load_config(demo, ["engine.max_num_seqs=64", "cost={kind: roofline}"])
    table = {"engine.max_num_seqs": 64, "cost": {"kind": "roofline"}}
    assert load_config(demo, table) == by_text
    with pytest.raises(ConfigError, match="put it in a list"):
        load_config(demo, "seed=1")
    with pytest.raises(ConfigError, match="'gpu' is not a table"):
        load_config(demo, {"engine.gpu.name": 1})


def test_a_sweep_of_configurations_is_that_of_the_command(
    results: Results,
) -> None:
    config = results.config
    other = config.model_copy(update={"seed": 5})
    frame = sweep([config, other], num_workers=1)
    assert frame["seed"].tolist() == [0, 5]
    assert frame["num_preemptions"][0] == results.summary["num_preemptions"]
    assert frame["status"].tolist() == ["done", "done"]
    with pytest.raises(ConfigError, match="got none"):
        sweep([])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path / "nowhere", "does not exist"),
        (lambda path: (path / "summary.json").unlink(), "there is no .*summary.json"),
        (lambda path: (path / "summary.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "summary.json").write_text("[]"), "holds no table"),
        (lambda path: (path / "steps.parquet").unlink(), "there is no steps"),
        (lambda path: (path / "requests.parquet").write_text("x"), "cannot be read"),
        (
            lambda path: pd.DataFrame({"a": [1]}).to_parquet(path / "steps.parquet"),
            "has no column 'step'",
        ),
    ],
)
def test_what_is_no_result_is_refused_in_a_line(
    spoil: object, message: str, results: Results, tmp_path: Path
) -> None:
    results.write(tmp_path)
    asked = spoil(tmp_path)  # type: ignore[operator]
    path = asked if hasattr(asked, "name") else tmp_path
    with pytest.raises(ResultsError, match=message) as refused:
        Results.load(path)
    assert "\n" not in str(refused.value)


def test_a_run_lets_go_of_all_but_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_recorders() -> int:
        return sum(isinstance(each, Recorder) for each in gc.get_objects())

    monkeypatch.setattr(api, "_MANY_STEPS", 0)
    gc.collect()  # those of earlier tests
    num_before = num_recorders()
    gc.disable()
    try:
        results = simulate(parse_config(minimal()))
        assert num_recorders() == num_before
    finally:
        gc.enable()
    assert results.requests.shape[0] == results.summary["completed"]


def test_runs_without_preemptions_and_with_unknown_columns_load(tmp_path: Path) -> None:
    found = simulate(parse_config(minimal()))
    assert found.summary["num_preemptions"] == 0
    found.write(tmp_path)
    path = tmp_path / "requests.parquet"
    pd.read_parquet(path).assign(later="x", more=1).to_parquet(path)
    again = Results.load(tmp_path)
    pd.testing.assert_frame_equal(again.preemptions, found.preemptions)
    assert again.requests["later"].tolist() == ["x"] * len(found.requests)
    assert json.loads((tmp_path / "summary.json").read_text()) == dict(again.summary)
