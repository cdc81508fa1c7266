"""Rules of 0.2.7 and 0.1.0 that no recorded log shows, in small workloads."""

from __future__ import annotations

from tests.sim.studies.conformance.decision_files import (
    column,
    decide,
    request,
    workload,
)


def test_v0_2_forks_count_every_entry_of_a_table_that_goes_round() -> None:
    """A fork counts an entry each; 0.2.7 then ends in a double free, this does not."""
    lines = decide(
        workload(
            "0.2.7",
            [request("a", 9, 2, n=3)],
            num_gpu_blocks=8,
            sliding_window=8,
        )
    )
    assert lines[0]["bt"] == {"0": [0, [7, 6, 7]]}
    # 1 + 2 + 2 references, so the third sequence copies as well.
    assert lines[1]["copy"] == [[7, 5], [7, 4], [7, 3]]
    assert lines[1]["bt"] == {
        "0": [2, [5]],
        "1": [0, [7, 6, 4]],
        "2": [0, [7, 6, 3]],
    }
    assert lines[1]["free_end"] == [8, 6]


def test_v0_2_loses_what_a_fork_counted_too_often() -> None:
    """Four entries name one block, which counts five and is given up four times."""
    lines = decide(
        workload(
            "0.2.7",
            [request("a", 13, 2, n=2)],
            num_gpu_blocks=8,
            sliding_window=4,
        )
    )
    assert lines[0]["bt"] == {"0": [0, [7, 7, 7, 7]]}
    assert lines[1]["copy"] == [[7, 6], [7, 5]]
    assert lines[1]["bt"] == {"0": [3, [6]], "1": [0, [7, 7, 7, 5]]}
    # 7 counted 1 + 4, and lost two to the copies and two with the tables.
    assert column(lines, "free_end") == [[7, 6], [7, 6]]
