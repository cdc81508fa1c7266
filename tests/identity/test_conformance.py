"""The workloads that real engines have logged, through both paths.

A step takes a second, so that the steps of a log are seconds of the clock. Requests
come by a process, aborts too, and tokens are plain ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.costs.constant import ConstantCost
from sim.engine.clock import ARRIVAL_PRIORITY, At, Clock
from sim.engine.loop import Engine
from sim.results.recording.recorder import Recorder
from sim.scheduler.v1 import V1Scheduler
from sim.studies.conformance import load_workload, read_log
from sim.studies.conformance.driver import make_request
from sim.studies.conformance.engines import V1Engine
from tests.identity.compare import TABLES, table_difference, trail_differences
from tests.identity.trail import Trail
from tests.oracles.v1 import V1Scheduler as Oracle
from tests.shared import SHARED, shared

if TYPE_CHECKING:
    from collections.abc import Generator

    import pandas as pd
    import simpy

    from sim.results.recording.recorder import Recording
    from sim.scheduler.request import Request
    from sim.studies.conformance.workload import DecisionWorkload

ENDING = ".workload.json"
NAMES = [
    f"{folder}/{path.name.removesuffix(ENDING)}"
    for folder in ("v1", "v1_33")
    for path in sorted((SHARED / "conformance" / folder).glob(f"*{ENDING}"))
]


def arguments(workload: DecisionWorkload) -> dict[str, Any]:
    """Return the arguments of a scheduler, as `conformance.engines` gives them."""
    engine = workload.engine
    assert isinstance(engine, V1Engine)
    given = engine.model_dump()
    given["enable_chunked_prefill"] = given.pop("chunked_prefill")
    given["scheduling_policy"] = given.pop("policy")
    for key in ("speculative", "offload", "kv_transfer"):
        assert given.pop(key) is None
    given.pop("worker", None)
    # the oracle knows one step at a time
    assert (given.pop("async_scheduling"), given.pop("pipeline_parallel_size")) == (
        False,
        1,
    )
    return given | {"engine_version": workload.engine_version}


class LoggedRun:
    """A decision workload on the clock."""

    def __init__(self, workload: DecisionWorkload, *, stepwise: bool) -> None:
        given = arguments(workload)
        self.env = Clock()
        self.recorder = Recorder()
        self.scheduler: Any = (Oracle if stepwise else V1Scheduler)(**given)
        self.engine = Engine(
            self.env,
            self.scheduler,
            ConstantCost(step_s=1.0),
            self.recorder,
            admission_check=False,
        )
        requests = [
            make_request(index, raw, given["max_model_len"])
            for index, raw in enumerate(workload.requests)
        ]
        self.env.process(self._submit(workload, requests))
        self.env.process(self._abort(workload, requests))

    def _submit(
        self, workload: DecisionWorkload, requests: list[Request]
    ) -> Generator[simpy.Event, Any, None]:
        for raw, request in zip(workload.requests, requests, strict=True):
            request.arrival_s = float(raw.arrival_step)
            if request.arrival_s > self.env.now:
                yield At(self.env, request.arrival_s, ARRIVAL_PRIORITY)
            self.engine.submit(request)
        self.engine.close_arrivals()

    def _abort(
        self, workload: DecisionWorkload, requests: list[Request]
    ) -> Generator[simpy.Event, Any, None]:
        due = [
            (max(raw.abort_step, raw.arrival_step), raw.abort_step, raw.id, request)
            for raw, request in zip(workload.requests, requests, strict=True)
            if raw.abort_step is not None
        ]
        for step, *_, request in sorted(due, key=lambda each: each[:3]):
            if step > self.env.now:
                yield At(self.env, float(step), ARRIVAL_PRIORITY)
            if not request.status.is_finished:
                self.engine.abort(request, "its client withdrew it")

    def check(self) -> None:
        """See `sim.simulation.run.Simulation.check`."""
        self.scheduler.check()
        self.recorder.check(self.scheduler)

    def go(self, every_steps: int, *, told: bool) -> tuple[Recording, Trail]:
        trail = Trail(self, every_steps, told=told)
        self.env.run(until=self.engine.done)
        trail.close()
        return self.recorder.finish(self.env.now), trail


@pytest.mark.parametrize("name", NAMES or ["v1/light"])
def test_both_paths_are_equal(name: str) -> None:
    workload = load_workload(shared(f"conformance/{name}{ENDING}"))
    free, free_trail = LoggedRun(workload, stepwise=False).go(0, told=False)
    ours, our_trail = LoggedRun(workload, stepwise=False).go(1, told=True)
    theirs, their_trail = LoggedRun(workload, stepwise=True).go(1, told=True)
    for table in TABLES:
        for recording in (ours, free):
            difference = table_difference(
                getattr(recording, table), getattr(theirs, table)
            )
            assert difference is None, f"{table}: {difference}"
    assert list(trail_differences(our_trail, their_trail)) == []
    assert free_trail.given_up == their_trail.given_up
    assert free_trail.states[-1].free == their_trail.states[-1].free
    _compare_with_log(workload, ours, our_trail, name)


def _compare_with_log(
    workload: DecisionWorkload, recording: Recording, trail: Trail, name: str
) -> None:
    """Compare queues, batch, blocks, preemptions and ends with the real engine's."""
    names = [raw.id for raw in workload.requests]
    steps = recording.steps.set_index("start_s").to_dict("index")
    lines = list(read_log(shared(f"conformance/{name}.golden.jsonl.gz")))
    assert len(lines) == len(steps)
    preempted = _names_by_time(recording.preemptions, "time_s", names)
    served = recording.requests[recording.requests["status"] != "finished_aborted"]
    finished = _names_by_time(served, "finish_s", names)
    num_usable = workload.config["num_gpu_blocks"] - 1
    for line, state in zip(lines, trail.states, strict=False):
        step, now_s = steps[line["t"]], float(line["t"])
        assert step["num_running"] == len(line["running"])
        assert step["num_waiting"] == len(line["waiting"])
        assert step["num_batched_tokens"] == line["nbt"]
        assert step["num_physical_blocks"] == num_usable - line["free"][0]
        assert len(state.free) == line["free_end"][0]
        gone = set(line.get("fin", []))
        running = [names[index] for index in state.running]
        assert running == [each for each in line["running"] if each not in gone]
        assert preempted.get(now_s, []) == [each for each, _ in line.get("preempt", [])]
        assert set(finished.get(now_s + 1.0, [])) == gone


def _names_by_time(
    table: pd.DataFrame, column: str, names: list[str]
) -> dict[float, list[str]]:
    """Return the names of the requests of each time, in the order of the rows."""
    by_time: dict[float, list[str]] = {}
    for time_s, index in zip(table[column], table["request_id"], strict=True):
        by_time.setdefault(float(time_s), []).append(names[index])
    return by_time
