"""Columns are in every way the list of their elements."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import RequestSpec, TraceWorkload, WorkloadError
from workloads.requests.columns import RequestColumns, SpecIterator
from workloads.transforms.sampling import SampledWorkload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

lengths = st.integers(1, 10**9)
rows = st.lists(
    st.tuples(st.floats(0, 1e9), lengths, lengths), min_size=0, max_size=12
).map(sorted)
drawn = st.lists(st.integers(1, 4), min_size=12, max_size=12)


def columns_of(rows: list[tuple[float, int, int]], **more: Any) -> RequestColumns:
    times_s, prompts, outputs = zip(*rows, strict=True) if rows else ((), (), ())
    return RequestColumns(
        np.array(times_s, np.float64),
        np.array(prompts, np.int64),
        np.array(outputs, np.int64),
        **more,
    )


def list_of(rows: list[tuple[float, int, int]]) -> list[RequestSpec]:
    return [
        RequestSpec(i, time_s, ((2 * i, prompt),), output, 2 * i + 1)
        for i, (time_s, prompt, output) in enumerate(rows)
    ]


def test_literal() -> None:
    columns = columns_of(
        [(0.0, 5, 6), (1.5, 7, 8)],
        first_request_id=3,
        first_text=10,
        max_tokens=9,
        priority=-1,
        best_of=np.array([1, 2]),
        beam_width=np.array([4, 1]),
        beam_switch_share=np.array([0.5, 0.0]),
    )
    assert columns == [
        RequestSpec(3, 0.0, ((20, 5),), 6, 21, 9, -1, 1, 4, 0.5),
        RequestSpec(4, 1.5, ((22, 7),), 8, 23, 9, -1, 2, 1, 0.0),
    ]
    assert repr(columns[:1]) == f"RequestColumns(<1 requests: {columns[0]!r}>)"


@given(rows)
def test_a_sequence_like_the_list(rows: list[tuple[float, int, int]]) -> None:
    columns, listed = columns_of(rows), list_of(rows)
    assert list(columns) == listed
    assert list(columns) == listed  # not spent
    assert [*reversed(columns)] == listed[::-1]
    assert len(columns) == len(listed)
    assert bool(columns) == bool(listed)
    assert [columns[i] for i in range(-len(rows), len(rows))] == listed * 2
    assert columns == listed
    assert listed == columns
    assert columns == columns_of(rows)
    assert columns == tuple(listed)
    assert columns != [*listed, None]
    assert columns != rows or not rows
    assert all(spec in columns for spec in listed)
    for beyond in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            columns[beyond]


@given(rows, st.slices(12))
def test_slices(rows: list[tuple[float, int, int]], part: slice) -> None:
    assert columns_of(rows)[part] == list_of(rows)[part]


@given(rows, st.slices(12), drawn)
def test_slices_of_slices_keep_what_was_drawn(
    rows: list[tuple[float, int, int]], part: slice, best_of: list[int]
) -> None:
    array = np.array(best_of[: len(rows)], np.int64)
    columns = columns_of(rows, best_of=array)
    listed = [
        spec._replace(best_of=n)
        for spec, n in zip(list_of(rows), best_of, strict=False)
    ]
    assert columns[1:][part] == listed[1:][part]


def test_elements_are_of_pythons_own_types() -> None:
    columns = columns_of(
        [(0.0, 5, 6)],
        best_of=np.array([2]),
        beam_switch_share=np.array([0.5]),
        slo_class=np.array(["batch"]),
        ends_at_stop=np.array([False]),
    )
    for spec in (columns[0], next(iter(columns))):
        assert [type(value) for value in (*spec[:2], *spec[3:9])] == (
            [int, float, int, int, type(None), int, int, int]
        )
        assert [type(value) for value in spec[9:]] == (
            [float, str, type(None), type(None), float, bool, tuple]
        )
        assert type(spec.prompt) is tuple
        assert [type(value) for value in spec.prompt[0]] == [int, int]


@pytest.mark.parametrize("num_requests", [4095, 4096, 4097, 8193])
def test_more_than_is_made_at_once(num_requests: int) -> None:
    rows = [(float(i), 1 + i % 7, 1 + i % 5) for i in range(num_requests)]
    assert columns_of(rows) == list_of(rows)


def test_neither_hashed_nor_written() -> None:
    columns = columns_of([(0.0, 5, 6)])
    with pytest.raises(TypeError, match="unhashable"):
        hash(columns)
    with pytest.raises(ValueError, match="read-only"):
        columns.arrival_s[0] = 1.0
    with pytest.raises(AttributeError):
        columns.first_text = 5  # type: ignore[misc]


def test_pickled() -> None:
    columns = columns_of([(0.0, 5, 6), (1.0, 7, 8)], best_of=np.array([1, 2]))
    assert pickle.loads(pickle.dumps(columns)) == columns


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([(1.0, 1, 1), (0.5, 1, 1)], "finite arrivals from 0 that never fall"),
        ([(-1.0, 1, 1)], "finite arrivals"),
        ([(math.nan, 1, 1)], "finite arrivals"),
        ([(0.0, 1, 1), (math.nan, 1, 1), (1.0, 1, 1)], "finite arrivals"),
        ([(0.0, 1, 1), (math.inf, 1, 1)], "finite arrivals"),
        ([(0.0, 0, 1)], "num_prompt_tokens from 0 to 0; mend"),
        ([(0.0, 1, 5), (0.0, 1, -1)], "num_output_tokens from -1 to 5; mend"),
        ([(0.0, 1, 2 * 10**9)], "lengths from 1 to 1000000000; got num_output"),
    ],
)
def test_what_no_workload_may_hold(
    rows: list[tuple[float, int, int]], rule: str
) -> None:
    with pytest.raises(WorkloadError, match=f"^columns of requests must .*{rule}"):
        columns_of(rows)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1)])
def test_columns_of_several_lengths(shape: tuple[int, ...]) -> None:
    with pytest.raises(WorkloadError, match=r"one shape \(n,\); got \["):
        columns_of([(0.0, 1, 1), (1.0, 1, 1)], priority=np.zeros(shape, np.int64))


def test_the_iterator_says_of_what() -> None:
    columns = columns_of([(0.0, 5, 6), (1.0, 7, 8), (2.0, 9, 9)])
    iterator = SpecIterator(columns)
    assert iterator.columns is columns
    assert next(iterator) == columns[0]
    assert list(iterator) == columns[1:]
    assert next(iterator, None) is None


class Reader:
    """A trace, as columns or one by one."""

    def __init__(self, columns: RequestColumns, by_columns: bool) -> None:
        self.columns = columns
        self.by_columns = by_columns

    def read(self) -> Iterator[RequestSpec]:
        return SpecIterator(self.columns) if self.by_columns else iter([*self.columns])


def outcome(workload: TraceWorkload | SampledWorkload) -> list[Any] | str:
    try:
        return list(workload.requests())
    except WorkloadError as error:
        return str(error)


windows = st.none() | st.tuples(
    st.floats(0, 1e9), st.none() | st.floats(1e-3, 1e9)
).map(lambda w: (w[0], w[1] and w[0] + w[1]))


@pytest.mark.filterwarnings("ignore:.*count from an epoch")
@given(rows, windows, st.none() | st.integers(1, 13), st.floats(1e-3, 1e3) | lengths)
def test_a_part_of_columns_is_that_of_the_list(
    rows: list[tuple[float, int, int]],
    window: tuple[float, float | None] | None,
    limit: int | None,
    rate_scale: float,
) -> None:
    by_columns, one_by_one = (
        TraceWorkload(Reader(columns_of(rows), how), rate_scale, window, limit)
        for how in (True, False)
    )
    assert outcome(by_columns) == outcome(one_by_one)


def test_columns_stay_columns() -> None:
    rows = [(float(i), 5, 6) for i in range(9)]
    trace = TraceWorkload(Reader(columns_of(rows), True), 2.0, (2, 8), 4)
    requests = trace.requests()
    assert isinstance(requests, RequestColumns)
    assert requests.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert [requests.first_request_id, requests.first_text] == [0, 2]
    sampled = SampledWorkload(trace, best_of={1: 0.5, 2: 0.5}, max_tokens=3).requests()
    assert isinstance(sampled, RequestColumns)


def test_readers_built_upon_ours_are_heard() -> None:
    class Short(Reader):
        def read(self) -> Iterator[RequestSpec]:
            return (spec for spec in super().read() if spec.num_output_tokens < 6)

    requests = TraceWorkload(
        Short(columns_of([(0.0, 5, 5), (1.0, 5, 6)]), True)
    ).requests()
    assert [spec.num_output_tokens for spec in requests] == [5]


class Listed:
    """A workload of a list."""

    def __init__(self, requests: Sequence[RequestSpec]) -> None:
        self.listed = requests

    def requests(self) -> Sequence[RequestSpec]:
        return self.listed


shares = st.sampled_from([1, 3, {1: 1.0}, {2: 0.5, 1: 0.5}, {4: 0.2, 1: 0.3, 8: 0.5}])
limits = st.none() | lengths


asked = st.fixed_dictionaries(
    {
        "best_of": shares,
        "beam_width": shares,
        "priority": shares,
        "max_tokens": limits,
        "seed": st.integers(0, 99),
    }
)


@given(rows, limits, asked)
def test_what_is_drawn_for_columns_is_what_is_drawn_for_the_list(
    rows: list[tuple[float, int, int]], own_max_tokens: int | None, asked: Any
) -> None:
    columns = columns_of(rows, max_tokens=own_max_tokens)
    by_columns, one_by_one = (
        SampledWorkload(Listed(source), **asked) for source in (columns, [*columns])
    )
    assert outcome(by_columns) == outcome(one_by_one)
