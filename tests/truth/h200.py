"""vLLM 0.26.0 on one H200 with a full cache, as `record_vllm.py` recorded it.

``python -m tests.truth.h200`` prints the table of the README.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from sim.config.tables import parse_config
from sim.costs.measured.model import MeasuredCost
from sim.costs.roofline import RooflineCost
from sim.costs.roofline.launches import LaunchedRooflineCost
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.v1 import V1
from sim.simulation.simulate import simulate
from sim.studies.conformance.driver import SteppedEngine, make_scheduler, requests_of
from sim.studies.conformance.workload import DecisionWorkload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.config.tables import RunConfig
    from sim.results.run import Results
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.log.lines import Line

MEASURED = Path(__file__).parent / "measured"
PROFILE = MEASURED.parents[2] / "examples/profiles/h200_llama-3.1-8b_vllm_0.26.json"
ENGINE = {
    "num_gpu_blocks_override": 3500,
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": True,
}
SLOW_HOST = {"launch_s": 95e-6}
"""A kernel of a step of prompts on that host, a virtual machine: 31 ms for 324 of them,
read off steps of 513 to 768 tokens, which the GPU computes in 17 ms."""


@cache
def said() -> dict[str, Any]:
    """Return the engine's own facts, and times of steps asked for one by one."""
    found: dict[str, Any] = json.loads((MEASURED / "h200_vllm_0.26.json").read_text())
    return found


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """Return ``requests`` or ``steps``, in order."""
    found = pq.read_table(MEASURED / f"h200_vllm_0.26_{name}.parquet")
    return list(found.to_pylist())


# -- decisions --------------------------------------------------------------------


def decision_workload() -> DecisionWorkload:
    """The engine and its requests, each a prompt of its own."""
    config = {
        "block_size": 16,
        "num_gpu_blocks": ENGINE["num_gpu_blocks_override"],
        **{name: ENGINE[name] for name in ENGINE if name.startswith(("max", "enable"))},
        "chunked_prefill": True,
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
        "watermark": 0.0,
        "async_scheduling": True,
    }
    requests = [
        {
            "id": str(index),
            "arrival_step": 0,
            "prompt": [[index + 1, row["num_prompt_tokens"]]],
            "output_len": row["num_output_tokens"],
            "out_seed": index,
        }
        for index, row in enumerate(rows("requests"))
    ]
    data = {"schema": 1, "reference": "vllm 0.26.0", "config": config}
    return DecisionWorkload.model_validate(data | {"requests": requests})


def our_steps() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield our decisions in each of the engine's calls, and the requests preempted.

    A request is there from the call on before which it was added.
    """
    workload = decision_workload()
    scheduler, requests = make_scheduler(workload), requests_of(workload)
    engine = SteppedEngine(workload, scheduler, requests, is_left_alone=lambda: False)
    added = [row["added_s"] for row in rows("requests")]
    coming = iter(sorted(zip(added, requests.values(), strict=True), key=_moment))
    due = next(coming, None)
    for number, step in enumerate(rows("steps")):
        while engine.awaits_output and not engine.is_due:
            engine.process()
        while due is not None and due[0] <= step["scheduled_s"]:
            scheduler.add_request(due[1])
            due = next(coming, None)
        line = engine.call(number)
        yield _facts(line), [victim[0] for victim in line.get("preempt", [])]


def _moment(pair: tuple[float, Any]) -> float:
    return pair[0]


def _facts(line: Line) -> dict[str, Any]:
    """Return what the recording says of a call, of ours."""
    contexts, chunks = [], []
    for name, num_tokens, _, num_computed in line["sched"]:
        context = num_computed + num_tokens
        if (
            num_tokens == 1
            and context > rows("requests")[int(name)]["num_prompt_tokens"]
        ):
            contexts.append(context)
        else:
            chunks.append((num_tokens, context))
    return {
        "num_decodes": len(contexts),
        "num_decode_context_tokens": sum(contexts),
        "chunk_tokens": [tokens for tokens, _ in chunks],
        "chunk_context_tokens": [context for _, context in chunks],
        "num_running": len(line["running"]),
        "num_waiting": len(line["waiting"]),
        "num_used_blocks": ENGINE["num_gpu_blocks_override"] - 1 - line["free"][0],
    }


# -- times ------------------------------------------------------------------------


def run(
    cost: dict[str, Any],
    folder: Path,
    rate_scale: float = 1.0,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Results:
    """Simulate the recorded traffic, with more arguments of the engine if given."""
    trace = folder / "trace.jsonl"
    lines = [json.dumps({"kvsim_requests": 1})] + [
        json.dumps(
            {
                "arrival_s": row["arrival_s"],
                "prompt": row["num_prompt_tokens"],
                "num_output_tokens": row["num_output_tokens"],
            }
        )
        for row in rows("requests")
    ]
    trace.write_text("\n".join(lines) + "\n")
    return simulate(config(cost, trace, rate_scale, more))


def config(
    cost: dict[str, Any], trace: Path, rate_scale: float, more: Mapping[str, Any]
) -> RunConfig:
    workload = {
        "trace": {"kind": "kvsim", "path": str(trace), "rate_scale": rate_scale},
        "output_end": "length",
    }
    engine = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "engine_version": "0.26",
    }
    return parse_config(
        {"workload": workload, "engine": engine | ENGINE | dict(more), "cost": cost}
    )


def measured_ms() -> dict[str, float]:
    """Return means over requests, from when each was to come."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2el": []}
    for row in rows("requests"):
        found["ttft"].append(row["first_token_s"] - row["arrival_s"])
        found["e2el"].append(row["finish_s"] - row["arrival_s"])
        if row["num_output_tokens"] > 1:
            gap_s = row["finish_s"] - row["first_token_s"]
            found["tpot"].append(gap_s / (row["num_output_tokens"] - 1))
    return {name: 1e3 * statistics.fmean(found[name]) for name in found}


LONG_PRODUCTS = {"gemm_compute_efficiency": 0.72}
"""Of the peak, what products of more than 8,192 tokens reach on an H200 in published
tables: beside prompts of thousands of tokens the card is at its power limit."""
COSTS: dict[str, dict[str, Any]] = {
    "datasheet, nothing given": {"kind": "roofline"},
    "datasheet, its host read off this run": {"kind": "roofline"} | SLOW_HOST,
    "the same, products at the power limit": {"kind": "roofline"}
    | SLOW_HOST
    | LONG_PRODUCTS,
    "its kernels measured": {"kind": "measured", "profile": str(PROFILE)},
    "the same, its host read off this run": {
        "kind": "measured",
        "profile": str(PROFILE),
    }
    | SLOW_HOST,
}


def step_s(cost: dict[str, Any], shape: BatchShape) -> float:
    """Return the seconds of a step whose host is hidden, but for 5 us a request."""
    model, gpu = load_model("meta-llama/Llama-3.1-8B"), load_gpu("h200_sxm")
    arguments: dict[str, Any] = {
        "model": model,
        "gpu": gpu,
        "block_size": 16,
        "step_overhead_s": 1e-6,
    }
    arguments["graph_rule"] = V1.graphs
    arguments |= {key: cost[key] for key in cost if key not in {"kind", "profile"}}
    made: RooflineCost | MeasuredCost
    if cost["kind"] == "measured":
        made = MeasuredCost(cost["profile"], **arguments)
    else:
        made = RooflineCost(**arguments)
        if "launch_s" in cost:
            made = LaunchedRooflineCost.of(made)
    return made.step(shape).total_s


def main() -> None:
    truth = measured_ms()
    print({name: round(value, 1) for name, value in truth.items()})
    for name, cost in COSTS.items():
        for rate_scale in (1.0, 1.04):
            with tempfile.TemporaryDirectory() as folder:
                summary = run(cost, Path(folder), rate_scale).summary
            means = {key: summary[f"mean_{key}_ms"] for key in truth}
            errors = {k: f"{100 * (means[k] / truth[k] - 1):+.1f} %" for k in truth}
            print(name, rate_scale, errors, summary["num_preemptions"])


if __name__ == "__main__":
    main()
