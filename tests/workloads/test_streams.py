from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import Streams, WorkloadError

PIN_A = [648148, 676994, 649751, 116615]
PIN_B = [722526, 806774, 737590, 416296]


def test_first_numbers_are_pinned() -> None:
    # These literals hold in every process and on every machine: runs depend on them.
    assert Streams(0).generator("arrivals").integers(10**6, size=4).tolist() == PIN_A
    assert Streams(7).generator("arrivals").integers(10**6, size=4).tolist() == PIN_B


def test_same_numbers_in_a_process_with_another_hash_seed() -> None:
    code = (
        "from workloads import Streams\n"
        "print(Streams(0).generator('arrivals').integers(10**6, size=4).tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{PIN_A}\n"}


@given(st.integers(0, 2**64 - 1), st.text(), st.text())
def test_a_stream_depends_on_seed_and_name_only(seed: int, one: str, two: str) -> None:
    streams = Streams(seed)
    first = streams.generator(one).random(3)
    streams.generator(two).random(100)
    assert (streams.generator(one).random(3) == first).all()
    if one != two:
        assert (streams.generator(two).random(3) != first).all()
    assert (Streams(seed ^ 1).generator(one).random(3) != first).all()


def test_streams_are_uncorrelated() -> None:
    streams = Streams(3)
    draws = [streams.generator(f"stream {i}").standard_normal(10_000) for i in range(4)]
    correlations = np.asarray(np.corrcoef(draws))[np.triu_indices(4, k=1)]
    assert np.abs(correlations).max() < 0.05


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "0", None, True])
def test_bad_seed(seed: object) -> None:
    with pytest.raises(WorkloadError, match=r"^seed must be .*; got .*; give"):
        Streams(seed)  # type: ignore[arg-type]
