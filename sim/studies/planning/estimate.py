"""A first guess of the rate that an engine holds, so that the search begins near it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.costs.base import BatchShape
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_capacity, make_cost_model
from workloads.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.tables import RunConfig
    from sim.costs.base import CostModel
    from sim.hardware.capacity import CapacityEstimate
    from sim.studies.planning.objectives import Objective
    from workloads.spec import RequestSpec

_MARGIN = 0.7
"""Bursts keep a real engine below what a steady stream would let it do."""


def guessed_rate(
    config: RunConfig,
    specs: Sequence[RequestSpec],
    objectives: Sequence[Objective],
) -> float:
    """Return what a steady stream of mean requests would saturate, less 30 %.

    With B running requests of P prompt and O output tokens, each step computes B
    decodes and B / O prompts. B is what cache, ``max_num_seqs`` and the token budget
    hold, and what keeps a step within the objectives on TPOT and ITL.
    """
    model, gpu = load_model(config.engine.model), load_gpu(config.engine.gpu)
    capacity = make_capacity(config.engine, model, gpu)
    cost_model = make_cost_model(config, model, gpu)
    prompt, output = _mean_lengths(specs)
    most = _most_running(capacity, prompt, output)
    longest_s = min(
        (each.limit / 1e3 for each in objectives if each.of in ("tpot", "itl")),
        default=float("inf"),
    )
    low, high = 1.0, most
    for _ in range(20):  # the largest batch whose steps are short enough
        middle = (low + high) / 2
        if _step_s(cost_model, middle, prompt, output) <= longest_s:
            low = middle
        else:
            high = middle
    return _MARGIN * low / (output * _step_s(cost_model, low, prompt, output))


def _mean_lengths(specs: Sequence[RequestSpec]) -> tuple[float, float]:
    if isinstance(specs, RequestColumns):
        prompts, outputs = specs.num_prompt_tokens, specs.num_output_tokens
    else:
        prompts = np.array([spec.num_prompt_tokens for spec in specs])
        outputs = np.array([spec.num_output_tokens for spec in specs])
    return float(prompts.mean()), float(outputs.mean())


def _most_running(capacity: CapacityEstimate, prompt: float, output: float) -> float:
    by_cache = capacity.kv_cache_tokens / (prompt + output / 2)
    by_budget = capacity.max_num_batched_tokens / (1 + prompt / output)
    return max(1.0, min(by_cache, by_budget, capacity.max_num_seqs))


def _step_s(
    cost_model: CostModel, num_running: float, prompt: float, output: float
) -> float:
    """Return the seconds of a step; prompts come in whole, on average."""
    prompts = num_running / output
    decodes = max(1, round(num_running))
    chunks, tokens = round(prompts + 0.5), round(prompts * prompt)
    shape = BatchShape(
        num_decodes=decodes,
        num_decode_context_tokens=round(decodes * (prompt + output / 2)),
        num_prefills=chunks if tokens else 0,
        num_prefill_tokens=tokens,
        num_prefill_context_tokens=tokens,
        num_prefill_attention_pairs=round(tokens * prompt / 2),
    )
    return cost_model.step(shape).total_s
