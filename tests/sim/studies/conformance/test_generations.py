"""Steps of small workloads in every generation, worked out by hand."""

from __future__ import annotations

import pytest

from tests.sim.studies.conformance.decision_files import (
    CONFIGS,
    column,
    decide,
    request,
    workload,
)


def test_cacheflow_swaps_out_and_in() -> None:
    """b swaps itself out when a has taken the last block, and back when a is done."""
    lines = decide(
        workload(
            "0.1.0", [request("a", 7, 6), request("b", 8, 3)], preemption_mode="swap"
        )
    )
    assert lines[0] == {
        "t": 0,
        "sched": [["a", 7, "p"], ["b", 8, "p"]],
        "nbt": 15,
        "bt": {"0": [0, [5, 4]], "1": [0, [3, 2]]},
        "waiting": [],
        "running": ["a", "b"],
        "swapped": [],
        "free": [2, 6],
        "free_end": [2, 6],
    }
    assert lines[2]["preempt"] == [["b", "swap"]]
    assert lines[2]["swap_out"] == [[3, 5], [2, 4], [1, 3]]
    assert lines[2]["bt"] == {"0": [2, [0]]}
    assert (lines[2]["free"], lines[2]["swapped"]) == ([3, 3], ["b"])
    # Freed by a in table order: 5, 4, 0. The last one is the next one.
    assert lines[6]["swap_in"] == [[5, 0], [4, 4], [3, 5]]
    assert lines[6]["bt"] == {"1": [0, [0, 4, 5]]}
    assert column(lines, "fin") == [None] * 5 + [["a"], ["b"]]
    assert lines[6]["free_end"] == [6, 6]


def test_cacheflow_copies_on_write_and_stalls() -> None:
    """Two samples part in their first block; a prompt of 8 blocks never fits 6."""
    lines = decide(workload("0.1.0", [request("a", 3, 3, n=2), request("b", 30, 1)]))
    assert lines[0]["bt"] == {"0": [0, [5]], "1": [0, [5]]}
    assert lines[1]["copy"] == [[5, 4]]
    assert lines[1]["bt"] == {"0": [0, [4]]}
    assert lines[2]["bt"] == {"0": [1, [3]], "1": [1, [2]]}
    assert column(lines, "fin") == [None, None, ["a"], None]
    assert column(lines, "stalled") == [None, None, None, True]
    assert lines[3]["waiting"] == ["b"]
    assert lines[3]["sched"] == []


def test_v0_2_forks_aborts_and_ignores() -> None:
    """The child of a takes number 2 and keeps the shared block, a copies it."""
    lines = decide(
        workload(
            "0.2.7",
            [
                request("a", 3, 3, n=2),
                request("c", 5, 9, abort_step=2),
                request("b", 30, 1, arrival_step=2),
            ],
        )
    )
    assert column(lines, "kind") == ["prompt", "decode", "prompt", "decode"]
    assert lines[0]["nbt"] == 10  # two prompts, padded to 5
    assert lines[1]["sched"] == [["a", 2], ["c", 1]]
    assert lines[1]["copy"] == [[5, 2]]
    assert lines[1]["bt"] == {"0": [0, [2]], "2": [0, [5]]}
    assert lines[2]["abort"] == ["c"]
    assert lines[2]["ignored"] == ["b"]
    assert lines[2]["sched"] == []
    assert lines[2]["free"] == [4, 6]
    assert lines[3]["bt"] == {"0": [1, [3]], "2": [1, [4]]}
    assert lines[3]["fin"] == ["a"]


def test_v0_ignores_and_decodes_in_one_call() -> None:
    """Blocks go out in ascending order; a child keeps the shared block."""
    lines = decide(workload("0.7.3", [request("a", 3, 3, n=2), request("b", 30, 1)]))
    assert lines[0]["ignored"] == ["b"]
    assert lines[0]["sched"] == [["a", 3, "p", 0]]
    assert lines[1]["copy"] == [[0, 1]]
    assert lines[1]["bt"] == {"0": [0, [1]], "2": [0, [0]]}
    assert lines[2]["bt"] == {"0": [1, [2]], "2": [1, [3]]}
    assert lines[2]["fin"] == ["a"]


def test_v0_prefills_in_chunks() -> None:
    """6 tokens in chunks of 4; the blocks of the whole prompt with the first."""
    lines = decide(
        workload(
            "0.7.3",
            [request("a", 6, 2), request("b", 5, 2)],
            chunked_prefill=True,
            max_num_batched_tokens=4,
        )
    )
    assert lines[0]["sched"] == [["a", 4, "p", 0]]
    assert lines[0]["bt"] == {"0": [0, [0, 1]]}
    assert lines[1]["sched"] == [["b", 2, "p", 0], ["a", 2, "p", 4]]
    assert column(lines, "nbt")[:2] == [4, 4]


def test_v1_preempts_and_hits_its_own_blocks() -> None:
    """5 blocks: b gives up its two for a's next slot, and finds them again."""
    lines = decide(workload("0.11.2", [request("a", 11, 3), request("b", 8, 3)]))
    assert lines[0]["bt"] == {"a": [0, [1, 2, 3]], "b": [0, [4, 5]]}
    assert lines[0]["hashes"] == 4
    assert lines[1]["sched"] == [["a", 1, "r", 11]]
    assert lines[1]["preempt"] == [["b", "recompute"]]
    assert lines[1]["free"] == [2]
    # a's third block is full and hashed, and its next slot takes b's last block.
    assert lines[2]["sched"] == [["a", 1, "r", 12]]
    assert lines[2]["bt"] == {"a": [3, [5]]}
    assert lines[2]["fin"] == ["a"]
    assert lines[3]["sched"] == [["b", 5, "c", 4]]
    assert lines[3]["cached"] == {"b": 4}


@pytest.mark.parametrize("release", ["0.11.2", "0.33.0"])
def test_v1_stalls_where_a_prompt_outgrows_the_pool(release: str) -> None:
    """Chunks of 8 of 30 tokens, 20 slots: admitted, then out, then never again."""
    lines = decide(workload(release, [request("a", 30, 2)], max_num_batched_tokens=8))
    assert column(lines, "stalled") == [None, None, None, True]
    assert [line["sched"] for line in lines[:2]] == [
        [["a", 8, "n", 0]],
        [["a", 8, "r", 8]],
    ]
    assert lines[-1]["waiting"] == ["a"]


@pytest.mark.parametrize("release", ["0.1.0", "0.2.7", "0.7.3"])
def test_the_end_for_lack_of_cpu_space(release: str) -> None:
    lines = decide(
        workload(
            release,
            [request("a", 7, 9), request("b", 12, 9)],
            preemption_mode="swap",
            num_cpu_blocks=1,
        )
    )
    assert set(lines[-1]) == {"t", "error", "preempt"}
    assert lines[-1]["error"] == "swap_oom"
    assert lines[-1]["preempt"] == []
    assert all("error" not in line for line in lines[:-1])


@pytest.mark.parametrize(
    ("release", "num_swaps"), [("0.1.0", 1), ("0.2.7", 1), ("0.7.3", 2)]
)
def test_what_is_swapped_out_of_a_full_pool(release: str, num_swaps: int) -> None:
    """A decode of the two older ones wants a free block beside the 4 it fills.

    So does their swap-in, and the group stays out for good. 0.7.3 asks for no more
    than it needs, lets it back for the 16th token, and gives it up at the 17th. To
    recompute, all can do without: up to the 17th token, too long for the pool, which
    0.1.0 lets wait for good.
    """
    one = [request("a", 15, 9)]
    lines = decide(workload(release, one, num_gpu_blocks=4, preemption_mode="swap"))
    assert column(lines, "preempt").count([["a", "swap"]]) == num_swaps
    if num_swaps == 1:
        assert column(lines, "stalled") == [None] * (len(lines) - 1) + [True]
        assert lines[-1]["swapped"] == ["a"]
        assert lines[-1]["sched"] == []
    else:
        assert lines[-1]["ignored"] == ["a"]
        assert column(lines, "stalled") == [None] * len(lines)
    again = decide(
        workload(release, one, num_gpu_blocks=4, preemption_mode="recompute")
    )
    assert column(again, "ignored")[-1] == (None if release == "0.1.0" else ["a"])
    assert column(again, "stalled")[-1] == (True if release == "0.1.0" else None)


@pytest.mark.parametrize(
    ("release", "num_steps"), [("0.1.0", 2), ("0.2.7", 4), ("0.7.3", 4)]
)
def test_branches_end_at_lengths_of_their_own(release: str, num_steps: int) -> None:
    """One token and four; in 0.1.0 no branch outlives the request's two."""
    lines = decide(
        workload(release, [request("a", 3, 2, n=2, branch_output_lens=[1, 4])])
    )
    assert column(lines, "fin") == [None] * (num_steps - 1) + [["a"]]
    assert column(lines, "nbt") == [3] + [1] * (num_steps - 1)


# -- arrivals and aborts, the same in all ------------------------------------------

ALL = pytest.mark.parametrize("release", CONFIGS)


@ALL
def test_gaps_are_jumped_over(release: str) -> None:
    requests = [
        request("a", 1, 1, arrival_step=5),
        request("b", 1, 2, arrival_step=1000),
    ]
    lines = decide(workload(release, requests))
    assert column(lines, "t") == [5, 1000, 1001]
    assert column(lines, "fin") == [["a"], None, ["b"]]


@ALL
def test_aborts_come_after_arrivals_and_in_order(release: str) -> None:
    """z is due first; the others by id as text. None is aborted twice."""
    requests = [
        request("k", 1, 9),
        request("r2", 1, 9, abort_step=3),
        request("done", 1, 1, abort_step=3),
        request("never", 1, 1, arrival_step=3, abort_step=3),
        request("r10", 1, 9, arrival_step=3, abort_step=3),
        request("z", 1, 9, arrival_step=3, abort_step=1),
    ]
    lines = decide(workload(release, requests))
    assert [line["abort"] for line in lines if "abort" in line] == [
        ["z", "never", "r10", "r2"]
    ]
    assert next(line["t"] for line in lines if "abort" in line) == 3
    assert [name for line in lines for name in line.get("fin", [])] == ["done", "k"]


@ALL
def test_a_step_with_nobody_left_has_no_line(release: str) -> None:
    requests = [
        request("a", 1, 9, abort_step=2),
        request("b", 1, 1, arrival_step=2, abort_step=2),
        request("c", 1, 1, arrival_step=9),
    ]
    lines = decide(workload(release, requests))
    assert column(lines, "t") == [0, 1, 9]
    assert "abort" not in lines[2]
    assert lines[2]["fin"] == ["c"]


@ALL
def test_a_stall_waits_for_aborts(release: str) -> None:
    """A request that is too big blocks, or is ignored, until its client gives up."""
    requests = [request("big", 50, 1, abort_step=3), request("b", 1, 1)]
    lines = decide(workload(release, requests))
    assert column(lines, "stalled") == [None] * len(lines)
    assert [name for line in lines for name in line.get("fin", [])] == ["b"]
    assert decide(workload(release, [])) == []
