"""Rules of vLLM 0.7.3 that no recorded log tells apart."""

from __future__ import annotations

from tests.sim.studies.conformance.decision_files import decide, request, workload


def test_refused_prompts_are_named_before_groups_that_cannot_return() -> None:
    """Chunked: `samples` is given up first in the call, but listed last.

    Swapped out, its 3 tables are 5 blocks each, more than the pool of 12; `long` is a
    chunk beyond max_model_len.
    """
    lines = decide(
        workload(
            "0.7.3",
            [
                request("a", 8, 20),
                request("samples", 18, 12, n=3),
                request("long", 40, 4, arrival_step=3),
            ],
            num_gpu_blocks=12,
            num_cpu_blocks=40,
            max_model_len=32,
            chunked_prefill=True,
        ),
        check=False,
    )
    preempted = [line["preempt"] for line in lines if "preempt" in line]
    assert preempted == [[["samples", "swap"]]]
    ignored = {line["t"]: line["ignored"] for line in lines if "ignored" in line}
    assert ignored == {3: ["long", "samples"]}


def test_eviction_asks_for_the_blocks_of_the_window_only() -> None:
    """Priority: victims make room for the window of `urgent`, not for its prompt.

    A window of 4 tokens counts for 3 of its 6 blocks, so b is left alone. When all six
    are to be placed, a has ended.
    """
    lines = decide(
        workload(
            "0.7.3",
            [
                request("a", 8, 4, priority=1),
                request("b", 8, 6, priority=2),
                request("c", 8, 6, priority=2),
                request("d", 8, 6, priority=2),
                request("urgent", 24, 2, arrival_step=1),
            ],
            num_gpu_blocks=9,
            policy="priority",
            sliding_window=4,
        )
    )
    preempted = [line.get("preempt") for line in lines[:4]]
    assert preempted == [
        None,
        [["d", "recompute"], ["c", "recompute"]],
        None,
        [["b", "recompute"]],
    ]


def test_a_prompt_waits_for_all_of_its_blocks_and_not_for_a_window_of_them() -> None:
    """The window of 4 tokens counts for 3 blocks of 5 that are free; b takes 6."""
    lines = decide(
        workload(
            "0.7.3",
            [request("a", 16, 6), request("b", 24, 2, arrival_step=1)],
            num_gpu_blocks=9,
            sliding_window=4,
        )
    )
    assert [line["waiting"] for line in lines] == [[], *[["b"]] * 5, [], []]
