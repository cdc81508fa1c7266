"""A fleet in the summary: its pools, its engines and their balance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.fleet.ranks import waits_in_words
from sim.results.metrics import (
    cache_and_queues,
    in_words,
    latencies,
    quantity,
    throughput,
)
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.config.fleet import PricesTable
    from sim.config.tables import RunConfig
    from sim.results.recording.recorder import Recording


def gpus_of(engine: EngineConfig) -> str:
    """Return the GPUs of one engine in words, such as 4 x h100_sxm."""
    number = engine.tensor_parallel_size * engine.pipeline_parallel_size
    number *= engine.data_parallel_size
    name = Path(engine.gpu).name
    return f"{number} x {name}" if number > 1 else name


def fleet_title(config: RunConfig) -> str:
    """Return engines, GPUs and router in words."""
    assert config.fleet is not None
    num_engines = config.fleet.num_engines
    at_first = sum(pool.replicas for pool in config.fleet.pools)
    gpus = dict.fromkeys(map(gpus_of, config.engines()))
    router = Path(str(config.fleet.router["kind"])).name
    has_ranks = any(each.data_parallel_size > 1 for each in config.engines())
    name = ("replica" if has_ranks else "engine") + "s" * (num_engines > 1)
    number = f"{num_engines}"
    if config.fleet.autoscaler:
        number = f"{at_first}, at most {num_engines}"
    return f"{number} {name} of {' and '.join(gpus)} behind {router}"


def _number(pool: Mapping[str, Any]) -> str:
    """Return how many engines a pool has in words."""
    number, num_ranks = pool["replicas"], pool.get("data_parallel_size", 1)
    if num_ranks > 1:
        return f"{number} x {num_ranks} ranks"
    return f"{number} engine{'s' * (number != 1)}"


def pool_size(pool: Mapping[str, Any]) -> str:
    """Return the KV cache of an engine of a pool in words."""
    number, size = pool["num_gpu_blocks"], pool.get("block_size")
    if size == 1:
        return f"{number:,} tokens"
    of = "" if size is None else f" of {size:,} tokens"  # of results before 2026-11-27
    return f"{number:,} blocks{of}"


def engine_numbers(recording: Recording, duration_s: float) -> dict[str, Any]:
    """Return the numbers of one engine, or of the engines of one pool."""
    table = recording.request_table
    return (
        throughput(table, table.num_rows, duration_s)
        | latencies(table, recording.itl)
        | cache_and_queues(recording, duration_s)
        | {"busy_s": recording.totals.busy_s}
    )


def imbalance(
    engines: Sequence[Mapping[str, Any]], up_s: Sequence[float]
) -> dict[str, float | None]:
    """Return how much more than the mean engine the one with most did.

    Parameters
    ----------
    engines
        `engine_numbers` of each.
    up_s
        By engine, seconds in which it was there: what counts is what it did in them.

    Returns
    -------
    dict
        Largest over mean, at least 1, of requests, of seconds in steps and of the mean
        KV cache usage; None where all are 0.
    """
    keys = {
        "requests": "num_requests",
        "busy_s": "busy_s",
        "kv_cache_usage": "kv_cache_usage_mean",
    }
    longest_s = max(up_s)
    is_there = [seconds > 0.0 or not longest_s for seconds in up_s]
    shares = np.array(up_s, float)[is_there] / longest_s if longest_s else 1.0
    found: dict[str, float | None] = {}
    for name, key in keys.items():
        values = np.array([each[key] for each in engines], float)[is_there]
        mean = float(values.sum() / np.broadcast_to(shares, values.shape).sum())
        found[name] = float((values / shares).max()) / mean if mean > 0 else None
    return found


def usage_while_there(part: Mapping[str, Any]) -> float:
    """Return the mean KV cache usage of an engine, a pool or a fleet that was there."""
    usage: float = part.get("kv_cache_usage_mean_up", part["kv_cache_usage_mean"])
    return usage


def places_there(summary: Mapping[str, Any]) -> list[int]:
    """Return the engines of a fleet that were there for a while at least."""
    places = range(len(summary["engines"]))
    up_s = summary.get("up_s", ())
    return [place for place in places if not any(up_s) or up_s[place] > 0.0]


def gpu_hours(
    engines: Sequence[dict[str, Any]],
    pools: Sequence[dict[str, Any]],
    up_s: Sequence[float],
    prices: PricesTable | None,
) -> dict[str, Any]:
    """Return for how long GPUs were held, and at what cost; pools get theirs.

    Where engines were gone for a while, also the means of the time they were there.

    Parameters
    ----------
    engines, pools
        Their numbers.
    up_s
        By engine, seconds in which it held its GPUs.
    prices
        Of GPUs, if costs are asked for.
    """
    for pool in pools:
        places = [i for i, e in enumerate(engines) if e["pool"] == pool["pool"]]
        own_s = [up_s[place] for place in places]
        pool["gpu_hours"] = added(own_s) / 3600.0 * pool["num_gpus"]
        pool.update(_while_there([engines[place] for place in places], own_s))
    for engine, own in zip(engines, up_s, strict=True):
        engine.update(_while_there([engine], [own]))
    told: dict[str, Any] = {"gpu_hours": added(pool["gpu_hours"] for pool in pools)}
    told |= _while_there(engines, up_s)
    if prices is not None:
        for pool in pools:
            price = prices.of(pool["gpu"])
            assert price is not None, pool["gpu"]  # the configuration was refused
            pool["cost"] = pool["gpu_hours"] * price
        told |= {
            "cost_of_gpus": added(pool["cost"] for pool in pools),
            "currency": prices.currency,
        }
    return told


def _while_there(
    engines: Sequence[Mapping[str, Any]], up_s: Sequence[float]
) -> dict[str, float]:
    whole_s, there_s = added(each["duration"] for each in engines), added(up_s)
    if not 0.0 < there_s < whole_s * (1.0 - 1e-9):
        return {}
    used_s = added(e["kv_cache_usage_mean"] * e["duration"] for e in engines)
    return {
        "kv_cache_usage_mean_up": used_s / there_s,
        "engine_busy_share_up": added(each["busy_s"] for each in engines) / there_s,
    }


def fleet_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a fleet as (name, text); none without one."""
    if not (engines := summary.get("engines")):
        return []
    number, there = f"{len(engines)}", len(places_there(summary))
    if there < len(engines):
        number = f"{there} of {number} at most"
    told = [f"{number} behind {summary['router']}, with a pool of blocks each"]
    most = summary["imbalance"]
    if len(engines) > 1 and most["requests"] is not None:
        told.append(f"the busiest has {most['requests']:.2f} x the mean requests")
        told.append(f"{most['busy_s'] or 1.0:.2f} x the time in steps")
    if len(summary["pools"]) == 1 and (waits := waits_in_words(summary["pools"][0])):
        told.append(waits)
    found = [("engines", "; ".join(told))]
    if (hours := summary.get("gpu_hours")) is not None:
        text = f"{quantity(hours)} h"
        if "cost_of_gpus" in summary:
            text += f", {summary['cost_of_gpus']:,.2f} {summary['currency']}"
        found.append(("GPU hours", text))
    found += [
        (
            f"autoscaler of {each['pool']}",
            f"{each['least_wanted']} to {each['most_wanted']} replicas, "
            f"{each['num_scale_ups']} times more, {each['num_scale_downs']} times "
            f"fewer, turned {each['num_reversals']} times",
        )
        for each in summary.get("autoscalers", ())
    ]
    if events := summary.get("events"):
        found.append(("events", _events(events, summary)))
    if len(pools := summary["pools"]) > 1:
        for pool in pools:
            served = (
                f"{pool['completed']:,} completed"
                if pool["role"] != "prefill"
                else f"{pool['num_prompts']:,} prompts for others"
            )
            if pool["role"] != "prefill" and pool["mean_ttft_ms"] is not None:
                (mean,), unit = in_words([pool["mean_ttft_ms"]], 0)
                served += f"; mean TTFT {mean} {unit}"
            preempted = pool["num_preemptions"]
            text = (
                f"{_number(pool)} of {pool_size(pool)}, {served}, KV cache usage "
                f"{usage_while_there(pool):.1%}, {preempted:,} "
                f"preemption{'s' * (preempted != 1)}"
            )
            if waits := waits_in_words(pool):
                text += f"; {waits}"
            found.append((f"pool {pool['pool']}", text))
    return found


_VERBS = {"die": "died", "drain": "drained", "start": "started", "slow": "slowed"}


def _events(events: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return events of engines, and their effect on requests, in words."""
    kinds = [each["kind"] for each in events]
    told = [
        f"{kinds.count(kind)} {verb}" for kind, verb in _VERBS.items() if kind in kinds
    ]
    if "die" in kinds:
        told[0] += (
            f", {summary['num_retried']:,} requests began again, "
            f"{summary['num_lost']:,} lost"
        )
    if refused := summary["num_refused"]:
        told.append(f"{refused:,} rejected as no engine was ready")
    return "; ".join(told)
