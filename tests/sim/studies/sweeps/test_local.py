"""Processes that run jobs, and what becomes of jobs whose process dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from time import sleep
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from sim.config.plugins import refuses_plugins, without_plugins
from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from sim.studies.sweeps.directory import identity
from sim.studies.sweeps.forks import start_method
from sim.studies.sweeps.job import CRASHED, Attempts
from sim.studies.sweeps.local import LocalExecutor, SerialExecutor
from sim.studies.sweeps.session import Tally, run_sweep
from sim.studies.sweeps.task import begin, perform_several, run_summary
from tests.sim.config.test_config import minimal
from tests.sim.studies.sweeps.files import CRASHER, by_index, seeded_jobs, sweep_of
from tests.sim.studies.sweeps.tasks import (
    add_one,
    die_at,
    die_when_watched,
    leave_a_mark,
    leave_a_mark_and_sleep,
    tell_pid,
    with_a_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from sim.studies.sweeps.expand import Sweep
    from sim.studies.sweeps.job import Outcome


def test_processes_find_what_one_process_finds() -> None:
    jobs = seeded_jobs(12)
    with SerialExecutor() as serial:
        expected = by_index(serial.run(jobs, run_summary))
    assert [status for status, *_ in expected.values()] == ["done"] * 12
    for num_workers in (1, 3):
        with LocalExecutor(num_workers) as local:
            assert local.num_workers == num_workers
            assert by_index(local.run(jobs, run_summary)) == expected
            assert by_index(local.run(reversed(jobs), run_summary)) == expected


def test_every_way_to_go_wrong_is_a_row() -> None:
    jobs = seeded_jobs(9)
    with LocalExecutor(2) as local:
        found = {o.index: o for o in local.run(jobs, with_a_number)}
    assert [found[i].status for i in range(9)] == [
        "done",
        "refused",
        "failed",
        "failed",
        "crashed",
        "failed",
        "failed",
        "done",
        "done",
    ]
    assert found[0].summary == {"number": 0}
    assert found[1].error == "no room"
    assert found[4].error == CRASHED
    error = found[2].error
    assert error is not None
    assert error.startswith("Traceback (most recent call last)")
    assert error.endswith("ValueError: nobody expected this")
    # The traceback begins with the task, not with what called it.
    assert error.count("  File ") == 1
    assert "with_a_number" in error
    survivors = [job for job in jobs if job.index != 4]
    with SerialExecutor() as serial:
        expected = by_index(serial.run(survivors, with_a_number))
    assert by_index(o for i, o in found.items() if i != 4) == expected


def test_a_killed_worker_costs_the_runs_that_were_on_it_a_second_try() -> None:
    jobs = seeded_jobs(1) * 600
    jobs = [replace(job, index=i) for i, job in enumerate(jobs)]
    killed: list[int] = []
    with LocalExecutor(2) as local:
        outcomes: list[Outcome] = []
        for outcome in local.run(jobs, tell_pid):
            outcomes.append(outcome)
            assert outcome.summary is not None
            pid = outcome.summary["pid"]
            if len(outcomes) > (100, 300, 10**9)[len(killed)] and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    assert sorted(outcome.index for outcome in outcomes) == list(range(600))
    assert {outcome.status for outcome in outcomes} == {"done"}
    pids = {o.summary["pid"] for o in outcomes if o.summary is not None}
    assert len(pids) == 4


def test_of_runs_that_go_together_only_the_one_that_crashes_is_lost() -> None:
    jobs = [replace(seeded_jobs(1)[0], index=i) for i in range(300)]
    for i, job in enumerate(jobs):
        jobs[i] = replace(job, config=dict(job.config) | {"seed": i, "dies_at": 200})
    with LocalExecutor(2) as local:
        found = {o.index: o for o in local.run(jobs, die_at)}
    assert len(found) == 300
    assert found[200].error == CRASHED
    assert {o.status for i, o in found.items() if i != 200} == {"done"}


def test_a_long_run_among_short_ones_gives_the_others_back() -> None:
    jobs = [replace(seeded_jobs(1)[0], index=i) for i in range(4)]
    first = perform_several(jobs, tell_pid, most_s=60.0)
    assert [outcome.index for outcome in first] == [0, 1, 2, 3]
    (only,) = perform_several(jobs, tell_pid, most_s=0.0)
    assert only.index == 0


def test_a_stop_keeps_what_is_finished_but_not_handed_over(tmp_path: Path) -> None:
    jobs = [replace(seeded_jobs(1)[0], index=i) for i in range(2000)]
    for i, job in enumerate(jobs):
        jobs[i] = replace(
            job, config=dict(job.config) | {"mark": str(tmp_path / f"{i}")}
        )
    kept = []
    with LocalExecutor(1) as local:
        for outcome in local.run(jobs, leave_a_mark):
            kept.append(outcome.index)
            if len(kept) == 200:
                local.stop()
    assert 200 <= len(kept) < 2000
    assert sorted(kept) == sorted(int(mark.name) for mark in tmp_path.iterdir())


def test_few_runs_are_shared_to_the_last() -> None:
    jobs = seeded_jobs(1) * 40
    attempts = Attempts(jobs)
    sizes = []
    while few := attempts.next_few(8, num_takers=2):
        sizes.append(len(few))
    assert sum(sizes) == 40
    assert sizes[0] == 8
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-4:] == [1] * 4
    # What was tried before goes alone.
    attempts = Attempts(jobs)
    for attempt in attempts.next_few(8, num_takers=2):
        attempts.innocent(attempt)
    assert [len(attempts.next_few(8, num_takers=2)) for _ in range(9)] == [1] * 8 + [8]


def test_a_worker_that_is_killed_while_idle_is_nobodys_fault() -> None:
    with LocalExecutor(1) as local:
        (outcome,) = local.run(seeded_jobs(1), tell_pid)
        assert outcome.summary is not None
        os.kill(outcome.summary["pid"], signal.SIGKILL)
        (again,) = local.run(seeded_jobs(1), tell_pid)
    assert again.summary is not None
    assert again.summary["pid"] != outcome.summary["pid"]


def test_outcomes_that_nobody_asks_for_do_not_come_later() -> None:
    jobs = seeded_jobs(20)
    with LocalExecutor(2) as local:
        for _ in local.run(jobs[:10], tell_pid):
            break
        later = sorted(o.index for o in local.run(jobs[10:], tell_pid))
    assert later == list(range(10, 20))


def test_a_run_that_needs_the_machine_for_itself_gets_it(tmp_path: Path) -> None:
    jobs = seeded_jobs(20)
    for job in jobs:
        assert isinstance(job.config, dict)
        job.config["directory"] = str(tmp_path)
    with LocalExecutor(2) as local:
        found = {o.index: o for o in local.run(jobs, die_when_watched)}
    assert {outcome.status for outcome in found.values()} == {"done"}
    assert found[0].summary == {"others": 0}


def test_a_stop_keeps_what_is_finished_and_ends_what_is_not(tmp_path: Path) -> None:
    jobs = seeded_jobs(4)
    marks = [tmp_path / str(job.index) for job in jobs]
    for job, mark in zip(jobs, marks, strict=True):
        assert isinstance(job.config, dict)
        job.config["mark"] = str(mark)

    class Stopped(LocalExecutor):
        """Is stopped when both workers are at work."""

        def _hand_out(self, *arguments: Any) -> None:
            super()._hand_out(*arguments)
            if sum(mark.exists() for mark in marks) == 2:
                self.stop()

    with Stopped(2) as local:
        assert list(local.run(jobs, leave_a_mark_and_sleep)) == []
    assert not multiprocessing.active_children()


def test_a_task_that_workers_cannot_import_is_refused() -> None:
    with (
        LocalExecutor(1) as local,
        pytest.raises((AttributeError, TypeError), match="pickle"),
    ):
        list(local.run(seeded_jobs(1), lambda _: {}))


def test_tries_are_counted_by_job() -> None:
    jobs = seeded_jobs(3)
    attempts = Attempts(jobs)
    first, second, third = (attempts.next() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert attempts.next() is None
    assert attempts.died(first, 0.0) is None
    attempts.innocent(second)
    again = attempts.next()
    assert (again and again.job, again and again.number) == (jobs[0], 2)
    assert again is not None
    assert attempts.died(again, 0.0) is None
    assert attempts.next() == second
    # The last try waits until nothing else is going on, and nothing begins beside it.
    assert attempts.next() is None
    attempts.ended()
    assert attempts.next() is None
    attempts.innocent(third)
    assert attempts.next() == third
    attempts.ended()
    alone = attempts.next()
    assert alone is not None
    assert (alone.job, alone.number) == (jobs[0], 3)
    assert attempts.next() is None
    outcome = attempts.died(alone, 1.5)
    assert outcome is not None
    assert (outcome.index, outcome.status, outcome.wall_s) == (0, "crashed", 1.5)
    assert attempts.next() is None


@pytest.fixture
def five_hundred(tmp_path: Path) -> Sweep:
    """498 runs that work, one that kills its worker, one that can never fit."""
    (tmp_path / "crash.py").write_text(CRASHER)
    crash = {"cost": {"kind": f"{tmp_path / 'crash.py'}:Crash"}}
    unfit: dict[str, Any] = {"engine.num_gpu_blocks_override": None}
    unfit |= {"engine.model": "moonshotai/Kimi-Dev-72B", "engine.gpu": "l40s"}
    listed: list[dict[str, Any]] = [{"seed": seed} for seed in range(498)]
    listed.insert(200, {"seed": 998} | crash)
    listed.insert(300, {"seed": 999} | unfit)
    return sweep_of(tmp_path, list=listed)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.slow
def test_five_hundred_runs_with_a_kill_a_crash_and_a_misfit(
    five_hundred: Sweep, tmp_path: Path
) -> None:
    """498 results and two rows with reasons; interrupted and resumed, the same."""
    jobs = list(five_hundred.jobs())
    assert len(jobs) == 500

    def kill_in_the_middle(tally: Tally) -> None:
        if tally.num_ended == 250:
            victim = multiprocessing.active_children()[0]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)

    once = _folder(tmp_path / "once")
    with LocalExecutor(2) as local:
        tally = run_sweep(
            five_hundred, jobs, once, local, on_outcome=kill_in_the_middle
        )
    assert tally.is_complete
    assert tally.counts == {"done": 498, "crashed": 1, "refused": 1}
    table = pd.read_parquet(once)
    assert table["run"].tolist() == list(range(500))
    odd = table[table["status"] != "done"].set_index("run")
    assert odd["status"].to_dict() == {200: "crashed", 300: "refused"}
    assert odd.loc[200, "error"] == CRASHED
    assert "Kimi-Dev-72B" in odd.loc[300, "error"]
    done = table[table["status"] == "done"]
    assert (done["completed"] == 12).all()
    assert (done["num_preemptions"] > 0).any()

    # Interrupted twice, with other numbers of workers.
    pieces = _folder(tmp_path / "pieces")
    for num_workers, until in ((1, 120), (3, 320), (2, 500)):
        with LocalExecutor(num_workers) as local:

            def stop(tally: Tally, local: Any = local, until: int = until) -> None:
                if tally.num_ended == until < 500:
                    local.stop()

            tally = run_sweep(five_hundred, jobs, pieces, local, on_outcome=stop)
        assert tally.is_complete == (until == 500)
    assert (pieces / "runs.parquet").read_bytes() == (
        once / "runs.parquet"
    ).read_bytes()


def test_what_a_sweep_is_does_not_depend_on_the_process(tmp_path: Path) -> None:
    grid = {"engine.max_num_seqs": [4, 8]}
    first = identity(list(sweep_of(tmp_path, grid=grid).jobs()))
    assert identity(list(sweep_of(tmp_path, grid=grid).jobs())) == first
    other = identity(list(sweep_of(tmp_path, grid=grid, repeats=2).jobs()))
    assert other["runs_sha256"] != first["runs_sha256"]


@pytest.fixture(autouse=True)
def _no_worker_stays() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


def test_a_task_need_not_simulate() -> None:
    with LocalExecutor(1) as local:
        (outcome,) = local.run(seeded_jobs(1), add_one)
    assert outcome.summary == {"seed_and_one": 1}


def test_a_run_of_some_length_leaves_nothing_behind() -> None:
    """A simulation ends in cycles that hold its arrays, too few objects to count."""
    left: list[weakref.ref[Any]] = []

    def task(config: Mapping[str, Any]) -> dict[str, Any]:
        simulation = Simulation(parse_config(minimal()))
        simulation.run()
        left.append(weakref.ref(simulation.recorder))
        sleep(0.03)
        return {"seed": config["seed"]}

    gc.disable()
    try:
        (outcome,) = perform_several(seeded_jobs(1), task, 0.0)
        assert outcome.status == "done"
        assert left[0]() is None
    finally:
        gc.enable()


def test_workers_refuse_files_as_their_parent_does() -> None:
    """Whatever was the rule when the server of forks began."""

    def of_a_worker() -> bool:
        with ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context(start_method()),
            initializer=begin,
            initargs=({}, refuses_plugins()),
        ) as pool:
            return pool.submit(refuses_plugins).result()

    with without_plugins():
        assert of_a_worker()
    assert not of_a_worker()
    with without_plugins():
        assert of_a_worker()
