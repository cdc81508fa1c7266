"""Rules of vLLM 0.7.3 that no recorded log tells apart."""

from __future__ import annotations

from tests.sim.decision_files import decide, request, workload


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
