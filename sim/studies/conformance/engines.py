"""From a decision workload to a scheduler and its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.errors import CacheError
from sim.errors import SchedulerError
from sim.scheduler.generations import GENERATIONS
from sim.scheduler.hosted import VLLM
from sim.scheduler.log.tokens import StreamTokens
from sim.scheduler.request import Request
from sim.scheduler.v1 import V1
from sim.studies.conformance.workload import MAX_LEN

if TYPE_CHECKING:
    from sim.studies.conformance.workload import DecisionRequest, DecisionWorkload

_ENGINE_KEYS = {
    "chunked_prefill": "enable_chunked_prefill",
    "delay_factor": "scheduler_delay_factor",
    "policy": "scheduling_policy",
}
"""Engine keys that decision workloads call otherwise."""


def make_scheduler(workload: DecisionWorkload, **more: Any) -> Any:
    """Construct the scheduler that a workload names; `more` are engine arguments."""
    release = {"engine_version": workload.engine_version}
    arguments = _arguments(workload) | release | more
    try:
        return GENERATIONS[workload.generation].make(arguments)
    except CacheError as error:
        raise SchedulerError(str(error)) from error


def hosted_scheduler(workload: DecisionWorkload) -> Any:
    """Construct the installed vLLM's own scheduler for a workload of V1."""
    if workload.generation != V1.name:
        raise SchedulerError(
            f"a hosted vLLM takes workloads of V1, and the reference "
            f"{workload.reference!r} is of {workload.generation}; leave --scheduler out"
        )
    return VLLM.make(_arguments(workload))


def _arguments(workload: DecisionWorkload) -> dict[str, Any]:
    """Return the workload's engine in engine keys."""
    written = {"max_model_len": MAX_LEN, **workload.engine.model_dump()}
    return {_ENGINE_KEYS.get(key, key): value for key, value in written.items()}


def make_request(index: int, raw: DecisionRequest, max_model_len: int) -> Request:
    """Construct the engine's request; its arrival time is its place in the list."""
    length = raw.num_prompt_tokens
    branches = raw.branch_output_lens or [raw.output_len] * raw.n
    return Request(
        request_id=index,
        arrival_s=float(index),
        num_prompt_tokens=length,
        tokens=StreamTokens(raw.prompt, raw.out_seed),
        max_num_tokens=min(length + raw.output_len, max_model_len),
        oracle_num_tokens=length + raw.output_len,
        priority=raw.priority,
        max_output_tokens=None,
        num_sequences=raw.n,
        use_beam_search=raw.beam,
        oracle_branch_num_tokens=tuple(length + own for own in branches),
        beam_seed=raw.beam_seed,
        beam_percent=raw.beam_pct,
    )
