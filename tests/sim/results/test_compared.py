"""Which of several runs is better, in a sentence."""

from __future__ import annotations

from typing import Any

from sim.results.summary.compared import compared_lines

KEYS = ("p95_ttft_ms", "p95_tpot_ms", "p95_e2el_ms", "output_throughput")


def told(
    *numbers: tuple[float, float, float, float], holds: tuple[bool, ...] = ()
) -> list[str]:
    summaries: list[dict[str, Any]] = [
        dict(zip(KEYS, each, strict=True)) for each in numbers
    ]
    for summary, hold in zip(summaries, holds, strict=False):
        summary["verdict"] = {"holds": hold}
    configs = [{"engine": {"max_num_seqs": 64 * 2**i}} for i in range(len(numbers))]
    return list(compared_lines("abc"[: len(numbers)], configs, summaries))


def test_what_is_nowhere_worse_is_better() -> None:
    assert told((200, 20, 4000, 1000), (100, 20.1, 3000, 1005)) == [
        "b is better: p95 TTFT 100 ms against 200; p95 E2E 3,000 ms against 4,000.",
        "They differ in max_num_seqs (64, 128).",
    ]


def test_what_is_better_here_and_worse_there_is_said() -> None:
    answer, _ = told((200, 20, 3000, 1000), (100, 30, 3000, 1000))
    assert answer == (
        "None is better in all: b has the least p95 TTFT (100 ms against 200); "
        "a has the least p95 TPOT (20 ms against 30)."
    )
    answer, _ = told((200, 20, 3000, 1000), (200.5, 20, 3001, 1000))
    assert answer == "None is better: latencies at p95 and throughput are within 1 %."


def test_runs_that_are_alike_share_what_they_are_best_in() -> None:
    answer, _ = told((213, 25, 9, 3491), (252, 22, 9, 3495), (400, 30, 9, 2967))
    assert answer == (
        "None is better in all: a has the least p95 TTFT (213 ms against 252 and 400); "
        "b has the least p95 TPOT (22 ms against 25 and 30); "
        "a and b have the most output tokens/s (3,491 and 3,495 against 2,967)."
    )
    answer, _ = told((583.6, 15, 9, 100), (582.6, 18, 9, 100), (629, 19, 9, 100))
    assert answer == (
        "a is better: p95 TTFT 583.6 ms (within 1 %: 582.6) against 629; "
        "p95 TPOT 15 ms against 18 and 19."
    )
    # two runs of the same, and one that is worse here and better there
    same, other = (100.0, 20.0, 3000.0, 1000.0), (200.0, 10.0, 3000.0, 1000.0)
    answer, _ = told(same, same, other)
    assert answer == (
        "None is better in all: a and b have the least p95 TTFT (100 ms against 200); "
        "c has the least p95 TPOT (10 ms against 20)."
    )
    answer, _ = told(same, same, (200.0, 20.0, 3000.0, 1000.0))
    assert answer == "a and b are better: p95 TTFT 100 ms against 200."


def test_objectives_come_first() -> None:
    fast, slow = (100.0, 20.0, 3000.0, 1000.0), (300.0, 40.0, 5000.0, 1500.0)
    answer, _ = told(fast, slow, holds=(False, True))
    assert answer == "b keeps its objectives; the other does not."
    answer, _ = told(slow, fast, slow, holds=(True, True, False))
    assert answer.startswith("a and b keep their objectives; the other does not. None")
    answer, _ = told(slow, fast, slow, holds=(False, False, False))
    assert answer.startswith("None is better in all: b has the least p95 TTFT")


def test_runs_without_numbers_or_differences() -> None:
    answer, differences = compared_lines("ab", [{}, {}], [{}, {}])
    assert answer.startswith("None is better")
    assert differences == "Their configurations are the same."


def test_pools_are_told_apart_by_their_keys() -> None:
    configs = [
        {
            "fleet": {
                "pools": [{"name": "p", "replicas": n}, {"name": "d", "replicas": m}]
            }
        }
        for n, m in ((2, 2), (1, 3))
    ]
    _, differences = compared_lines("ab", configs, [{}, {}])
    assert differences == "They differ in p.replicas (2, 1) and d.replicas (2, 3)."
    fewer = [{"fleet": {"pools": each["fleet"]["pools"][:1]}} for each in configs]
    _, differences = compared_lines("ab", [configs[0], fewer[0]], [{}, {}])
    assert differences == "They differ in d.name (d, null) and replicas (2, null)."
