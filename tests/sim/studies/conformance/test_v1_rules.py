"""Corner rules of the `v1` generation that no recorded log happens to touch.

The expected steps are those of the releases themselves, run on the same workloads.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.studies.conformance.decision_files import (
    column,
    decide,
    request,
    workload,
)

STUCK_AHEAD: list[Any] = [
    # Of a prompt as long as max_model_len, in chunks, the last token is never
    # computed: it stays in running, ahead of the others, and gets no token.
    request("stuck", 16, 1, priority=9, abort_step=12),
    request("b", 3, 6, arrival_step=2),
    request("c", 3, 6, arrival_step=2),
]


@pytest.mark.parametrize(
    ("release", "served_behind"),
    [("0.11.2", []), ("0.24.0", []), ("0.31.0", ["c"]), ("0.33.0", ["c"])],
)
def test_victim_ahead_that_got_no_token(release: str, served_behind: list[str]) -> None:
    # b needs a second block at step 4, and takes those of the one ahead. Up to 0.27
    # the position is not moved back for it, and c is passed over in that call.
    lines = decide(
        workload(
            release,
            STUCK_AHEAD,
            policy="priority",
            num_gpu_blocks=7,
            max_num_batched_tokens=8,
            max_model_len=16,
            enable_prefix_caching=False,
        )
    )
    (line,) = (line for line in lines if line["t"] == 4)
    assert line["preempt"] == [["stuck", "recompute"]]
    assert [entry[0] for entry in line["sched"]] == ["b", *served_behind]
    following = next(line for line in lines if line["t"] == 5)
    assert [entry[0] for entry in following["sched"]][:2] == ["b", "c"]


@pytest.mark.parametrize("release", ["0.11.2", "0.33.0"])
def test_tokens_beyond_max_model_len_complete_the_last_block(release: str) -> None:
    # The 11 positions take three blocks of 5. The last has one of them only, and yet
    # it is registered, since the prompt of 15 tokens would fill it.
    line = decide(
        workload(release, [request("a", 15, 1)], block_size=5, max_model_len=11)
    )[0]
    assert line["bt"] == {"a": [0, [1, 2, 3]]}
    assert line["hashes"] == 3


def test_prompt_within_max_model_len_registers_full_blocks_only() -> None:
    lines = decide(
        workload("0.11.2", [request("a", 9, 3)], block_size=5, max_model_len=11)
    )
    assert column(lines, "hashes") == [1, 2]


@pytest.mark.parametrize(
    ("release", "window", "reused"),
    [
        ("0.22.0", 7, [3]),
        ("0.23.0", 7, [1]),
        ("0.23.0", None, [3]),
        ("0.24.0", None, [1]),
    ],
)
def test_unhashed_blocks_go_first_behind_windows_in_0_23(
    release: str, window: int | None, reused: list[int]
) -> None:
    """The rule of 0.24 begins with the manager of sliding windows."""
    two = workload(
        "0.24.0",
        [request("a", 1, 1), request("b", 2, 2)],
        block_size=2,
        num_gpu_blocks=5,
        max_num_batched_tokens=16,
        max_model_len=8,
        sliding_window=window,
        enable_prefix_caching=False,
    )
    lines = decide(two | {"reference": f"vllm {release}"})
    assert lines[1]["bt"] == {"b": [1, reused]}


@pytest.mark.parametrize(
    ("release", "caching", "reused"),
    [
        ("0.26.0", False, [1]),
        ("0.27.0", False, [3]),
        ("0.27.0", True, [1]),
        ("0.28.0", False, [1]),
    ],
)
def test_without_prefix_caching_0_27_has_no_unhashed_blocks(
    release: str, caching: bool, reused: list[int]
) -> None:
    two = workload(
        "0.24.0",
        [request("a", 1, 1), request("b", 2, 2)],
        block_size=2,
        enable_prefix_caching=caching,
    )
    lines = decide(two | {"reference": f"vllm {release}"})
    assert lines[1]["bt"] == {"b": [1, reused]}
