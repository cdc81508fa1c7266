"""Engines of vLLM 0.26.0 with a full cache, as `record_vllm.py` recorded them.

``python -m tests.truth.recordings`` prints the tables of the README.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from functools import cached_property
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
from sim.scheduler.batch import BatchShape
from sim.scheduler.v1 import V1
from sim.simulation.simulate import simulate
from sim.studies.conformance.driver import SteppedEngine, make_scheduler, requests_of
from sim.studies.conformance.workload import DecisionWorkload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.results.run import Results
    from sim.scheduler.log.lines import Line

MEASURED = Path(__file__).parent / "measured"
PROFILES = MEASURED.parents[2] / "examples/profiles"
_PROFILE = str(PROFILES / "h200_llama-3.1-8b_vllm_0.26.json")
SLOW_HOST = {"launch_s": 95e-6}
"""A kernel of a step of prompts on the host of the H200, a virtual machine: 31 ms for
324 of them, read off steps of 513 to 768 tokens, which the GPU computes in 17 ms."""


@dataclass(frozen=True)
class Recording:
    """An engine that served traffic, or was asked for single steps, and its files."""

    name: str
    """Beginning of the files' names."""
    model: str
    gpu: str
    arguments: Mapping[str, Any]
    """Of the engine, but for prefix caching, which is on."""

    @cached_property
    def said(self) -> dict[str, Any]:
        """The engine's own facts, and times of steps asked for one by one."""
        found: dict[str, Any] = json.loads((MEASURED / f"{self.name}.json").read_text())
        return found

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        return self._rows("requests")

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        return self._rows("steps")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        found = pq.read_table(MEASURED / f"{self.name}_{name}.parquet")
        return list(found.to_pylist())

    @property
    def victims(self) -> list[str]:
        """Requests that were preempted, in order."""
        return [str(request) for _, request, _ in self.said["preemptions"]]

    # -- decisions ----------------------------------------------------------------

    def decision_workload(self) -> DecisionWorkload:
        """The engine and its requests, each a prompt of its own."""
        given = self.arguments
        config = {
            "block_size": 16,
            "num_gpu_blocks": given["num_gpu_blocks_override"],
            **{name: given[name] for name in given if name.startswith("max")},
            "enable_prefix_caching": True,
            "chunked_prefill": True,
            "policy": "fcfs",
            "long_prefill_token_threshold": 0,
            "watermark": 0.0,
            "async_scheduling": True,
            "scheduler_reserve_full_isl": True,
        }
        requests = [
            {
                "id": str(index),
                "arrival_step": 0,
                "prompt": [[index + 1, row["num_prompt_tokens"]]],
                "output_len": row["num_output_tokens"],
                "out_seed": index,
            }
            for index, row in enumerate(self.requests)
        ]
        data = {"schema": 1, "reference": "vllm 0.26.0", "config": config}
        return DecisionWorkload.model_validate(data | {"requests": requests})

    def our_steps(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yield our decisions in each of the engine's calls, and the victims of it.

        A request is there from the call on before which it was added.
        """
        workload = self.decision_workload()
        scheduler, requests = make_scheduler(workload), requests_of(workload)
        engine = SteppedEngine(
            workload, scheduler, requests, is_left_alone=lambda: False
        )
        added = [row["added_s"] for row in self.requests]
        coming = iter(sorted(zip(added, requests.values(), strict=True), key=_moment))
        due = next(coming, None)
        for number, step in enumerate(self.steps):
            while engine.awaits_output and not engine.is_due:
                engine.process(number)
            while due is not None and due[0] <= step["scheduled_s"]:
                scheduler.add_request(due[1])
                due = next(coming, None)
            line = engine.call(number)
            victims = [victim[0] for victim in line.get("preempt", [])]
            yield self._facts(line), victims

    def _facts(self, line: Line) -> dict[str, Any]:
        """Return what the recording says of a call, of ours."""
        contexts, chunks = [], []
        for name, num_tokens, _, num_computed in line["sched"]:
            context = num_computed + num_tokens
            prompt = self.requests[int(name)]["num_prompt_tokens"]
            if num_tokens == 1 and context > prompt:
                contexts.append(context)
            else:
                chunks.append((num_tokens, context))
        num_free = line["free"][0]
        return {
            "num_decodes": len(contexts),
            "num_decode_context_tokens": sum(contexts),
            "chunk_tokens": [tokens for tokens, _ in chunks],
            "chunk_context_tokens": [context for _, context in chunks],
            "num_running": len(line["running"]),
            "num_waiting": len(line["waiting"]),
            "num_used_blocks": self.arguments["num_gpu_blocks_override"] - 1 - num_free,
        }

    # -- times --------------------------------------------------------------------

    def run(
        self,
        cost: Mapping[str, Any],
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
            for row in self.requests
        ]
        trace.write_text("\n".join(lines) + "\n")
        workload = {
            "trace": {"kind": "kvsim", "path": str(trace), "rate_scale": rate_scale},
            "output_end": "length",
        }
        engine = {
            "model": self.model,
            "gpu": self.gpu,
            "engine_version": "0.26",
            "enable_prefix_caching": True,
            **self.arguments,
            **more,
        }
        data = {"workload": workload, "engine": engine, "cost": dict(cost)}
        return simulate(parse_config(data))

    def measured_ms(self) -> dict[str, float]:
        """Return means over requests, from when each was to come."""
        found: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2el": []}
        for row in self.requests:
            found["ttft"].append(row["first_token_s"] - row["arrival_s"])
            found["e2el"].append(row["finish_s"] - row["arrival_s"])
            if row["num_output_tokens"] > 1:
                gap_s = row["finish_s"] - row["first_token_s"]
                found["tpot"].append(gap_s / (row["num_output_tokens"] - 1))
        return {name: 1e3 * statistics.fmean(found[name]) for name in found}

    def step_s(self, cost: Mapping[str, Any], shape: BatchShape) -> float:
        """Return the seconds of a step whose host is hidden, but for 5 us a request."""
        return self._price(cost).step(shape).total_s

    def _price(self, cost: Mapping[str, Any]) -> RooflineCost | MeasuredCost:
        arguments: dict[str, Any] = {
            "model": load_model(self.model),
            "gpu": load_gpu(self.gpu),
            "block_size": 16,
            "step_overhead_s": 1e-6,
            "graph_rule": V1.graphs,
        }
        arguments |= {key: cost[key] for key in cost if key not in {"kind", "profile"}}
        if cost["kind"] == "measured":
            return MeasuredCost(cost["profile"], **arguments)
        made = RooflineCost(**arguments)
        return LaunchedRooflineCost.of(made) if "launch_s" in cost else made

    def late_pieces_s(self, max_tokens: int = 512) -> list[float]:
        """Return by how much steps of graphs in pieces outlast the datasheet's price.

        Each is a step with a prompt between steps of decodes alone, up to so many
        tokens. What as many calls of as many decodes, give or take four, outlast their
        price by is taken off.
        """
        price = self._price({"kind": "roofline"})
        prices_s = [price.step(_shape(step)).total_s for step in self.steps]
        moments = [step["scheduled_s"] for step in self.steps]
        of_decodes: list[tuple[int, float]] = []
        of_pieces: list[tuple[int, float]] = []
        for first in range(_BEFORE, len(self.steps) - _CALLS):
            last = first + _CALLS
            step = self.steps[first]
            others = [
                *self.steps[first - _BEFORE : first],
                *self.steps[first + 1 : last],
            ]
            num_tokens = step["num_decodes"] + sum(step["chunk_tokens"])
            if 0 < num_tokens <= max_tokens and not any(
                other["chunk_tokens"] for other in others
            ):
                late_s = moments[last] - moments[first] - sum(prices_s[first:last])
                found = of_pieces if step["chunk_tokens"] else of_decodes
                found.append((step["num_decodes"], late_s))
        return [
            late_s - statistics.median(s for n, s in of_decodes if abs(n - num) <= 4)
            for num, late_s in of_pieces
        ]


_BEFORE = 3
"""Calls before a step that have decodes alone."""
_CALLS = 5
"""A call ahead returns before its step has run: so many count together."""


def _shape(step: Mapping[str, Any]) -> BatchShape:
    chunks = [*zip(step["chunk_tokens"], step["chunk_context_tokens"], strict=True)]
    pairs = sum(
        tokens * (context - tokens) + tokens * (tokens + 1) // 2
        for tokens, context in chunks
    )
    return BatchShape(
        step["num_decodes"],
        step["num_decode_context_tokens"],
        len(chunks),
        sum(step["chunk_tokens"]),
        sum(step["chunk_context_tokens"]),
        pairs,
    )


def _moment(pair: tuple[float, Any]) -> float:
    return pair[0]


_WIDE: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}
H200 = Recording(
    "h200_vllm_0.26",
    "meta-llama/Llama-3.1-8B",
    "h200_sxm",
    MappingProxyType(
        _WIDE | {"num_gpu_blocks_override": 3500, "gpu_memory_utilization": 0.9}
    ),
)
H100_EXPERTS = Recording(
    "h100_vllm_0.26_qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B",
    "h100_sxm",
    MappingProxyType(_WIDE | {"num_gpu_blocks_override": 4000}),
)
H100_MIXTRAL = Recording(
    "h100_vllm_0.26_mixtral-8x7b_a_fourth",
    str(MEASURED / "mixtral-8x7b_a_fourth.json"),
    "h100_sxm",
    MappingProxyType(_WIDE | {"max_model_len": 16384}),
)
"""The share of one of four ranks, without the others: no collectives."""


LONG_PRODUCTS = {"gemm_compute_efficiency": 0.72}
"""Of the peak, what products of more than 8,192 tokens reach on an H200 in published
tables: beside prompts of thousands of tokens the card is at its power limit."""
COSTS: dict[str, dict[str, Any]] = {
    "datasheet, nothing given": {"kind": "roofline"},
    "datasheet, its host read off this run": {"kind": "roofline"} | SLOW_HOST,
    "the same, products at the power limit": {"kind": "roofline"}
    | SLOW_HOST
    | LONG_PRODUCTS,
    "its kernels measured": {
        "kind": "measured",
        "profile": _PROFILE,
    },
    "the same, its host read off this run": {
        "kind": "measured",
        "profile": _PROFILE,
    }
    | SLOW_HOST,
}


EXPERT_COSTS: dict[str, dict[str, Any]] = {
    "datasheet, nothing given": {"kind": "roofline"},
    "datasheet, the host of the H200": {"kind": "roofline"} | SLOW_HOST,
}


def _show(
    recording: Recording, costs: Mapping[str, Any], rate_scales: tuple[float, ...]
) -> None:
    truth = recording.measured_ms()
    said = {name: round(value, 1) for name, value in truth.items()}
    print(recording.name, said, len(recording.victims))
    for name, cost in costs.items():
        for rate_scale in rate_scales:
            with tempfile.TemporaryDirectory() as folder:
                summary = recording.run(cost, Path(folder), rate_scale).summary
            means = {key: summary[f"mean_{key}_ms"] for key in truth}
            errors = {k: f"{100 * (means[k] / truth[k] - 1):+.1f} %" for k in truth}
            print(name, rate_scale, errors, summary["num_preemptions"])


def main() -> None:
    _show(H200, COSTS, (1.0, 1.04))
    _show(H100_EXPERTS, EXPERT_COSTS, (1.0,))


if __name__ == "__main__":
    main()
