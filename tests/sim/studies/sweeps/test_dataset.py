"""The dataset: one table at any time, the same bytes in the end."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from sim.config.files import put
from sim.errors import OutputError
from sim.studies.sweeps.dataset import (
    RowMaker,
    RunDataset,
    flow,
    summary_of,
    text_keys,
    to_column,
)
from sim.studies.sweeps.job import Job, Outcome
from tests.shared import ROOT
from tests.sim.commands import files
from tests.sim.studies.sweeps.files import seeded_jobs, tiny
from workloads.plain import parse_yaml

if TYPE_CHECKING:
    from pathlib import Path

LEADERS = ["run", "seed", "status", "error"]


def rows() -> list[dict[str, Any]]:
    """Of runs that fail, and that have numbers which others have not."""
    made = []
    for run in range(60):
        failed = run % 7 == 3
        row: dict[str, Any] = {"run": run, "seed": run % 4, "status": "done"}
        row |= {"error": None, "config": f"a: {run}\n"}
        if failed:
            row |= {"status": "failed", "error": "ValueError: no"}
        else:
            row |= {"rate": run if run % 5 else run / 2, "path": None}
        if run == 41:
            row |= {"evictions": 3, "path": "fast"}
        made.append(row)
    return made


def dataset(directory: Path, every_s: float = 0.3) -> RunDataset:
    ticks = count()
    return RunDataset(directory, LEADERS, clock=lambda: every_s * next(ticks))


def test_the_bytes_do_not_depend_on_the_order_or_on_interruptions(
    tmp_path: Path,
) -> None:
    found = set()
    for seed in range(5):
        directory = tmp_path / str(seed)
        directory.mkdir()
        order = rows()
        random.Random(seed).shuffle(order)
        for part in (order[: 10 * seed], order[10 * seed :]):
            with dataset(directory) as parts:
                known = parts.finished()
                for row in part:
                    assert row["run"] not in known
                    parts.append(row)
            # Whatever came so far opens as one table, all columns of one type.
            table = pd.read_parquet(directory) if known or part else None
            assert table is None or len(table) == len(known) + len(part)
        assert len(list(directory.iterdir())) > 10
        with dataset(directory) as parts:
            assert parts.finished() == set(range(60))
            assert parts.counts() == {"done": 51, "failed": 9}
            parts.finish()
            assert parts.is_whole
        assert [path.name for path in directory.iterdir()] == ["runs.parquet"]
        found.add((directory / "runs.parquet").read_bytes())
    # Nor on whether there was time to write any file before the end.
    whole = tmp_path / "whole"
    whole.mkdir()
    with dataset(whole, every_s=0.0) as parts:
        for row in rows():
            parts.append(row)
        assert not list(whole.iterdir())
        parts.finish()
    found.add((whole / "runs.parquet").read_bytes())
    assert len(found) == 1
    table = pd.read_parquet(tmp_path / "0")
    assert list(table.columns) == [*LEADERS, "evictions", "path", "rate", "config"]
    assert table["run"].tolist() == list(range(60))
    assert table["rate"].dtype == float
    assert table["evictions"].dropna().tolist() == [3]
    for row, found_row in zip(rows(), table.to_dict("records"), strict=True):
        for key, value in row.items():
            assert found_row[key] == value or (
                value is None and pd.isna(found_row[key])
            )


def test_files_come_as_time_passes_not_with_every_row(tmp_path: Path) -> None:
    with dataset(tmp_path, every_s=0.01) as parts:
        for row in rows():
            parts.append(row)
        assert len(list(tmp_path.iterdir())) == 0
    assert len(list(tmp_path.iterdir())) == 1
    # The longer a sweep takes, the rarer they come: a hundredth of it is at risk.
    directory = tmp_path / "long"
    directory.mkdir()
    with dataset(directory, every_s=100.0) as parts:
        for row in [row | {"run": i} for i in range(20) for row in rows()[:20]]:
            parts.append(row)
    assert 100 < len(list(directory.iterdir())) < 250


def test_what_a_killed_process_leaves_is_put_right(tmp_path: Path) -> None:
    with dataset(tmp_path) as parts:
        for row in rows():
            parts.append(row)
    (tmp_path / ".part-000099.parquet.partial").write_bytes(b"PAR1 half")
    some = next(tmp_path.glob("part-*.parquet")).read_bytes()
    with dataset(tmp_path) as parts:
        assert parts.finished() == set(range(60))
        parts.finish()
    # Killed after the whole was there, before the parts were gone.
    (tmp_path / "part-000001.parquet").write_bytes(some)
    with dataset(tmp_path) as parts:
        assert sorted(files(tmp_path)) == ["runs.parquet"]
        assert sum(parts.counts().values()) == 60
        parts.finish()


def test_a_failure_while_writing_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = dataset(tmp_path)
    for row in rows()[:10]:
        parts.append(row)
    parts.flush()
    before = files(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    parts.append(rows()[10] | {"run": 10})
    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", full)
        with pytest.raises(OutputError, match=r"No space.*make room and go on"):
            parts.flush()
    after = {n: b for n, b in files(tmp_path).items() if not n.startswith(".")}
    assert after == before
    parts.flush()  # room was made
    assert parts.finished() == set(range(11))


def test_a_column_of_several_types_is_text(tmp_path: Path) -> None:
    for run, value in enumerate(["auto", 3, None, True, 2.5]):
        with dataset(tmp_path) as parts:
            parts.append({"run": run, "value": value})
    with dataset(tmp_path) as parts:
        parts.finish()
    found = pd.read_parquet(tmp_path)["value"].tolist()
    assert found[:2] == ["auto", "3"]
    assert pd.isna(found[2])
    assert [str(value) for value in found[3:]] == ["true", "2.5"]


def test_rows_hold_numbers_text_and_a_configuration_that_runs_again() -> None:
    config = tiny() | {"seed": 4}
    put(config, "workload.best_of", {1: 0.5, 2: 0.5})
    job = Job(5, {"seed": 4, "workload.best_of": {1: 0.5, 2: 0.5}}, config)
    maker = RowMaker(["workload.best_of", "seed", "engine.watermark"], (), repeats=3)
    summary = {"rate": 1.5, "large": 2**70, "cost": {"kind": "x"}, "none": None}
    row = maker.row(job, Outcome(5, "done", summary | {"run": "shadowed"}, None, 0.1))
    assert list(row)[: len(maker.leaders)] == maker.leaders
    assert yaml.safe_load(row.pop("config")) == config
    assert row == {
        "run": 5,
        "repeat": 2,
        "workload.best_of": '{"1": 0.5, "2": 0.5}',
        "engine.watermark": None,
        "seed": 4,
        "status": "done",
        "error": None,
        "rate": 1.5,
        "large": 2.0**70,
        "cost": '{"kind": "x"}',
        "none": None,
    }


def test_configurations_are_yaml_and_json() -> None:
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        data = yaml.safe_load(path.read_text())
        assert parse_yaml(flow(data), "row") == data
    odd = {"a": [1e-05, 1e300, 0.5, -2, None, True, "yes", "1e5", "ü: {", "x\ny", "😀"]}
    assert parse_yaml(flow(odd), "row") == odd == json.loads(flow(odd))
    shares = {"best_of": {1: 0.9, 4: 0.1}, "list": [{"a": []}, {}]}
    assert parse_yaml(flow(shares), "row") == shares
    for key in (1, 0.5, -2, True, None, "1", "true", "a-1", "x: y"):
        assert parse_yaml(flow({"table": {key: (1, 2)}}), "row") == {
            "table": {key: [1, 2]}
        }


def test_columns_are_what_their_values_are() -> None:
    for values, kind in (
        ([1, None, -(2**62)], "int64"),
        ([1, 0.5, None], "double"),
        ([True, None, False] * 5, "bool"),
        (["a", None, "", "ü"], "string"),
        ([None, None], "null"),
        ([0.5], "double"),
    ):
        column = to_column(values)
        column.validate(full=True)
        assert str(column.type) == kind
        assert column.to_pylist() == values
    assert to_column([1, "a", True, None]).to_pylist() == ["1", "a", "true", None]


def test_keys_of_mixed_values_are_json_and_others_are_not() -> None:
    jobs = seeded_jobs(3)
    values: list[Any] = [1, 2.5, None]
    mixed = [{"kind": "v1"}, "v0", "v1"]
    for job, number, kind in zip(jobs, values, mixed, strict=True):
        assert isinstance(job.config, dict)
        put(job.config, "engine.watermark", number)
        put(job.config, "engine.scheduler", kind)
    keys = ["engine.watermark", "engine.scheduler", "seed"]
    found = text_keys(jobs, keys)
    assert found == {"engine.scheduler"}
    maker = RowMaker(keys, found)
    made = [maker.row(job, Outcome(job.index, "done", {}, None, 0.0)) for job in jobs]
    assert [row["engine.scheduler"] for row in made] == [
        '{"kind": "v1"}',
        '"v0"',
        '"v1"',
    ]
    assert [row["engine.watermark"] for row in made] == values


def test_a_traceback_is_told_in_its_last_line() -> None:
    error = 'Traceback (most recent call last):\n  File "x.py"\nValueError: no'
    row = {"run": 3, "status": "failed", "error": error}
    assert summary_of(row) == "run 3 failed: ValueError: no"
