"""Columns of the workload, joined to the engine's table of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sim.results import schema
from sim.results.metrics import by_slo_class, sessions
from sim.results.recording.recorder import Recording
from sim.results.recording.traffic import Traffic
from sim.results.tables.memory import ResultTable
from tests.sim.build import spec
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    import pytest


def joined(specs: Any, parents: list[int], **columns: Any) -> ResultTable:
    """Join a table of the given parents; all else in it is made up."""
    kinds = {"parent_id": "int64"} | dict.fromkeys(columns, "float64")
    kinds["status"] = "str"
    table = {name: np.array(values) for name, values in columns.items()}
    arrow = {"parent_id": np.array(parents, np.int32)} | table
    codes = pa.array(arrow.pop("status", np.zeros(len(parents), np.int32)))
    texts = pa.array(["finished_stopped", "finished_rejected"])
    arrays = {name: pa.array(values) for name, values in arrow.items()}
    arrays["status"] = pa.DictionaryArray.from_arrays(codes, texts)
    requests = ResultTable(arrays, kinds)
    nothing: Any = None
    recording = Recording(nothing, requests, nothing, nothing, nothing, 0.0)
    return Traffic.of(specs).joined(recording).request_table


def test_rows_take_the_facts_of_their_parent() -> None:
    specs = [
        spec(0, 0.0, 5, 5, session_id=2**40, slo_class="a", priority=-3),
        spec(1, 0.0, 5, 5, slo_class="b"),
        spec(2, 0.0, 5, 5, session_id=2**40, previous_id=0, slo_class="a"),
        spec(3, 0.0, 5, 5, session_id=2**40, previous_id=2),
    ]
    table = joined(specs, [3, 0, 0, 1])
    assert list(table) == ["parent_id", "status", *schema.TRAFFIC]
    assert table["session_id"].tolist() == [2**40, 2**40, 2**40, -1]
    assert table["turn"].tolist() == [2, 0, 0, 0]
    assert table["priority"].tolist() == [0, -3, -3, 0]
    assert table["slo_class"].tolist() == ["", "a", "a", "b"]


def test_columns_are_joined_without_making_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = np.ones(3, dtype=np.int64)
    one = RequestColumns(np.arange(3.0), lengths, lengths, priority=4, slo_class="x")
    many = RequestColumns(
        np.arange(3.0),
        lengths,
        lengths,
        priority=np.array([7, 8, 9]),
        slo_class=np.array(["x", "y", "x"]),
    )
    expected = [joined(list(specs), [2, 0, 1]).arrow for specs in (one, many)]

    def made(*_: object) -> None:
        raise AssertionError("a request was made")

    monkeypatch.setattr(RequestColumns, "_specs", made)
    found = [joined(specs, [2, 0, 1]).arrow for specs in (one, many)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.to_pydict() == theirs.to_pydict()
    assert found[1]["priority"].to_pylist() == [9, 7, 8]
    assert found[1]["slo_class"].to_pylist() == ["x", "x", "y"]


def test_sessions_that_lack_a_turn_are_not_complete() -> None:
    specs = [
        spec(i, 0.0, 5, 5, session_id=session)
        for i, session in enumerate((5, 5, 9, 9, 12))
    ]
    # Of session 9 one turn was not sent; a sample of session 12 was rejected.
    table = joined(
        specs,
        [0, 1, 2, 4, 4],
        arrival_s=[1.0, 4.0, 2.0, 5.0, 5.0],
        finish_s=[3.0, 7.5, 2.5, 6.0, np.nan],
        status=np.array([0, 0, 0, 0, 1], np.int32),
    )
    planned = Traffic.of(specs).session_id
    assert sessions(table, planned) == {
        "num_sessions": 3,
        "num_started": 3,
        "num_completed": 1,
        "num_turns": 4,
        "mean_turns": 4 / 3,
        "mean_duration_s": 6.5,
        "max_duration_s": 6.5,
    }
    assert sessions(table, np.array([-1, -1])) == {}


def test_one_service_level_is_no_group() -> None:
    specs = [spec(0, 0.0, 5, 5, slo_class="a"), spec(1, 0.0, 5, 5, slo_class="a")]
    assert by_slo_class(joined(specs, [0, 1])) == {}
    nobody = [specs[0], specs[1]._replace(slo_class="")]
    latencies: dict[str, Any] = {
        f"{name}_s": [0.5, 1.0] for name in ("ttft", "tpot", "e2el")
    }
    found = by_slo_class(joined(nobody, [0, 1], **latencies))
    assert list(found) == ["none", "a"]
    assert found["a"]["mean_ttft_ms"] == 500.0
    assert found["none"]["p99_e2el_ms"] == 1000.0
    both = [specs[0]._replace(slo_class="none"), nobody[1]]
    found = by_slo_class(joined(both, [0, 1], **latencies))
    assert found["none"]["mean_ttft_ms"] == 500.0  # a name like any other
    assert found["(none)"]["mean_ttft_ms"] == 1000.0
