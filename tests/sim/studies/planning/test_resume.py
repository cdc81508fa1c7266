"""Plans that were interrupted go on, and say how far they are."""

from __future__ import annotations

import json
from time import sleep
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli import console
from sim.cli.main import run as kvsim
from sim.studies.planning import solve as solving
from sim.studies.planning.phases.progress import AnswerFile, Course, Expected
from sim.studies.planning.spec import load_plan
from sim.studies.sweeps.local import SerialExecutor
from tests.sim.studies.planning.plans import Stopping, small, written
from tests.sim.studies.sweeps.files import CRASHER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from sim.studies.sweeps.job import Job, Outcome, Task


def plan_of(num_requests: int = 100) -> dict[str, Any]:
    plan = small(sensitivity={"num_seeds": 1})
    plan["workload"]["synthetic"]["num_requests"] = num_requests
    return plan


class Counting(SerialExecutor):
    """An executor that counts what it is asked."""

    num_asked = 0

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        for outcome in super().run(jobs, task):
            self.num_asked += 1
            yield outcome


def measured(request: Any) -> Any:
    return request


def as_text(found: solving.PlanResult) -> str:
    return json.dumps(found.data)


@pytest.mark.slow
def test_a_resumed_plan_is_the_whole_plan_and_asks_only_the_rest(
    tmp_path: Path,
) -> None:
    plan = load_plan(written(plan_of(), tmp_path))
    with Counting() as executor:
        whole = solving.solve(plan, executor)
    for most in (0, 1, 3, 9, executor.num_asked - 1):
        path = tmp_path / f"{most}.jsonl"
        with Stopping(most) as stopping:
            try:
                solving.solve(plan, stopping, answers=AnswerFile(path))
            except solving.PlanStopped as stopped:
                # the first run is of an idle engine, which answers nothing
                assert len(stopped.known) == (1 if most > 1 else 0)  # noqa: PT017
        with path.open("a") as file:
            file.write('["cut off')
        with Counting() as resumed:
            found = solving.solve(plan, resumed, answers=AnswerFile(path))
        assert resumed.num_asked == executor.num_asked - most
        assert as_text(found) == as_text(whole)


@pytest.mark.slow
def test_a_changed_question_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    plan = plan_of()
    with Counting() as executor:
        first = load_plan(written(plan, tmp_path))
        solving.solve(first, executor, answers=AnswerFile(path))
        num_asked, executor.num_asked = executor.num_asked, 0
        plan["sensitivity"] = None
        solving.solve(
            load_plan(written(plan, tmp_path)), executor, answers=AnswerFile(path)
        )
        assert executor.num_asked == 0
        plan["objectives"] = {"p99_ttft_ms": 120}
        solving.solve(
            load_plan(written(plan, tmp_path)), executor, answers=AnswerFile(path)
        )
    assert 0 < executor.num_asked < num_asked


def test_progress_never_falls_and_its_total_holds(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with SerialExecutor() as executor:
        solving.solve(
            load_plan(written(plan_of(), tmp_path)),
            executor,
            lambda *progress: told.append(progress),
        )
    done = [each[1] for each in told]
    assert len({total for _, _, total in told}) == 1
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == told[-1][2]
    assert told[-1][0] == "sensitivities"


def test_a_phase_that_asks_again_leaves_room_for_the_rest() -> None:
    told: list[int] = []
    course = Course(lambda _, done, __: told.append(done))
    course.expect({"first": Expected(8, 12.5), "second": Expected(1, 100.0)})
    for phase, done, total in (
        ("first", 0, 4),
        ("first", 4, 4),
        ("first", 0, 2),
        ("first", 2, 2),
        ("second", 0, 1),
        ("second", 1, 1),
    ):
        course(phase, done, total)
    assert told == [0, 50, 50, 75, 100, 200]


def test_the_command_goes_on_where_it_was_interrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = written(plan_of(), tmp_path), tmp_path / "out"
    command = ["plan", str(path), "--out", str(out), "--workers", "1", "--no-figures"]
    kept = tmp_path / "out.answers.jsonl"
    assert kvsim([*command, "--resume"]) == 2
    assert "leave out --resume" in capsys.readouterr().err
    for most, is_written in ((4, False), (6, True)):
        with monkeypatch.context() as patched:
            patched.setattr(solving, "executor_for", lambda *_, n=most: Stopping(n))
            more = ["--resume"] if kept.exists() else []
            assert kvsim([*command, *more]) == 130
        said = capsys.readouterr().err
        assert "go on with --resume" in said
        assert out.exists() == is_written
        if not is_written:
            assert "roughly" in said
            assert kvsim(command) == 2
            assert "--overwrite" in capsys.readouterr().err
    assert json.loads((out / "plan.json").read_text())["stopped_in"]
    assert kvsim([*command, "--resume"]) == 0
    assert json.loads((out / "plan.json").read_text())["stopped_in"] is None
    assert not kept.exists()


def test_a_log_has_a_line_now_and_then_whatever_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.LoggedProgress, "EVERY_S", 0.02)
    lines: list[str] = []
    with console.progress_bar(lambda show: show, 1, "runs", shown=True) as show:
        assert show is not None
        show(0, phase="pilot runs", total=400.0)
        show(20, phase="highest rates")
        while len(lines) < 3:  # nothing ends in the meantime
            sleep(0.005)
            lines += capsys.readouterr().err.splitlines()
    for line in lines:
        assert line.startswith("kvsim: highest rates: 20 of 400 runs")
    sleep(0.05)
    assert not capsys.readouterr().err


def test_a_log_says_how_long_the_rest_takes_by_the_latest_news(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "about 0 s left" at the end, and ever longer times where none came."""
    now_s = 0.0
    monkeypatch.setattr(console, "monotonic", lambda: now_s)
    progress = console.LoggedProgress(400, "runs")
    said = []
    for at_s, done in ((5, 0), (10, 20), (40, 20), (300, 20), (301, 399), (310, 400)):
        now_s = at_s
        progress(done)
        progress.say()
        said.append(capsys.readouterr().err.rstrip().removeprefix("kvsim: "))
    assert said == [
        "0 of 400 runs, 5 s so far",
        "20 of 400 runs, about 3 min left",
        "20 of 400 runs, about 3 min left",
        "20 of 400 runs, 5 min so far",
        "399 of 400 runs, about 1 s left",
        "400 of 400 runs, 5 min so far",
    ]


def test_the_folder_one_is_in_is_no_place_for_a_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(plan_of(), tmp_path)
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--overwrite"]):
        assert kvsim(["plan", str(path), "--out", ".", *more]) == 2
        assert "choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "named"), [("mine.py", "{}/mine.py:Mine"), ("config.json", "{}")]
)
def test_an_answer_goes_with_the_class_or_the_model_that_was_read(
    file: str, named: str, tmp_path: Path
) -> None:
    path, run = tmp_path / file, {"engine": named.format(tmp_path)}
    path.write_text("1")
    answers = AnswerFile(tmp_path / "answers.jsonl")
    answers.keep(measured, {"run": run}, "slow")
    assert answers.get(measured, {"run": run}) == "slow"
    path.write_text("12")
    assert answers.get(measured, {"run": run}) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "traffic",
    [
        {"preset": {"name": "azure_conv_2023", "duration_s": 60.0}},
        {
            "synthetic": {
                "duration_s": 30.0,
                "arrivals": {"kind": "poisson", "rate": 10.0},
                "prompt_tokens": {"kind": "fixed", "tokens": 16},
                "output_tokens": {"kind": "fixed", "tokens": 20},
            }
        },
    ],
)
def test_traffic_of_some_duration_can_be_planned(
    traffic: dict[str, Any], tmp_path: Path
) -> None:
    plan = load_plan(
        written(
            small(workload=traffic, objectives={"p95_tpot_ms": 60, "p95_ttft_ms": 900}),
            tmp_path,
        )
    )
    with SerialExecutor() as executor:
        found = solving.solve(plan, executor).data
    (candidate,) = found["candidates"]
    assert candidate["status"] == "ok", candidate["reason"]
    assert candidate["rate"]["value"] > 0
    assert candidate["rate"]["confidence"] == 0.75  # three seeds say no more


def test_a_run_whose_process_dies_ends_a_plan_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = tmp_path / "crash.py"
    crash.write_text(CRASHER)
    path = written(small(cost={"kind": f"{crash}:Crash"}), tmp_path)
    out = tmp_path / "out"
    words = ["plan", str(path), "--workers", "1", "--quiet", "--out", str(out)]
    assert kvsim(words) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "a run of the plan crashed: the process that ran it died, 3 times" in told
    assert "go on with --resume" in told
    assert not out.exists()
