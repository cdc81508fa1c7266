"""Our balancer of ranks beside decisions of vLLM 0.33.0's own."""

from __future__ import annotations

import ast
import gzip
import json
import random
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sim.fleet.balancer import FrontEnd, Load
from tests.shared import ROOT, shared

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_decisions_are_those_of_the_real_balancer() -> None:
    """From each state that it was in, the same rank, and the same start after it."""
    num_decisions = 0
    for case in _cases():
        front_end = FrontEnd(case["n"], 0, case["client_count"])
        for step in case["steps"]:
            front_end.hear([Load(*count) for count in step["counts"]])
            front_end.num_in_flight = list(step["inflight"])
            front_end.start = step["start"]
            chosen = step["chosen"]
            assert front_end.choose() == chosen
            assert front_end.waiting[chosen] > step["counts"][chosen][0]
            num_decisions += 1
    assert num_decisions == 10_000


def test_starts_move_on_as_the_real_ones() -> None:
    for case in _cases():
        starts = [step["start"] for step in case["steps"]]
        number, num_ranks = starts[0], case["n"]
        assert starts == [(number + i) % num_ranks for i in range(len(starts))]


def test_whole_sequences_go_as_with_the_installed_one() -> None:
    """Both count for themselves; 400 balancers of 50 requests each."""
    choose_really, draw = _real_method(), random.Random(33)
    for _ in range(400):
        num_ranks, num_servers = (
            draw.choice([2, 3, 4, 8, 16]),
            draw.choice([1, 1, 2, 4]),
        )
        number = draw.randrange(num_servers)
        ours = FrontEnd(num_ranks, number, num_servers)
        real = SimpleNamespace(
            core_engines=[bytes([rank]) for rank in range(num_ranks)],
            lb_engines=[[0, 0, 0.0] for _ in range(num_ranks)],
            engine_inflight={bytes([rank]): 0 for rank in range(num_ranks)},
            client_count=num_servers,
            eng_start_index=num_ranks * number // num_servers,
            reqs_in_flight={},
            streaming_reqs=set(),
        )
        for step in range(50):
            if draw.random() < 0.3:
                loads = [
                    Load(draw.choice([0, 0, draw.randrange(30)]), *each)
                    for each in (
                        (draw.randrange(100), round(draw.random(), 2))
                        for _ in range(num_ranks)
                    )
                ]
                ours.hear(loads)
                real.lb_engines = [[*load] for load in loads]
            for rank, engine in enumerate(real.core_engines):
                if real.engine_inflight[engine] and draw.random() < 0.3:
                    real.engine_inflight[engine] -= 1
                    ours.num_in_flight[rank] -= 1
            asked = SimpleNamespace(
                request_id=str(step),
                resumable=False,
                data_parallel_rank=None,
                pooling_params=None,
            )
            assert ours.choose() == choose_really(real, asked)[0]
            assert ours.start == real.eng_start_index
            assert ours.waiting == [waiting for waiting, *_ in real.lb_engines]


def _real_method() -> Any:
    """Cut the method out of vLLM 0.33.0's source, which needs a GPU to be imported."""
    path = "lib/python3*/site-packages/vllm/v1/engine/core_client.py"
    found = [*(ROOT / ".venv-hosted-0.33.0").glob(path)]
    if not found:
        pytest.skip("vLLM 0.33.0 is not installed: make hosted VLLM=0.33.0")
    names: dict[str, Any] = {
        "sys": sys,
        "get_late_interaction_engine_index": lambda *_: None,
    }
    for node in ast.walk(ast.parse(found[0].read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "DPLBAsyncMPClient":
            [method] = [
                each
                for each in node.body
                if isinstance(each, ast.FunctionDef)
                and each.name == "get_core_engine_for_request"
            ]
            method.returns = None
            for argument in method.args.args:
                argument.annotation = None
            exec(compile(ast.Module([method], []), found[0], "exec"), names)
    return names["get_core_engine_for_request"]


def _cases() -> Iterator[dict[str, Any]]:
    path = shared("fleets/oracles/vllm_0330_dplb_decisions.jsonl.gz")
    with gzip.open(path, "rt") as rows:
        for row in rows:
            yield json.loads(row)
