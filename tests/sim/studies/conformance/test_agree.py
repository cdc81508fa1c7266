"""Generations agree where their semantics coincide, and other relations of logs.

Without caching and in a roomy cache, two families remain. Where prompts join running
decodes (cacheflow, chunked v0, v1), all take the same steps; so do those where a
prompt step comes first (v0_2, v0). A single burst leaves no difference at all.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.studies.conformance.decision_files import (
    CONFIGS,
    column,
    decide,
    request,
    workload,
)

V1 = [release for release in CONFIGS if int(release.split(".")[1]) >= 8]
JOINING: list[tuple[str, dict[str, Any]]] = [
    ("0.1.0", {}),
    ("0.7.3", {"chunked_prefill": True}),
    *((release, {"enable_prefix_caching": False}) for release in V1),
    ("0.33.0", {"enable_prefix_caching": False, "chunked_prefill": False}),
]
PROMPTS_FIRST: list[tuple[str, dict[str, Any]]] = [("0.2.7", {}), ("0.7.3", {})]
ROOMY = {
    "num_gpu_blocks": 330,
    "max_num_batched_tokens": 1000,
    "max_num_seqs": 64,
}


@st.composite
def traffic(
    draw: st.DrawFn, *, spread: bool = True, aborts: bool = True, longest: int = 25
) -> list[Any]:
    """Up to eight requests, each with a prompt of its own."""
    requests = []
    step = 0
    for index in range(draw(st.integers(1, 8))):
        more: dict[str, Any] = {}
        if spread:
            step += draw(st.sampled_from([0, 0, 1, 2, 5, 30]))
        if aborts and draw(st.integers(0, 4)) == 0:
            more["abort_step"] = step + draw(st.integers(0, 8))
        requests.append(
            request(
                chr(ord("a") + index),
                draw(st.integers(1, longest)),
                draw(st.integers(1, 12)),
                arrival_step=step,
                **more,
            )
        )
    return requests


def steps(release: str, requests: list[Any], **config: Any) -> list[dict[str, Any]]:
    """Return steps as all generations log them: requests and blocks in use."""
    if release in V1 and "num_gpu_blocks" in config:
        config["num_gpu_blocks"] += 1  # the null block
    if release not in V1:
        config.setdefault("num_cpu_blocks", 400)
    data = workload(release, requests, **config)
    if release not in ("0.1.0",):
        data["config"]["max_model_len"] = 1000
    lines = decide(data, check=False)
    for line in lines:
        assert not line.get("ignored")
    num_blocks = data["config"]["num_gpu_blocks"] - (release in V1)
    return [
        {
            "t": line["t"],
            "abort": line.get("abort", []),
            "ran": sorted(entry[0] for entry in line["sched"]),
            "preempted": line.get("preempt", []),
            "waiting": line["waiting"],
            "running": sorted(line["running"]),
            "used": num_blocks - line["free"][0],
            "used_at_end": num_blocks - line["free_end"][0],
            "fin": sorted(line.get("fin", [])),
        }
        for line in lines
    ]


def all_equal(
    engines: list[tuple[str, dict[str, Any]]], requests: list[Any], block_size: int
) -> None:
    logs = [
        steps(release, requests, block_size=block_size, **(ROOMY | config))
        for release, config in engines
    ]
    for (release, config), log in zip(engines[1:], logs[1:], strict=True):
        assert log == logs[0], f"{release} {config} and {engines[0]}"
    assert all(line["preempted"] == [] for line in logs[0])
    done = {name for line in logs[0] for name in line["fin"] + line["abort"]}
    # An abort that leaves no request has no line at all.
    assert done >= {raw["id"] for raw in requests if "abort_step" not in raw}
    if not any("abort_step" in raw for raw in requests):
        assert logs[0][-1]["used_at_end"] == 0


block_sizes = st.sampled_from([1, 4, 16])


@settings(max_examples=25, deadline=None)
@given(requests=traffic(), block_size=block_sizes)
def test_all_agree_where_prompts_join_decodes(
    requests: list[Any], block_size: int
) -> None:
    all_equal(JOINING, requests, block_size)


@settings(max_examples=40, deadline=None)
@given(requests=traffic(), block_size=block_sizes)
def test_all_agree_where_prompts_come_first(
    requests: list[Any], block_size: int
) -> None:
    all_equal(PROMPTS_FIRST, requests, block_size)


@settings(max_examples=15, deadline=None)
@given(requests=traffic(spread=False), block_size=block_sizes)
def test_all_agree_on_a_burst(requests: list[Any], block_size: int) -> None:
    all_equal(JOINING + PROMPTS_FIRST, requests, block_size)


def test_the_two_families_part_when_a_prompt_meets_a_decode() -> None:
    """So the agreement above is no accident of logs that say nothing."""
    requests = [request("a", 3, 4), request("b", 3, 1, arrival_step=1)]
    assert column(steps("0.33.0", requests, **ROOMY), "ran")[1] == ["a", "b"]
    assert column(steps("0.2.7", requests, **ROOMY), "ran")[1] == ["b"]


TIGHT = {"num_gpu_blocks": 330, "max_num_seqs": 3}


@settings(max_examples=30, deadline=None)
@given(
    requests=traffic(),
    budget=st.sampled_from([5, 8, 64]),
    release=st.sampled_from(["0.11.2", "0.33.0"]),
)
def test_v1_with_caching_decides_as_without_where_no_prompt_is_shared(
    requests: list[Any], budget: int, release: str
) -> None:
    config = TIGHT | {"max_num_batched_tokens": budget}
    cached, plain = (
        steps(release, requests, enable_prefix_caching=caching, **config)
        for caching in (True, False)
    )
    assert cached == plain


@settings(max_examples=30, deadline=None)
@given(requests=traffic(), budget=st.sampled_from([25, 64]))
def test_v0_with_caching_decides_as_without_where_no_prompt_is_shared(
    requests: list[Any], budget: int
) -> None:
    config = TIGHT | {"max_num_batched_tokens": budget}
    cached, plain = (
        steps("0.7.3", requests, enable_prefix_caching=caching, **config)
        for caching in (True, False)
    )
    assert cached == plain


@pytest.mark.parametrize("release", ["0.1.0", "0.2.7", "0.7.3"])
def test_swap_and_recompute_give_the_same_output(release: str) -> None:
    """Unchunked, each step that a request is in gives it one token."""
    modes_seen: set[str] = set()

    @settings(max_examples=25, deadline=None)
    @given(requests=traffic(aborts=False, longest=20))
    def same(requests: list[Any]) -> None:
        for mode in ("swap", "recompute"):
            log = steps(
                release,
                requests,
                num_gpu_blocks=12,
                max_num_batched_tokens=64,
                preemption_mode=mode,
            )
            for raw in requests:
                ran = sum(raw["id"] in line["ran"] for line in log)
                assert ran == raw["output_len"]
                assert sum(raw["id"] in line["fin"] for line in log) == 1
            used = {how for line in log for _, how in line["preempted"]}
            assert used <= {mode}
            modes_seen.update(used)

    same()
    assert modes_seen == {"swap", "recompute"}
