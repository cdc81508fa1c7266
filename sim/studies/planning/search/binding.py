"""The resource that binds an engine: shares of its time, and reasons of its waits."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.costs.base import STEP_PARTS
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model, resolved_model
from sim.hardware.models.weights import weight_tensors
from sim.results import schema
from sim.studies.planning.search.observation import last_arrival_s, steps_inside
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from sim.results.recording.recorder import Recording
    from sim.simulation.run import Simulation

    Columns = Mapping[str, NDArray[Any]]

TIME_RESOURCES = {
    "compute": "compute",
    "memory_bandwidth": "memory bandwidth",
    "swap_bandwidth": "swap bandwidth",
    "interconnect": "the interconnect",
    "host": "the host",
}
"""Resources that a step spends its time on, and their names in a sentence."""

STEP_COLUMNS = (
    "start_s",
    "latency_s",
    "gemm_s",
    "prefill_attention_s",
    "decode_attention_s",
    "head_s",
    "allreduce_s",
    "swap_s",
    "copy_s",
    "host_s",
    "num_running",
    "num_waiting",
    "num_decodes",
    "num_prefills",
    "num_batched_tokens",
    "kv_cache_usage",
)
"""Columns that plans read of steps: 128 bytes each, and an idle engine has millions."""

_PARTS = tuple(name for name in STEP_COLUMNS if name.endswith("_s"))
_BETWEEN_TOKENS = ("tpot", "itl")
_FULL = 0.95
"""A cache that is used so far has little room for the next request."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The resource that keeps a candidate from holding more."""

    resource: str
    """``kv_capacity``, ``max_num_seqs``, ``max_num_batched_tokens``, or one of
    `TIME_RESOURCES`."""
    sentence: str
    """The same with its numbers."""


def facts_of(
    simulation: Simulation, recording: Recording, warmup_s: float
) -> dict[str, float]:
    """Return shares of time between the warm-up and the last arrival.

    ``time_*`` are shares by resource of the time that requests spend in the system, so
    that a step counts for each of them: slow steps in bursts weigh as much as in
    percentiles of latency, since most requests feel them. Products are shared out
    between compute and bandwidth as a smooth roofline has them: with T tokens and T*
    where both limits meet, by the squares of T and T*. ``waiting_*`` are shares of the
    time that requests spent waiting: for a place among the running (``seqs``), for the
    step's token budget (``tokens``), for blocks (``kv``). Of data-parallel ranks they
    are means over the ranks. ``decode_step_s`` is the mean length of steps without
    prompts as decodes feel it, ``decode_*`` are shares of it, and ``prompt_*`` shares
    of what steps with prompts take beyond it.
    """
    c = _with_spans(steps_inside(recording, warmup_s, STEP_COLUMNS))
    busy_s = max(float(c["held_s"].sum()), 1e-300)
    span_s = last_arrival_s(recording) - warmup_s
    weight = np.maximum(c["num_running"] + c["num_waiting"], 1)
    seconds = _seconds(simulation, c, weight)
    spent_s = max(added(seconds.values()), 1e-300)
    shares = {f"time_{name}": each / spent_s for name, each in seconds.items()}
    capacity = simulation.capacity
    weight_s = c["held_s"] * c["num_waiting"]
    waited_s = max(float(weight_s.sum()), 1e-300)
    at_seqs = c["num_running"] >= capacity.max_num_seqs
    at_tokens = ~at_seqs & (
        c["num_batched_tokens"] >= 0.99 * capacity.max_num_batched_tokens
    )
    at_kv = ~at_seqs & ~at_tokens
    is_full = c["kv_cache_usage"] >= _FULL
    shares |= _between_tokens(simulation, c)
    return shares | {
        "busy_share": busy_s / max(span_s * len(recording.of_rank), busy_s),
        "num_waiting_mean": float(weight_s.sum()) / busy_s,
        "waiting_share": float(c["held_s"][c["num_waiting"] > 0].sum()) / busy_s,
        "waiting_seqs": float(weight_s[at_seqs].sum()) / waited_s,
        "waiting_tokens": float(weight_s[at_tokens].sum()) / waited_s,
        "waiting_kv": float(weight_s[at_kv].sum()) / waited_s,
        "full_share": float(c["held_s"][is_full].sum()) / busy_s,
        "num_running_mean": float((c["num_running"] * c["held_s"]).sum()) / busy_s,
        "queue_share_of_ttft": _queue_share(recording, warmup_s),
        "max_num_seqs": capacity.max_num_seqs,
        "max_num_batched_tokens": capacity.max_num_batched_tokens,
        "num_gpu_blocks": capacity.num_gpu_blocks,
    }


def _between_tokens(simulation: Simulation, c: Columns) -> dict[str, float]:
    """Return the parts of the time between two tokens, alone and beside prompts."""
    spans_s, decodes = c["span_s"], c["num_decodes"]
    with_prompts = c["num_prefills"] > 0
    alone, beside = decodes * ~with_prompts, decodes * with_prompts
    num_alone, num_beside = max(int(alone.sum()), 1), int(beside.sum())
    own = {
        name: each / num_alone for name, each in _seconds(simulation, c, alone).items()
    }
    more = {
        name: max(each - own[name] * num_beside, 0.0)
        for name, each in _seconds(simulation, c, beside).items()
    }
    own_s, more_s = (max(added(each.values()), 1e-300) for each in (own, more))
    return (
        {"decode_step_s": float((spans_s * alone).sum()) / num_alone}
        | {f"decode_{name}": each / own_s for name, each in own.items()}
        | {f"prompt_{name}": each / more_s for name, each in more.items()}
    )


def _with_spans(c: Columns) -> Columns:
    """Return the columns with each step's own time, and the host's part within it.

    Seconds of the host while the step before runs are in the time of no output.
    """
    if "output_s" not in c:
        return {**c, "span_s": c["latency_s"]}
    spans_s = _between_outputs(c)
    others_s = sum((c[name] for name in STEP_PARTS), -c["host_s"])
    return {**c, "span_s": spans_s, "host_s": np.maximum(spans_s - others_s, 0.0)}


def _between_outputs(c: Columns) -> NDArray[np.float64]:
    """Return the seconds of each step from the output before it, or from its start."""
    start_s, ends_s = c["start_s"], c["output_s"]
    ends_s = np.where(np.isnan(ends_s), start_s + c["latency_s"], ends_s)
    names = [name for name in (*schema.RANKS, *schema.ENGINES) if name in c]
    engines = [c[name] for name in names]
    order = np.lexsort((ends_s, *engines))
    before_s = np.concatenate([[-inf], ends_s[order][:-1]])
    for each in engines:
        before_s[1:][np.diff(each[order]) != 0] = -inf
    spans_s = np.empty(len(ends_s))
    spans_s[order] = ends_s[order] - np.maximum(before_s, start_s[order])
    return spans_s


def _seconds(
    simulation: Simulation, c: Columns, weight: NDArray[Any]
) -> dict[str, float]:
    """Return seconds of each resource, each step weighed by its requests."""
    c = {name: c[name] * weight if name in _PARTS else c[name] for name in c}
    ridge = _ridge_tokens(simulation)
    tokens = c["num_batched_tokens"]
    of_compute = tokens * tokens / (tokens * tokens + ridge * ridge)
    multiplied_s = float((c["gemm_s"] * of_compute).sum())
    return {
        "compute": multiplied_s + float(c["prefill_attention_s"].sum()),
        "memory_bandwidth": float(c["gemm_s"].sum())
        - multiplied_s
        + float((c["decode_attention_s"] + c["head_s"] + c["copy_s"]).sum()),
        "swap_bandwidth": float(c["swap_s"].sum()),
        "interconnect": float(c["allreduce_s"].sum()),
        "host": float(c["host_s"].sum()),
    }


def _ridge_tokens(simulation: Simulation) -> float:
    """Return the tokens of a step whose products take as long as their weights."""
    engine, capacity = simulation.config.engine, simulation.capacity

    gpu = load_gpu(engine.gpu)
    model = resolved_model(load_model(engine.model), engine.dtype, engine.quantization)
    tensors = weight_tensors(model, engine.tensor_parallel_size)
    num_weights = sum(tensor.num_elements * tensor.count for tensor in tensors)
    weight_bytes = capacity.weights_bytes / num_weights
    return gpu.bf16_flops_per_s * weight_bytes / (2 * gpu.memory_bandwidth_bytes_per_s)


def _queue_share(recording: Recording, warmup_s: float) -> float:
    """Return the share of the mean time to the first token that was spent queueing."""
    requests = recording.request_table
    counts = (requests["arrival_s"] >= warmup_s) & ~np.isnan(requests["ttft_s"])
    queued_s, ttft_s = requests["queue_s"][counts], requests["ttft_s"][counts]
    return float(queued_s.sum() / max(ttft_s.sum(), 1e-300))


def mean_facts(facts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of the facts of several engines, or of several runs."""
    names = facts[0] if facts else {}
    return {name: added(each[name] for each in facts) / len(facts) for name in names}


def binding_of(
    facts: Mapping[str, float],
    preemptions_per_request: float,
    objective: str | None,
    value: float | None,
) -> Binding:
    """Return the resource that binds an engine at the highest rate that it holds.

    Room binds before time: requests that wait although the step has tokens to spare,
    or that are preempted, would be served if there were more places or blocks.
    Otherwise the step takes as long as its largest part; so it does where most of it is
    swapping, which a full cache only begins. `objective` is the one that fails first,
    and `value` what it comes to; None where the queue itself does. The seconds between
    tokens are those of steps without prompts and, beyond these, of what prompts beside
    decodes take: few steps, but they decide the slowest requests.
    """
    first = f"; {objective} fails first" if objective else "; the queue grows first"
    if facts["time_swap_bandwidth"] > 0.5:
        return _of_time(facts, first)
    waits = facts["num_waiting_mean"] >= 1 or facts["queue_share_of_ttft"] > 0.5
    if waits and facts["waiting_seqs"] > 0.5:
        return Binding(
            "max_num_seqs",
            f"admission binds: {facts['num_running_mean']:,.0f} of "
            f"{facts['max_num_seqs']:,.0f} max_num_seqs run on average, and "
            f"{facts['waiting_seqs']:.0%} of all waiting is for a place among "
            f"them{first}",
        )
    is_full = facts["full_share"] > 0.2 and preemptions_per_request > 0.02
    if is_full or (waits and facts["waiting_kv"] > 0.5 and facts["full_share"] > 0.05):
        return Binding(
            "kv_capacity",
            f"KV capacity binds: {facts['full_share']:.0%} of the time the cache of "
            f"{facts['num_gpu_blocks']:,.0f} blocks is at least 95 % full, "
            f"{preemptions_per_request:.2g} preemptions a request, and "
            f"{facts['waiting_kv']:.0%} of all waiting is for blocks{first}",
        )
    if value and objective and not {*objective.split("_")}.isdisjoint(_BETWEEN_TOKENS):
        return _of_tokens(facts, objective, value)
    return _of_time(facts, first)


def _of_tokens(facts: Mapping[str, float], objective: str, value_ms: float) -> Binding:
    """Return the resource that binds the time between tokens, not most of all time."""
    usual = _of_time(facts, f"; {objective} fails first")
    alone_ms = min(1e3 * facts["decode_step_s"], value_ms)
    beside_ms = value_ms - alone_ms
    taken_ms = {
        name: alone_ms * facts[f"decode_{name}"] + beside_ms * facts[f"prompt_{name}"]
        for name in TIME_RESOURCES
    }
    most, second = sorted(taken_ms, key=lambda name: -taken_ms[name])[:2]
    if most == usual.resource or beside_ms < alone_ms / 2:
        return usual
    return Binding(
        most,
        f"{TIME_RESOURCES[most]} binds: {taken_ms[most] / value_ms:.0%} of "
        f"{objective}, which fails first ({taken_ms[second] / value_ms:.0%} "
        f"{TIME_RESOURCES[second].removeprefix('the ')}); prompts beside decodes take "
        f"{beside_ms:.2g} of its {value_ms:.2g} ms",
    )


def _of_time(facts: Mapping[str, float], first: str) -> Binding:
    shares = {name: facts[f"time_{name}"] for name in TIME_RESOURCES}
    most, second = sorted(shares, key=lambda name: -shares[name])[:2]
    budget = ""
    if facts["waiting_tokens"] > 0.5 and facts["waiting_share"] > 0.1:
        budget = (
            f", and prompts wait for the {facts['max_num_batched_tokens']:,.0f} tokens "
            f"of a step {facts['waiting_share']:.0%} of the time"
        )
    return Binding(
        most,
        f"{TIME_RESOURCES[most]} binds: {shares[most]:.0%} of requests' time in steps "
        f"({shares[second]:.0%} {TIME_RESOURCES[second].removeprefix('the ')})"
        f"{budget}{first}",
    )


def worst(margins: Mapping[str, float | None]) -> str | None:
    """Return the objective with the largest margin; None without one that is finite."""
    known = {name: inf if m is None else m for name, m in margins.items()}
    return max(known, key=lambda name: known[name], default=None)
