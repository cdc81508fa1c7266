"""``kvsim workload describe``: what it prints, writes, draws and refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.cli.main import run as kvsim
from sim.cli.output.workload import description_rows
from sim.views.plots.png import png_bytes
from sim.views.plots.studies.traffic import arrivals, draw_traffic, sharing
from tests.shared import shared
from tests.sim.commands import TRACE, files, refused
from workloads.analysis import describe
from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from pathlib import Path

    from workloads.spec import Segment

MOONCAKE = "traces/mooncake_fast25_conversation.jsonl"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def chat(num_sessions: int = 6, num_turns: int = 4) -> list[RequestSpec]:
    """Chats, turn by turn: each prompt has all that was said before."""
    rng = np.random.default_rng(3)
    requests: list[RequestSpec] = []
    for turn in range(num_turns):
        for session in range(num_sessions):
            number = len(requests)
            before = None if turn == 0 else requests[number - num_sessions]
            said: tuple[Segment, ...] = ((2, 40),)
            arrival_s, delay_s = 0.5 * session, 0.0
            if before is not None:
                answer = (before.output_segment, before.num_output_tokens)
                said = (*before.prompt, answer)
                delay_s = float(rng.exponential(9.0)) + 10.0 * num_sessions
                arrival_s = before.arrival_s + delay_s
            prompt = (*said, (4 + 2 * number, int(rng.integers(5, 90))))
            requests.append(
                RequestSpec(
                    number, arrival_s, prompt, int(rng.integers(9, 99)), 2 * number + 1,
                    session_id=session,
                    previous_id=before and before.request_id,
                    delay_s=delay_s,
                )
            )  # fmt: skip
    return requests


def test_lengths_alone_tell_of_no_shared_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert kvsim(["workload", "describe", str(trace)]) == 0
    said = "prefix sharing none is told, so each prompt is taken as text of its own"
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_table_has_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvsim(["workload", "describe", str(shared(MOONCAKE))]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for fact in (
        "12,031 in 3,537.0 s",
        "3.401 requests/s; busiest 60 s 4.12 requests/s",
        "288,500, 182,790 distinct",
        "36.64% of blocks, 37.36% of tokens (54,098,411 of 144,793,823)",
        "12,030 of 12,031",
        "prompts 144,793,823 12,035.1 6,909 27,367 39,550.5 85,400.4 126,195",
    ):
        assert fact in said


def test_json_is_what_the_folder_holds(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["workload", "describe", str(trace), "--out", str(out), "--json"]
    assert kvsim(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "description.json").read_text())
    assert printed["prompt_tokens"]["max"] == 879
    assert printed["arrivals"]["num_requests"] == 3
    assert printed["prefix_sharing"] == []
    assert set(files(out)) == {
        "description.json", "figures/arrivals.png", "figures/lengths.png",
    }  # fmt: skip


def test_folder_is_replaced_only_when_asked_and_only_if_ours(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["workload", "describe", str(trace), "--quiet", "--out"]
    assert kvsim([*command, str(out)]) == 0
    assert capsys.readouterr().out == ""
    before = files(out)
    assert "exists already" in refused([*command, str(out)], capsys, tmp_path)
    assert kvsim([*command, str(out), "--overwrite"]) == 0
    assert files(out) == before  # figures too, byte for byte
    other = tmp_path / "run"
    other.mkdir()
    (other / "summary.json").write_text("{}")
    line = refused([*command, str(other), "--overwrite"], capsys, tmp_path)
    assert "does not hold results of kvsim workload describe" in line


@pytest.mark.parametrize("size", ["0", "-3"])
def test_impossible_blocks_are_refused_in_a_line(
    trace: Path, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["workload", "describe", str(trace), "--block-size", size]
    command += ["--from", "azure"]
    assert "block_size must be between" in refused(command, capsys, tmp_path)


def test_a_missing_file_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["workload", "describe", str(tmp_path / "no")], capsys, tmp_path)
    assert "trace" in line


@pytest.mark.slow
def test_every_figure_is_drawn_and_is_the_same_again(tmp_path: Path) -> None:
    found = describe(chat())
    first = draw_traffic("chats", found, tmp_path / "a")
    second = draw_traffic("chats", found, tmp_path / "b")
    names = ["arrivals.png", "lengths.png", "sharing.png", "sessions.png"]
    assert [path.name for path in first] == names
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
        assert a.read_bytes()[:8] == png_bytes(np.zeros((1, 1, 4), np.uint8), 1)[:8]


def arrived(*arrival_s: float) -> list[RequestSpec]:
    """A request at each of these times, of texts of their own."""
    return [
        RequestSpec(number, time_s, ((2 * number, 9),), 3, 2 * number + 1)
        for number, time_s in enumerate(arrival_s)
    ]


def test_gaps_of_a_coarse_clock_are_drawn_beside_poisson() -> None:
    # Ten at a time, every three seconds: the mean gap is a tenth of the least one.
    times_s = [3.0 * batch for batch in range(200) for _ in range(10)]
    axes = arrivals("batches", describe(arrived(*times_s))).axes[1]
    (gaps, poisson), (low, high) = axes.lines, axes.get_xlim()
    assert low < 0.05
    assert high > 3.0
    x, longer = (np.asarray(values, float) for values in gaps.get_data())
    assert longer.max() == pytest.approx(100.0 * 199 / 1999)
    assert x.min() <= low
    shown = np.asarray(poisson.get_ydata(), float) > axes.get_ylim()[0]
    assert 20 < shown.sum() < shown.size


def test_share_of_longer_gaps_is_drawn_exactly() -> None:
    gaps_s = [1.0, 2.0, 4.0, 4.0, 0.0]
    times_s = np.cumsum([0.0, *gaps_s]).tolist()
    line = arrivals("gaps", describe(arrived(*times_s))).axes[1].lines[0]
    assert line.get_drawstyle() == "steps-post"
    x, longer = (np.asarray(values, float).tolist() for values in line.get_data())
    # To the left of each gap, so many are at least as long.
    assert x[:4] == [4.0, 4.0, 2.0, 1.0]
    assert longer == [20.0, 40.0, 60.0, 80.0, 80.0]


def test_figure_and_table_tell_the_same_rate() -> None:
    found = describe(arrived(0.0, 5.0, 10.0))
    (mean,) = arrivals("three", found).axes[0].lines[-1:]
    assert found.arrivals.mean_rate == 0.2
    assert mean.get_ydata() == [0.2, 0.2]


def test_sharing_of_one_request_is_a_line() -> None:
    one = describe([RequestSpec(0, 0.0, ((0, 20), (2, 20)), 1, 1)])
    shares, warming = sharing("one", one).axes
    for line in shares.lines:
        assert np.asarray(line.get_xydata()).tolist() == [[0, 0], [0, 100], [100, 100]]
    assert np.asarray(warming.lines[-1].get_xydata()).tolist() == [[0, 0], [1, 0]]


def test_the_least_that_there_can_be_is_drawn(tmp_path: Path) -> None:
    one = describe([RequestSpec(0, 0.0, ((0, 1),), 1, 1, session_id=0)])
    assert len(draw_traffic("one", one, tmp_path)) == 4
    both = [RequestSpec(i, 5.0, ((0, 9),), 3, 2 * i + 1) for i in range(2)]
    assert len(draw_traffic("at once", describe(both), tmp_path)) == 3


def test_sessions_are_in_the_table() -> None:
    rows = dict(description_rows(describe(chat())))
    assert rows["sessions"] == "6, 6 of several requests"
    quoted = "18, 18 quote the answer that they waited for"
    assert rows["  follow-ups"].startswith(quoted)
    assert rows["  turns"].startswith("mean 4, p50 4")
    assert rows["  think or tool time"].endswith(" s")
