"""The same rows, however a recorder hears of them and wherever they go."""

from __future__ import annotations

import math
import tempfile
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.results import schema
from sim.results.metrics import cache_and_queues
from sim.results.recording import step_columns
from sim.results.recording.recorder import Recorder, Recording
from sim.results.recording.step_columns import ColumnMaker
from sim.results.tables.parquet import StepsFile, copy_steps
from sim.results.tables.steps import FrameSteps, ParquetSteps
from sim.scheduler.request import Request, RequestStatus
from tests.sim.build import Run, spec
from tests.sim.results.recorded import COST, StepByStep, Teller, Told, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.costs.base import CostModel

BATCH_ROWS = 7
CHUNK_ROWS = 3


@contextmanager
def short_batches() -> Iterator[None]:
    """Make batches so short that a few steps fill several."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tables.steps", "recording.step_log", "tables.parquet"):
            patch.setattr(f"sim.results.{module}.BATCH_ROWS", BATCH_ROWS)
        yield


def recorded(
    events: Sequence[Told], cost: CostModel, path: Path, *, quietly: bool
) -> tuple[bytes, Recording]:
    """Return the file that a recorder wrote, and what it kept."""
    with StepsFile(path) as file:
        teller = Teller(Recorder(file), cost, quietly=quietly, chunk_rows=CHUNK_ROWS)
        for event in events:
            teller.tell(event)
        recording = teller.recorder.finish(teller.now_s)
    return path.read_bytes(), recording


@given(st.lists(told, max_size=20), st.booleans(), st.data())
def test_stretches_leave_the_same_bytes_as_single_steps(
    events: list[Told], prices_many: bool, data: st.DataObject
) -> None:
    outside = data.draw(st.integers(400, 10**7))
    cost: CostModel = COST if prices_many else StepByStep(outside)
    with short_batches(), tempfile.TemporaryDirectory() as name:
        one, whole = Path(name) / "one", Path(name) / "whole"
        expected, told_singly = recorded(events, cost, one, quietly=False)
        found, told_whole = recorded(events, cost, whole, quietly=True)
        assert found == expected
        summaries = [cache_and_queues(each, 9.0) for each in (told_singly, told_whole)]
        assert summaries[0] == summaries[1]
        assert told_singly.extrapolated_share == told_whole.extrapolated_share
        file = pq.ParquetFile(whole)
        groups = [
            file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)
        ]
        file.close()
        assert all(rows == BATCH_ROWS for rows in groups[:-1])
        assert sum(groups) == sum(max(1, len(each.num_new_blocks)) for each in events)


def emitted(
    makers: Sequence[ColumnMaker], *, puts_off: bool
) -> tuple[list[tuple[int, dict[str, list[Any]]]], int]:
    """Return batches of logs that are told in turns, and whose; and steps of all."""
    batches: list[tuple[int, dict[str, list[Any]]]] = []
    tellers = []
    for number, maker in enumerate(makers):  # batches of 12, chunks of 6
        recorder = Recorder(num_recorders=2, maker=maker)
        tellers.append(Teller(recorder, COST, quietly=True, chunk_rows=1 << 20))

        def take(batch: Any, number: int = number) -> None:
            batches.append((number, {k: v.tolist() for k, v in batch.items()}))

        tellers[-1].log._emit = take
    for length in (1, 5, 2, 3, 7, 1, 1, 4, 13, 2, 9, 1, 6, 30, 2):
        for number, teller in enumerate(tellers):
            log, blocks = teller.log, (number,) * (length - 1)
            teller.tell(Told(8 + number, 900, 0, 16, blocks, number, 0.1))
            log.finished.extend((len(log.ends_s) - 1, 1))
            if len(log.ends_s) >= log.chunk_ends:
                log.end_chunk() if puts_off else log.flush()
    for teller in tellers:
        teller.recorder.finish(teller.now_s)
    return batches, sum(teller.step for teller in tellers)


@pytest.mark.parametrize("num_chunk_rows", [1, 40, 10**6])
def test_columns_of_several_logs_are_made_at_once_and_told_in_order(
    monkeypatch: pytest.MonkeyPatch, num_chunk_rows: int
) -> None:
    monkeypatch.setattr("sim.results.recording.step_log._LEAST_CHUNK_ROWS", 4)
    monkeypatch.setattr("sim.results.recording.step_log._MOST_ROWS_HELD", 24)
    monkeypatch.setattr(step_columns, "CHUNK_ROWS", num_chunk_rows)
    made: list[int] = []
    columns_of = step_columns._columns_of

    def note(sections: Any, kind: Any) -> Any:
        made.append(sum(section.num_steps for section in sections))
        return columns_of(sections, kind)

    monkeypatch.setattr(step_columns, "_columns_of", note)
    expected, num_steps = emitted([ColumnMaker() for _ in range(3)], puts_off=False)
    num_times, made = len(made), []
    found, _ = emitted([ColumnMaker()] * 3, puts_off=True)
    assert found == expected
    assert sum(made) == num_steps == sum(len(rows["step"]) for _, rows in found)
    assert sum(sum(rows["num_finished"]) for _, rows in found) == 3 * 15
    assert len(made) < num_times
    if num_chunk_rows > num_steps:  # but for the ends of logs, which make what waits
        assert len(made) == 3


@pytest.mark.slow
@given(st.lists(told, min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_memory_and_disk_hold_the_same_steps(events: list[Told]) -> None:
    with short_batches(), tempfile.TemporaryDirectory() as name:
        path, copy, again = (Path(name) / each for each in ("a", "b", "c"))
        expected, on_disk = recorded(events, COST, path, quietly=True)
        teller = Teller(Recorder(), COST, quietly=True, chunk_rows=CHUNK_ROWS)
        for event in events:
            teller.tell(event)
        in_memory = teller.recorder.finish(teller.now_s)
        copy_steps(in_memory.step_table, copy)
        assert copy.read_bytes() == expected
        frame = in_memory.steps  # the batches are given up for it
        copy_steps(in_memory.step_table, again)
        assert again.read_bytes() == expected
        assert frame.equals(on_disk.steps)
        assert frame.dtypes.astype(str).to_dict() == schema.STEPS
        columns = ("step", "latency_s")
        tables = (FrameSteps(frame), ParquetSteps(path), in_memory.step_table)
        for table in tables:
            assert table.num_steps == len(frame)
            batches = list(table.batches(columns))
            assert {len(batch["step"]) for batch in batches[:-1]} <= {BATCH_ROWS}
            for column in columns:
                values = np.concatenate([batch[column] for batch in batches])
                assert values.tolist() == frame[column].tolist()
        assert cache_and_queues(in_memory, 9.0) == cache_and_queues(on_disk, 9.0)


def test_what_a_stretch_says_of_its_steps() -> None:
    """Two decodes of 40 tokens together; the second step opens a block."""
    teller = Teller(Recorder(), COST, quietly=True)
    teller.tell(Told(2, 40, 5, 0, (0, 1, 0), 3, 0.0))
    steps = teller.recorder.finish(teller.now_s).steps
    assert steps["step"].tolist() == [0, 1, 2]
    assert steps["start_s"].tolist()[0] == 0.5
    assert steps["start_s"].tolist()[1] == 0.5 + steps["latency_s"][0]
    assert steps["latency_s"][2] == pytest.approx(
        COST.base_s + 2 * COST.decode_s + 44 * COST.decode_context_token_s, rel=1e-12
    )
    assert steps["host_s"].tolist() == [COST.base_s] * 3
    assert steps["num_running"].tolist() == [2, 2, 2]
    assert steps["num_decodes"].tolist() == [2, 2, 2]
    assert steps["num_waiting"].tolist() == [5, 5, 5]
    assert steps["num_logical_tokens"].tolist() == [40, 42, 44]
    assert steps["num_physical_tokens"].tolist() == [-8, -6, -4]  # 3 blocks shared
    assert steps["num_physical_blocks"].tolist() == [30, 31, 31]
    assert steps["num_logical_blocks"].tolist() == [33, 34, 34]
    assert steps["kv_cache_usage"].tolist() == [30 / 997, 31 / 997, 31 / 997]
    assert not steps["num_prefills"].any()


def ended(request_id: int, num_output: int, status: RequestStatus) -> Request:
    """A request that waited 1 s and got a token every other second."""
    request = Request(
        request_id=request_id,
        arrival_s=10.0,
        num_prompt_tokens=20,
        tokens=[],
        max_num_tokens=100,
        oracle_num_tokens=100,
    )
    request.num_tokens += num_output
    request.first_scheduled_s = 11.0
    if num_output:
        request.first_token_s, request.finish_s = 13.0, 11.0 + 2 * num_output
        request.streaks = [(0, num_output - 1)]
    request.status = status
    return request


@pytest.mark.parametrize("chunk_rows", [1, 2, 100])
def test_rows_of_requests(monkeypatch: pytest.MonkeyPatch, chunk_rows: int) -> None:
    monkeypatch.setattr("sim.results.recording.requests._CHUNK_ROWS", chunk_rows)
    recorder = Recorder()
    requests = [
        ended(3, 5, RequestStatus.FINISHED_STOPPED),
        ended(1, 1, RequestStatus.FINISHED_LENGTH_CAPPED),
        ended(2, 0, RequestStatus.RUNNING),
        ended(0, 2, RequestStatus.FINISHED_ABORTED),
    ]
    requests[0].num_generated_tokens = 9
    requests[0].num_cached_tokens = 2**40
    requests[3].reason = "gone"
    for each in requests:
        recorder.arrived(each)
    Teller(recorder, COST, quietly=False).tell(Told(2, 40, 0, 0, (0,), 0, 0.0))
    recorder.finished(requests[:2])
    recorder.left(requests[3], 16.0)
    recording = recorder.finish(22.0)
    assert recording.occupancy_s == 4 * 3 + 3 * 3 + 2 * 5 + 1 * 1
    frame = recording.requests
    assert frame.dtypes.astype(str).to_dict() == schema.REQUESTS
    assert frame["request_id"].tolist() == [0, 1, 2, 3]
    assert frame["status"].tolist() == [
        "finished_aborted",
        "finished_length_capped",
        "running",
        "finished_stopped",
    ]
    assert frame["reason"].tolist() == ["gone", "", "", ""]
    assert frame["num_output_tokens"].tolist() == [2, 1, 0, 5]
    assert frame["num_generated_tokens"].tolist() == [2, 1, 0, 9]
    assert frame["num_cached_tokens"].tolist() == [0, 0, 0, 2**40]
    assert frame["queue_s"].tolist() == [1.0] * 4
    assert frame["ttft_s"].tolist()[1::2] == [3.0, 3.0]
    assert frame["e2el_s"].tolist()[1::2] == [3.0, 11.0]
    assert frame["tpot_s"][3] == 2.0
    assert math.isnan(frame["tpot_s"][1])
    assert math.isnan(frame["ttft_s"][2])
    # Only of served requests; a single token has no interval.
    assert recording.streaks.owner.tolist() == [3, 1]
    table = recording.request_table
    assert set(table) == set(schema.REQUESTS)
    assert table.counts("status")["running"] == 1
    assert table.is_one_of("reason", ("gone", "lost")).tolist() == [1, 0, 0, 0]
    assert table["status"].tolist() == frame["status"].tolist()


def test_a_run_that_is_stopped_early_has_rows_of_what_was_underway() -> None:
    run = Run([spec(0, 0.0, 20, 5), spec(1, 0.0, 20, 50)])

    def stop(engine: object) -> None:
        del engine
        run.engine.stop_requested = True

    run.engine.observe(7, stop)
    recording = run.go()
    assert recording.step_table.num_steps == len(recording.steps) == 7
    assert recording.steps["num_finished"].tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert recording.requests["status"].tolist() == ["finished_stopped", "running"]
    assert recording.requests["num_output_tokens"].tolist() == [5, 7]
    assert recording.itl.weights.sum() == 4


def test_nothing_happened() -> None:
    recording = Recorder().finish(3.0)
    for table in (recording.steps, recording.requests, recording.preemptions):
        assert len(table) == 0
    assert list(recording.steps) == list(schema.STEPS)
    assert cache_and_queues(recording, 3.0)["mean_step_ms"] is None
    assert recording.itl.moments[0] == 0


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_steps(tmp_path: Path) -> None:
    busy = Told(9, 500, 3, 100, (), 0, 0.0)
    num_rounds, num_quiet = 4000, 499
    quiet = Told(9, 500, 3, 0, (0,) * num_quiet, 0, 0.0)
    peaks = []
    with StepsFile(tmp_path / "steps.parquet") as file:
        teller = Teller(Recorder(file), COST, quietly=True)
        tracemalloc.start()
        for i in range(num_rounds):
            teller.tell(busy)
            ends_s = [teller.now_s + 1e-3 * (k + 1) for k in range(num_quiet)]
            teller.stretch(quiet, ends_s)
            if i in (num_rounds // 4, num_rounds - 1):
                peaks.append(tracemalloc.get_traced_memory()[1])
                assert pa.total_allocated_bytes() < 30e6
        recording = teller.recorder.finish(teller.now_s)
        assert recording.itl.moments[0] == 0
        tracemalloc.stop()
    assert recording.step_table.num_steps == 2_000_000
    assert max(peaks) < 60e6
    assert peaks[1] < peaks[0] + 2e6
