"""Arrays that lie in files once they are long."""

from __future__ import annotations

import gc
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.requests import long_arrays
from workloads.requests.long_arrays import (
    ArrayFile,
    Collector,
    chosen,
    mapped,
    parts_of,
    spilled,
    taken,
)


def test_long_arrays_lie_in_files_that_go() -> None:
    short, long = np.arange(10), np.arange(long_arrays.SPILLED_BYTES // 8)
    assert spilled(short) is short
    gc.collect()  # what other tests left open
    before = _open_files()
    mapped = spilled(long)
    assert np.array_equal(mapped, long)
    assert not mapped.flags.owndata
    assert len(_open_files()) > len(before)
    del mapped
    gc.collect()
    assert _open_files() == before


def _open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))[:-1]


@given(
    chunks=st.lists(st.lists(st.integers(-9, 9), max_size=9), max_size=9),
    most_bytes=st.sampled_from([1, 64, 1 << 23]),
    rows=st.sampled_from([1, 2, 7]),
)
def test_parts_are_those_of_the_whole(
    chunks: list[list[int]], most_bytes: int, rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_arrays, "SPILLED_BYTES", most_bytes)
        patch.setattr(long_arrays, "PART_ROWS", rows)
        collector = Collector("int64")
        for chunk in chunks:
            collector.add(np.array(chunk, np.int64))
        kept = collector.kept()
        expected = [number for chunk in chunks for number in chunk]
        assert isinstance(kept, ArrayFile) == (8 * len(expected) >= most_bytes)
        whole = mapped(kept)
        assert whole.tolist() == expected
        assert spilled(whole).tolist() == expected
        assert chosen(whole, whole > 0).tolist() == [n for n in expected if n > 0]
        order = np.argsort(whole, kind="stable")
        assert mapped(taken(whole, order)).tolist() == sorted(expected)
        columns = {"a": kept, "b": whole * 2, "c": whole}
        told = [*parts_of(columns, ("b", "a"))]
        assert all([*part] == ["b", "a"] for part in told)
        assert np.concatenate([part["a"] for part in told]).tolist() == expected
        assert all((part["b"] == 2 * part["a"]).all() for part in told)


def test_a_file_is_pickled_as_what_it_holds() -> None:
    file = ArrayFile("int32")
    file.append(np.arange(5, dtype=np.int32))
    again = pickle.loads(pickle.dumps(file))
    file.append(np.arange(2, dtype=np.int32))
    assert again.mapped().tolist() == [0, 1, 2, 3, 4]
    assert again.dtype == np.int32
    assert (len(again), len(file)) == (5, 7)
