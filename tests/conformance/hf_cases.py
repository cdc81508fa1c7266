"""Random workloads for `hf_fifo`, and their smallest parts that still differ."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.studies.conformance.workload import DecisionWorkload, parse_workload

if TYPE_CHECKING:
    from collections.abc import Callable

REFERENCE = "transformers 5.17.0"
GOLDEN = {
    "recompute_shared_a": 3030,
    "recompute_shared_b": 3388,
    "recompute_shared_c": 3534,
    "recompute_plain": 3265,
    "swap_shared_a": 3303,
    "swap_shared_table": 3735,
    "swap_plain_table": 3906,
    "both_shared_a": 4272,
    "both_shared_table": 3209,
    "both_plain_no_room": 3121,
    "both_shared_no_room": 3836,
    "swap_aborts": 3816,
    "swap_aborts_stalled": 3212,
}
"""Seeds of the workloads in ``hf_fifo/``, as they were drawn."""


class Case(NamedTuple):
    """A workload, and which of its requests the model ends early."""

    workload: DecisionWorkload
    early_ends: frozenset[str]


def random_case(seed: int) -> Case:
    """Return the case of a seed: short of blocks, most of the time."""
    draw = Random(seed)
    block_size = draw.choice((4, 4, 5, 8, 16))
    config = {
        "block_size": block_size,
        "num_gpu_blocks": draw.randint(6, 24),
        "num_cpu_blocks": draw.choice((0, draw.randint(1, 12), draw.randint(8, 60))),
        "max_num_batched_tokens": draw.choice((3, 8, 16, 32, 64, 256)),
        "max_num_seqs": draw.choice((2, 4, 8, 100)),
        "safety_margin": draw.choice((0.15, 0.15, 0.0, 0.0, 0.4, 1.0)),
        "max_blocks_per_request": draw.choice((0, 0, draw.randint(1, 8))),
        "enable_prefix_caching": draw.random() < 0.5,
    }
    longest = config["num_gpu_blocks"] * block_size
    spread = draw.choice((0, 0, 0, 2, 10, 60))
    steps = sorted(draw.randint(0, spread) for _ in range(draw.randint(3, 14)))
    requests = [_request(draw, f"r{i}", step, longest) for i, step in enumerate(steps)]
    if draw.random() < 0.15:
        # One a step: the release withdraws several in an order that no seed fixes.
        at = draw.sample(range(1, 60), len(requests))
        for request, step in zip(requests, at, strict=True):
            if draw.random() < 0.3:
                request["abort_step"] = max(step, request["arrival_step"])
        _one_abort_a_step(requests)
    early = frozenset(r["id"] for r in requests if draw.random() < 0.3)
    return Case(as_workload(config, requests, name=f"seed {seed}"), early)


def _request(draw: Random, name: str, step: int, longest: int) -> dict[str, Any]:
    num_output = draw.randint(1, max(1, min(60, longest // draw.choice((1, 2, 3)))))
    num_prompt = draw.randint(1, max(1, longest // draw.choice((2, 8, 12, 16))))
    if draw.random() < 0.01:
        num_prompt += longest  # never fits: the engine ends with an error
    else:
        num_output = max(1, min(num_output, longest - 2 - num_prompt))
    num_shared = draw.choice((0, num_prompt, draw.randint(0, num_prompt)))
    prompt = [[draw.choice((1, 2)), num_shared], [draw.randint(10, 10**6), num_prompt]]
    prompt[1][1] -= num_shared
    return {
        "id": name,
        "arrival_step": step,
        "prompt": [segment for segment in prompt if segment[1]],
        "output_len": num_output,
        # Equal prompts with equal answers share blocks that both compute.
        "out_seed": draw.choice((7, draw.randint(10, 10**6))),
    }


def _one_abort_a_step(requests: list[dict[str, Any]]) -> None:
    taken: set[int] = set()
    for request in requests:
        if (step := request.get("abort_step")) is not None:
            if step in taken:
                del request["abort_step"]
            taken.add(step)


def as_workload(
    config: dict[str, Any], requests: list[dict[str, Any]], name: str
) -> DecisionWorkload:
    """Return a workload as if read from a file."""
    text = {
        "schema": 1,
        "name": name,
        "reference": REFERENCE,
        "config": config,
        "requests": requests,
    }
    return parse_workload(json.dumps(text), name)


def shrunk(case: Case, differs: Callable[[Case], bool]) -> Case:
    """Return a part of `case` that still differs: fewer requests, shorter outputs."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for requests in _smaller(case.workload):
            part = Case(
                case.workload.model_copy(update={"requests": requests}), case.early_ends
            )
            if differs(part):
                case, is_smaller = part, True
                break
    return case


def _smaller(workload: DecisionWorkload) -> list[list[Any]]:
    requests = workload.requests
    smaller = [requests[:i] + requests[i + 1 :] for i in range(len(requests))]
    for i, each in enumerate(requests):
        for key, value in (
            ("output_len", each.output_len // 2),
            ("output_len", each.output_len - 1),
            ("arrival_step", 0),
            ("abort_step", None),
        ):
            if value != getattr(each, key) and (key, value) != ("output_len", 0):
                less = each.model_copy(update={key: value})
                smaller.append([*requests[:i], less, *requests[i + 1 :]])
    return [each for each in smaller if each]


def workload_text(workload: DecisionWorkload) -> str:
    """Return a workload as its file has it."""
    raw = {
        "schema": 1,
        "name": workload.name,
        "reference": workload.reference,
        "config": workload.config,
        "requests": [
            request.model_dump(exclude_defaults=True) for request in workload.requests
        ],
    }
    return json.dumps(raw)


def text_of(case: Case) -> str:
    """Return a case as the file that shows it, and what the file cannot say."""
    ended = f"ended early by the model: {sorted(case.early_ends)}"
    return f"{workload_text(case.workload)}\n{ended}"
