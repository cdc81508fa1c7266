"""Small cases at the edges of the fast path, each with what must come out of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import parse_config
from tests.identity.compare import Comparison, assert_equal_paths
from tests.identity.random_configs import LISTED_TRACE

if TYPE_CHECKING:
    import pandas as pd


def on_both_paths(
    requests: list[dict[str, Any]],
    workload: dict[str, Any] | None = None,
    **engine: Any,
) -> Comparison:
    """Run on the fast path and stepwise; blocks have 4 tokens and steps take 0.1 s."""
    defaults = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "block_size": 4,
        "num_gpu_blocks_override": 101,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "async_scheduling": False,
    }
    trace = {"kind": LISTED_TRACE, "requests": requests}
    config = parse_config(
        {
            "workload": {"trace": trace} | (workload or {}),
            "engine": defaults | engine,
            "cost": {"kind": "constant", "step_s": 0.1},
        }
    )
    compared = assert_equal_paths(config)
    assert compared.chosen.path == "fast"
    return compared


def steps_of(compared: Comparison) -> pd.DataFrame:
    return compared.chosen.tables["steps"]


def requests_of(compared: Comparison) -> pd.DataFrame:
    return compared.chosen.tables["requests"]


def request(
    at: float, prompt: list[list[int]], out: int, seg: int, **more: Any
) -> dict[str, Any]:
    return {"at": at, "prompt": prompt, "out": out, "seg": seg, **more}


def test_who_waits_for_a_block_of_an_answer_is_admitted_as_it_fills() -> None:
    """The first answer's first token fills a block that the second prompt begins with.

    Four blocks: the first request holds two, the second would need three more, and
    only two with that hit.
    """
    compared = on_both_paths(
        [
            request(0.0, [[0, 7]], 6, 1),
            request(0.0, [[0, 7], [1, 5], [2, 3]], 1, 3),
        ],
        num_gpu_blocks_override=5,
    )
    assert steps_of(compared)["num_running"].tolist()[:2] == [1, 2]
    assert requests_of(compared)["num_cached_tokens"].tolist() == [0, 8]


@pytest.mark.parametrize("towards", [-math.inf, None, math.inf])
def test_an_arrival_at_the_end_of_a_step_is_in_the_next(towards: float | None) -> None:
    """Ends of steps are sums: the seventh is not 0.7."""
    end_s = 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1
    at = end_s if towards is None else math.nextafter(end_s, towards)
    compared = on_both_paths(
        [request(0.0, [[0, 9]], 30, 1), request(at, [[2, 9]], 5, 3)]
    )
    first_step = 8 if towards == math.inf else 7
    steps = steps_of(compared)
    assert steps["start_s"].iloc[7] == end_s
    assert steps["num_prefills"].to_numpy().nonzero()[0].tolist() == [0, first_step]


def test_several_arrive_at_once_while_nobody_is_there() -> None:
    compared = on_both_paths(
        [
            request(0.25, [[0, 9]], 3, 1),
            request(0.25, [[2, 9]], 3, 3),
            request(7.0, [[4, 9]], 3, 5),
            request(7.0, [[6, 9]], 3, 7),
        ],
        {"best_of": 2},
    )
    assert requests_of(compared)["first_scheduled_s"].tolist() == [0.25] * 4 + [7.0] * 4


def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_block_on() -> None:
    compared = on_both_paths(
        [request(0.0, [[0, 16]], 2, 1), request(1.0, [[0, 16]], 2, 3)]
    )
    assert requests_of(compared)["num_cached_tokens"].tolist() == [0, 12]
    assert steps_of(compared)["num_batched_tokens"].tolist() == [16, 1, 4, 1]


def test_the_last_that_runs_preempts_itself_and_comes_back() -> None:
    """Two requests of three blocks each, in five blocks."""
    compared = on_both_paths(
        [request(0.0, [[0, 7]], 5, 1), request(0.0, [[2, 7]], 5, 3)],
        num_gpu_blocks_override=6,
        enable_prefix_caching=False,
    )
    preemptions = compared.chosen.tables["preemptions"]
    assert preemptions[["request_id", "for_request_id"]].to_numpy().tolist() == [[1, 1]]
    assert requests_of(compared)["num_output_tokens"].tolist() == [5, 5]


def test_a_long_answer_alone_is_many_equal_steps() -> None:
    compared = on_both_paths(
        [request(0.0, [[0, 5]], 5000, 1)], num_gpu_blocks_override=1300
    )
    steps = steps_of(compared)
    assert len(steps) == 5000
    assert steps["num_physical_blocks"].tolist() == [
        -(-(5 + step) // 4) for step in range(5000)
    ]


def test_all_are_rejected_on_both_paths_in_the_same_words() -> None:
    requests = [request(0.0, [[0, 500]], 5, 1)]
    trace = {"kind": LISTED_TRACE, "requests": requests}
    engine = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "num_gpu_blocks_override": 9,
    }
    config = parse_config({"workload": {"trace": trace}, "engine": engine})
    compared = assert_equal_paths(config)
    assert "1 of 1 requests were rejected" in compared.chosen.error


def test_a_learned_rule_is_asked_again_where_a_copy_may_take_over() -> None:
    """Nothing ends before, yet what the last request needs becomes less.

    A free block that it would take out of the cache is evicted, and its copy, which
    others hold, is found instead.
    """
    chat = [[0, 1], [202, 8], [3, 99], [204, 5], [5, 318], [206, 2], [7, 265], [210, 6]]
    turns = [(2, 97), (4, 152), (6, 266), (8, 340), (8, 118), (8, 220)]
    prompts = [(chat[:length], out) for length, out in turns]
    prompts[4][0].append([11, 340])
    prompts[5][0].extend([[11, 340], [214, 8]])
    prompts.insert(3, ([[0, 1], [200, 5], [1, 172], [208, 9]], 40))
    prompts.append(([*chat[:4], [5, 317], [216, 5]], 173))
    prompts.append(([[0, 1], [218, 1]], 169))
    prompts.append(([[0, 1], [218, 1], [19, 82], [220, 7]], 340))
    compared = on_both_paths(
        [
            request(0.0, prompt, out, 3 + 2 * index)
            for index, (prompt, out) in enumerate(prompts)
        ],
        block_size=8,
        num_gpu_blocks_override=239,
        max_num_seqs=100,
        max_num_batched_tokens=216,
        admission={
            "kind": "conservative",
            "conservativeness": 0.9,
            "output_tokens": {"kind": "uniform", "low": 1, "high": 50},
        },
    )
    steps = steps_of(compared)
    # Without an end in between, one more runs.
    assert 8 in steps["num_running"][steps["num_finished"].cumsum() == 2].tolist()
