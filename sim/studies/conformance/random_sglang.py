"""Random decision workloads for SGLang: short of tokens most of the time."""

from __future__ import annotations

from random import Random
from typing import Any

from sim.scheduler.sglang.settings import FIRST_WITH_PLANS, SCHEDULE_POLICIES
from sim.studies.conformance.random_v1 import (
    ABORTED_SHARE,
    as_workload,
    cut,
    random_requests,
    withdraw_some,
)
from sim.studies.conformance.workload import DecisionWorkload  # noqa: TC001

_EVICTIONS = ("lru", "lru", "lfu", "fifo", "mru", "filo", "priority")


def random_sglang_workload(
    seed: int, release: str, *, windows: bool = False, apart: bool = False
) -> DecisionWorkload:
    """Return the workload of a seed, for an engine of a release.

    With `windows` it is the same but for layers with a window, and few steps. An engine
    that is `apart` only prefills, or only decodes.
    """
    draw = Random(f"sglang {seed}")
    config = _random_config(draw)
    if int(release.split(".")[2]) >= FIRST_WITH_PLANS:
        _squeeze(Random(f"plans {seed}"), config)
    name = f"seed {seed}"
    if windows:
        config["swa"] = _window(Random(f"windows {seed}"), config)
        config["max_steps"] = 600
        name += ", windows"
    is_by_priority = config.get("enable_priority_scheduling", False)
    requests = random_requests(
        draw,
        {
            "max_model_len": min(config["context_len"], config["max_total_num_tokens"])
            - 1,
            "policy": "priority" if is_by_priority else "fcfs",
        },
    )
    for index, request in enumerate(requests):
        # SGLang withdraws every request whose id begins with the one that is named
        request["id"] = f"r{index:03d}"
        if "priority" in request:
            request["priority"] *= draw.choice((1, 7, 20))
            if draw.random() < 0.1:
                del request["priority"]
        if draw.random() < 0.2:
            request["ignore_eos"] = True
    if draw.random() < ABORTED_SHARE:
        withdraw_some(draw, requests)
    if apart:
        _part(Random(f"apart {seed}"), config, requests)
    return as_workload(name, release, config, requests, engine="sglang")


def _random_config(draw: Random) -> dict[str, Any]:
    """Return an engine's keys; few pages, as their allocator is slow on a CPU."""
    page_size = draw.choice((1, 1, 1, 1, 1, 1, 1, 4, 16))
    num_pages = draw.randint(6, draw.choice((20, 200)))
    total = max(page_size * num_pages, 32)
    total -= total % page_size
    context_len = draw.randint(max(16, total // 2), max(24, total + 20))
    chunk = draw.choice((-1, draw.randint(1, 8), draw.randint(8, 64), 128, 8192))
    config: dict[str, Any] = {
        "max_total_num_tokens": total,
        "page_size": page_size,
        "max_running_requests": draw.choice((1, 2, 4, 8, 16, 64)),
        "context_len": context_len,
        "chunked_prefill_size": chunk if chunk < 0 else _pages(chunk, page_size),
        "max_prefill_tokens": draw.choice((16, 64, 256, 16384)),
        "prefill_max_requests": draw.choice((None, None, None, 1, 3)),
        "enable_mixed_chunk": draw.random() < 0.3,
        "schedule_conservativeness": draw.choice((0.0, 0.05, 0.3, 1.0, 1.0, 1.3)),
        "disable_radix_cache": draw.random() < 0.2,
        "radix_eviction_policy": draw.choice(_EVICTIONS),
        "max_queued_requests": draw.choice((None, None, None, draw.randint(1, 6))),
        "overlap": draw.random() < 0.5,
        "need_sort": draw.random() < 0.15,
    }
    if draw.random() < 0.35:
        config["enable_priority_scheduling"] = True
        config["schedule_policy"] = draw.choice(("fcfs", "lof"))
        config["schedule_low_priority_values_first"] = draw.random() < 0.5
        config["priority_scheduling_preemption_threshold"] = draw.choice((0, 1, 5, 10))
    else:
        config["schedule_policy"] = draw.choice(SCHEDULE_POLICIES)
    return {key: value for key, value in config.items() if value is not None}


def _squeeze(draw: Random, config: dict[str, Any]) -> None:
    """Let some engines mix small chunks with decodes that nobody expects."""
    if draw.random() < 0.3:
        config["enable_mixed_chunk"] = True
        chunk = draw.randint(1, 12)
        config["chunked_prefill_size"] = _pages(chunk, config["page_size"])
        config["schedule_conservativeness"] = draw.choice((0.0, 0.02))
        config["max_running_requests"] = draw.choice((3, 8, 64))
    if draw.random() < 0.1:
        config["radix_eviction_policy"] = "slru"


def _part(draw: Random, config: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """Let an engine only prefill, or only decode, with another one that is slow."""
    config["disaggregation_mode"] = draw.choice(("prefill", "decode"))
    decodes = config["disaggregation_mode"] == "decode"
    config["num_reserved_decode_tokens"] = draw.choice((0, 0, 1, 4, 16))
    total = config["max_total_num_tokens"]
    longest = min(config["context_len"], total) - 9
    slowest = draw.choice((0, 1, 3, 12))
    for request in requests:
        request["route_delay"] = draw.randint(0, draw.choice((0, slowest)))
        request["transfer_delay"] = decodes + draw.randint(0, slowest)
        request["prompt"] = cut(request["prompt"], max(longest, 1))


def _pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size) * page_size


def _window(draw: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Return layers with a window, whose pool is short, at times for every request."""
    size, total = config["page_size"], config["max_total_num_tokens"]
    share = draw.choice((0.15, 0.3, 0.5, 0.8, 1.0, 1.3))
    num_pages = max(int(total * share) // size, 1)
    window = draw.choice((1, 2, draw.randint(1, 12), draw.randint(4, 40), total // 3))
    if draw.random() < 0.8:  # room for a window and a page, and for some more
        num_pages = max(num_pages, window // size + 3 + draw.choice((0, 1, 5, 20)))
    return {
        "sliding_window_size": window,
        "max_total_num_tokens": num_pages * size,
        "eviction_interval": draw.choice((1, 1, 2, 5, 16, 128)),
    }
