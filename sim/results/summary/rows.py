"""The summary of a run as rows of text: for terminals, notebooks and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.results.fleet.pulls import pull_rows
from sim.results.fleet.ranks import ONE, parts_of, waits_in_words
from sim.results.fleet.summary import fleet_rows, pool_size
from sim.results.metrics import in_words
from sim.results.recording.drafts import draft_rows
from sim.results.recording.transfers import transfer_rows
from sim.results.schema import LATENCIES, SHOWN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def clock(seconds: float) -> str:
    """Format simulated seconds as h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a summary as (name, text), without wall time."""
    s = summary
    unserved = ", ".join(
        f"{s[key]:,} {key.replace('_', ' ')}"
        for key in ("rejected", "aborted", "unsent", "unfinished", "length_capped")
        if s[key]
    )
    rows = [
        (
            "requests",
            f"{s['completed']:,} of {s['num_requests']:,} completed"
            + (f", {unserved}" if unserved else ""),
        ),
        ("simulated time", f"{clock(s['duration'])} in {s['num_steps']:,} steps"),
        (
            "throughput",
            f"{_rate(s['request_throughput'])} requests/s{_offered(s)}, "
            f"{s['output_throughput']:,.{0 if s['output_throughput'] >= 100 else 1}f} "
            f"output tokens/s",
        ),
        (
            "KV cache",
            f"{_pool(s)}; usage mean "
            f"{_mean_usage(s)}, max {s['kv_cache_usage_max']:.1%}",
        ),
        *_ranks(s),
        *fleet_rows(s),
        *pull_rows(s),
        *_kv_groups(s),
        (
            "preemptions",
            f"{s['num_preemptions']:,}, of {s['num_requests_preempted']:,} requests; "
            f"{s['recomputed_tokens']:,} tokens recomputed",
        ),
        *_moves(s),
        _queues(s),
    ]
    if s.get("prefix_cache_queries"):
        evicted = s.get("num_evictions")
        rows.append(
            (
                "prefix cache",
                _hits(s)
                + ("" if evicted is None else f"; {evicted:,} {_unit(s)} evicted"),
            )
        )
    return [*rows, *transfer_rows(s), *draft_rows(s), *_uncertainty(s), *_groups(s)]


def _mean_usage(summary: Mapping[str, Any]) -> str:
    """Return the mean usage, of engines that come and go also while they are there."""
    mean = f"{summary['kv_cache_usage_mean']:.1%}"
    if (up := summary.get("kv_cache_usage_mean_up")) is not None:
        mean += f" ({up:.1%} of what was there)"
    return mean


def _hits(summary: Mapping[str, Any]) -> str:
    """Tell the share of prompts that was found; by each of pools that share one."""
    pools = summary.get("pools", ())
    is_shared = any(pool["role"] != "serve" for pool in pools)
    told = ", ".join(
        f"{each['prefix_cache_hits'] / each['prefix_cache_queries']:.2%} of "
        f"{each['prefix_cache_queries']:,} prompt tokens hit"
        + (f" in pool {each['pool']}" if is_shared else "")
        for each in (pools if is_shared else (summary,))
        if each.get("prefix_cache_queries")
    )
    if summary["prefix_cache_hits"]:
        return told
    # of most public traces only lengths are known
    return f"{told} (does the traffic tell what prompts share?)"


def _pool(summary: Mapping[str, Any]) -> str:
    """Say how large the pool is, in blocks or tokens as its engine counts."""
    if summary.get("max_total_num_tokens") is None:
        sizes = dict.fromkeys(map(pool_size, summary.get("pools", ())))
        if len(sizes) > 1:
            return " and ".join(sizes)
        blocks = f"{summary['num_gpu_blocks']:,} blocks{_interval(summary)}"
        return f"{blocks}{_block_size(summary)}"
    size = summary["block_size"]
    return (
        f"{summary['max_total_num_tokens']:,} tokens{_interval(summary, size)}"
        + (f" in pages of {size:,}" if size > 1 else "")
        + f", {summary['kv_cache_bytes'] / 2**30:,.1f} GiB"
    )


def _unit(summary: Mapping[str, Any]) -> str:
    if summary.get("max_total_num_tokens") is None:
        return "blocks"
    return "tokens" if summary["block_size"] == 1 else "pages"


def _block_size(summary: Mapping[str, Any]) -> str:
    """Say how many tokens a block holds, where that does not depend on its group."""
    sizes = {kind["block_size"] for kind in summary.get("kv_cache_groups", ())}
    if len(sizes) > 1:
        return ""
    size = sizes.pop() if sizes else summary["block_size"]
    return f" of {size:,} tokens"


def _kv_groups(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = summary.get("kv_cache_groups", ())
    sizes = {kind["block_size"] for kind in kinds}
    for place, kind in enumerate(kinds):
        size = f", blocks of {kind['block_size']:,} tokens" if len(sizes) > 1 else ""
        yield (
            "" if place else "KV groups",
            f"{layers_in_words(kind)}{size}: mean {kind['num_blocks_mean']:,.0f} "
            f"blocks, max {kind['num_blocks_max']:,}"
            + (f" of its own {kind['num_blocks']:,}" if "num_blocks" in kind else ""),
        )


def layers_in_words(kind: Mapping[str, Any]) -> str:
    """Return the layers of a kind of group, such as ``3 x 12 layers, full attention``.

    `kind` has the keys of ``kv_cache_groups`` in a summary.
    """
    times = f"{kind['num_groups']} x " if kind["num_groups"] > 1 else ""
    return f"{times}{kind['num_layers']} layers, {kind['kind']}"


def _uncertainty(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how far the cost model may be off, where it says so."""
    ttft, tpot = summary["mean_ttft_ms_interval"], summary["mean_tpot_ms_interval"]
    said = [
        f"{name} mean {found[0]:,.1f} to {found[1]:,.1f} ms"
        for name, found in (("TTFT", ttft), ("TPOT", tpot))
        if found
    ]
    if share := summary["extrapolated_share"]:
        said.append(f"{share:.2%} of busy time extrapolated")
    if said:
        yield "kernel bounds", ", ".join(said)


def _groups(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if s := summary.get("sessions"):
        mean_s = s["mean_duration_s"]
        lasted = "" if mean_s is None else f", {mean_s:,.1f} s each on average"
        yield (
            "sessions",
            f"{s['num_completed']:,} of {s['num_sessions']:,} completed{lasted}; "
            f"{s['mean_turns']:.1f} turns on average",
        )
    for name, numbers in summary.get("by_slo_class", {}).items():
        if not numbers["completed"]:
            yield f"class {name}", f"0 of {numbers['num_requests']:,} completed"
            continue
        parts = []
        for key, label in (("ttft", "TTFT"), ("e2el", "E2E")):
            ranks = ("p50", "p95", "p99")
            texts, unit = in_words([numbers[f"{rank}_{key}_ms"] for rank in ranks], 0)
            told = map(" ".join, zip(ranks, texts, strict=True))
            parts.append(f"{label} {', '.join(told)} {unit}")
        yield f"class {name}", f"{numbers['completed']:,} completed; {'; '.join(parts)}"


def _ranks(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not (ranks := summary.get("ranks")):
        return []
    text = f"{len(ranks)}, with a pool each"
    if waits := waits_in_words(summary):
        text += f"; {waits}"
    return [("ranks", text)]


def _queues(summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return the queues; of ranks means are those of all, maxima of one."""
    s = summary
    part, parts = parts_of(s)
    of_all, of_one = (" in all", f" on {ONE[part]}") if parts else ("", "")
    return (
        "running",
        f"mean {s['num_running_mean']:.1f}{of_all}, max {s['num_running_max']:,} of "
        f"{s['max_num_seqs']:,}{of_one}; waiting mean {s['num_waiting_mean']:.1f}"
        f"{of_all}, max {s['num_waiting_max']:,}",
    )


def _moves(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    s = summary
    moves = []
    if s["swapped_out_blocks"]:
        moves.append(
            f"{s['num_preemptions_swap']:,} preemptions by swapping, "
            f"{s['swapped_out_blocks']:,} blocks out, {s['swapped_in_blocks']:,} in"
        )
    if s["copied_blocks"]:
        moves.append(f"{s['copied_blocks']:,} copied on write")
    return [("blocks moved", "; ".join(moves))] if moves else []


def _offered(summary: Mapping[str, Any]) -> str:
    rate = summary["request_rate"]
    return "" if rate is None else f" of {_rate(rate)} offered"


def _rate(rate: float) -> str:
    return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.3g}"


def _interval(summary: Mapping[str, Any], times: int = 1) -> str:
    low, high = (times * summary[f"num_gpu_blocks_{side}"] for side in ("low", "high"))
    return "" if low == high else f" ({low:,} to {high:,})"


def latency_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the latencies as a name and a text for each of `SHOWN_STATISTICS`."""
    for latency in LATENCIES.values():
        keys = (f"{each}_{latency.key}_ms" for each in SHOWN_STATISTICS)
        texts, unit = in_words([summary[key] for key in keys], 1)
        yield latency.label if unit == "ms" else f"{latency.label} ({unit})", *texts
