"""Schedules as `kvsim calibrate replay` reads them, and files that it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from calibrate.replay.log import Schedule
from sim.errors import UserError
from tests.calibrate.replays import MODES, small_run, written
from tests.sim.commands import refused
from tests.sim.recordings import random_runs, record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(("generation", "keys", "samples"), MODES)
def test_the_steps_of_a_log_have_the_shapes_that_were_priced(
    generation: str, keys: dict[str, Any], samples: int, tmp_path: Path
) -> None:
    config = small_run(generation, keys, samples)
    steps = list(written(config, tmp_path).steps())
    results = record(config, stepwise=True).results
    assert results is not None
    table = results.steps.set_index("step")
    for step in steps:
        shape, row = step.shape, table.loc[step.number]
        assert shape.num_decodes == row["num_decodes"]
        assert (
            shape.num_decodes + shape.num_prefill_tokens == (row["num_batched_tokens"])
        )
        assert shape.num_swapped_in_blocks == row["num_swapped_in_blocks"]
        assert shape.num_swapped_out_blocks == row["num_swapped_out_blocks"]
        assert shape.num_copied_blocks == row["num_copied_blocks"]
        assert step.start_s == row["start_s"]
        for query in step.queries:
            assert len(query.table) * 4 >= query.context


def test_tables_of_random_runs_hold_every_context(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl.zst"
    num_steps = 0
    for seed in range(6):
        if not (recorded := random_runs(seed)[0].schedule):
            continue
        path.write_bytes(recorded)
        schedule = Schedule(path)
        for step in schedule.steps():
            num_steps += 1
            for query in step.queries:
                assert len(query.table) * schedule.facts.block_size >= query.context
    assert num_steps > 100


def test_what_is_no_schedule_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", "replay"]
    line = refused([*command, str(tmp_path / "none")], capsys, tmp_path)
    assert "record one with 'kvsim run CONFIG --record schedule'" in line
    log = tmp_path / "log.jsonl"
    log.write_text('{"t": 0}\n')
    assert "no recorded schedule" in refused([*command, str(log)], capsys, tmp_path)
    cut = json.dumps({"format": "kvsim-schedule", "version": 1})
    log.write_text(cut + "\n")
    assert "no scheduler in its header" in (
        refused([*command, str(log)], capsys, tmp_path)
    )


def test_a_schedule_of_groups_without_their_sequences_is_refused(
    tmp_path: Path,
) -> None:
    def older(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line.pop("seqs", None)

    schedule = written(small_run("v0", {}, 1), tmp_path, older)
    with pytest.raises(UserError, match="record it again"):
        list(schedule.steps())


def larger(key: str, by: int) -> Callable[[list[dict[str, Any]]], None]:
    """Spoil the first line that has a key: its block ids grow."""

    def spoil(lines: list[dict[str, Any]]) -> None:
        line = next(line for line in lines if line.get(key))
        if key == "bt":
            line[key] = {
                name: [keep, [each + by for each in ids]]
                for name, (keep, ids) in line[key].items()
            }
        else:
            line[key] = [[first + by, second + by] for first, second in line[key]]

    return spoil


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("bt", "of a GPU pool of 16"),
        ("swap_out", "of a GPU pool of 16"),
        ("swap_in", "of a CPU pool of"),
        ("copy", "of a GPU pool of 16"),
    ],
)
@pytest.mark.parametrize("by", [1 << 20, -(1 << 20)])
def test_blocks_outside_the_pools_are_refused(
    key: str, by: int, message: str, tmp_path: Path
) -> None:
    config = small_run("v0", {"preemption_mode": "swap"}, 2)
    schedule = written(config, tmp_path, larger(key, by))
    with pytest.raises(UserError, match="is no part of a schedule") as caught:
        list(schedule.steps())
    assert message in str(caught.value)


def test_contexts_that_no_table_or_model_holds_are_refused(tmp_path: Path) -> None:
    def longer(lines: list[dict[str, Any]]) -> None:
        lines[-1]["sched"][0][3] += 20

    def beyond(lines: list[dict[str, Any]]) -> None:
        lines[-1]["sched"][0][3] += 100

    config = small_run("v1", {}, 1)
    for spoil, message in ((longer, "blocks for a context"), (beyond, "at most 64")):
        with pytest.raises(UserError, match="record it again") as caught:
            list(written(config, tmp_path, spoil).steps())
        assert message in str(caught.value)


def test_the_log_of_a_hosted_vllm_is_read_as_that_of_v1(tmp_path: Path) -> None:
    ours = written(small_run("v1", {"enable_prefix_caching": True}, 1), tmp_path)
    header, *lines = ours.path.read_text().splitlines(keepends=True)
    hosted = json.dumps(json.loads(header) | {"scheduler": "vllm"})
    path = tmp_path / "hosted.jsonl"
    path.write_text("".join([hosted + "\n", *lines]))
    assert list(Schedule(path).steps()) == list(ours.steps())
