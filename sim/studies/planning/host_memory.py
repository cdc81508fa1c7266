"""The worth of host memory behind the pools of a plan, in sentences."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KEYS = ("kv_offloading_size", "kv_offloading_link", "kv_offloading_backend")


def host_memory_sentences(
    plan: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Say for each candidate with host memory what it saves against one without.

    Parameters
    ----------
    plan
        As ``plan.json`` has it.
    candidates
        Those of one model.
    """
    without = {
        _rest(each): each for each in candidates if not _size(each) and "rate" in each
    }
    for each in candidates:
        base = without.get(_rest(each))
        if _size(each) and "rate" in each and base is not None:
            yield f"{_said(each)} {_gain(plan, each, base)}."


def _size(each: Mapping[str, Any]) -> float:
    return float(each.get("engine", {}).get("kv_offloading_size") or 0.0)


def _rest(each: Mapping[str, Any]) -> str:
    """Return the settings that tell a candidate from others, host memory apart."""
    told = each.get("engine", {})
    engine = {key: value for key, value in told.items() if key not in _KEYS}
    return json.dumps(engine, sort_keys=True, default=str)


def _said(each: Mapping[str, Any]) -> str:
    rate = (each["engine"].get("kv_offloading_link") or {}).get("load_bytes_per_s")
    over = f" over {rate / 1e9:,.4g} GB/s" if rate else ""
    return f"{_size(each):,.4g} GiB of host memory behind each engine{over}"


def _gain(
    plan: Mapping[str, Any], each: Mapping[str, Any], base: Mapping[str, Any]
) -> str:
    rates = (
        f"one engine holds {each['rate']['value']:.3g} requests/s, "
        f"{base['rate']['value']:.3g} without"
    )
    gpu = each["gpu"]
    if not (each.get("replicas") and base.get("replicas")):
        return f"changes no fleet that was found: {rates}"
    saved = base["num_gpus"] - each["num_gpus"]
    costs = base["cost_per_hour"] - each["cost_per_hour"]
    money = f"{abs(costs):,.2f} {plan['prices']['currency']} an hour"
    paid = f"costs {money} {'less' if costs > 0 else 'more'}" if costs else "is free"
    if saved > 0:
        return f"saves {saved:,} of {base['num_gpus']:,} {gpu}, and {paid}: {rates}"
    if saved < 0:
        return f"takes {-saved:,} {gpu} more, and {paid}: {rates}"
    return f"saves none of {base['num_gpus']:,} {gpu}, and {paid}: {rates}"
