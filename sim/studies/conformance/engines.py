"""From a decision workload to a scheduler and its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.errors import CacheError
from sim.errors import SchedulerError
from sim.scheduler.groups.settings import SchedulerConfig
from sim.scheduler.log.tokens import StreamTokens
from sim.scheduler.request import Request
from sim.scheduler.settings import CacheConfig
from sim.studies.conformance.workload import (
    MAX_LEN,
    CacheflowEngine,
    HfFifoEngine,
    V0Engine,
    V02Engine,
    V1Engine,
)

if TYPE_CHECKING:
    from sim.scheduler.groups.scheduler import GroupScheduler
    from sim.scheduler.hf_fifo.scheduler import FIFOScheduler
    from sim.scheduler.hosted.scheduler import VllmScheduler
    from sim.scheduler.v1.scheduler import V1Scheduler
    from sim.studies.conformance.workload import DecisionRequest, DecisionWorkload

    AnyScheduler = GroupScheduler | V1Scheduler | FIFOScheduler | VllmScheduler


def make_scheduler(workload: DecisionWorkload) -> AnyScheduler:
    """Construct the scheduler that a workload names.

    Raises
    ------
    SchedulerError
        If the engine's arguments do not fit together.
    """
    try:
        return _make_scheduler(workload)
    except CacheError as error:
        raise SchedulerError(str(error)) from error


def _make_scheduler(workload: DecisionWorkload) -> AnyScheduler:
    engine = workload.engine
    if isinstance(engine, V1Engine):
        return _v1(engine, workload.engine_version)
    if isinstance(engine, HfFifoEngine):
        return _hf_fifo(engine)
    if isinstance(engine, V0Engine):
        return _v0(engine)
    cache_config = CacheConfig(
        block_size=engine.block_size,
        num_gpu_blocks=engine.num_gpu_blocks,
        num_cpu_blocks=engine.num_cpu_blocks,
        watermark=engine.watermark,
        sliding_window=engine.sliding_window if isinstance(engine, V02Engine) else None,
    )
    if isinstance(engine, CacheflowEngine):
        from sim.scheduler.block_space.cacheflow import Scheduler  # noqa: PLC0415

        return Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_num_seqs=engine.max_num_seqs,
                max_model_len=MAX_LEN,
                preemption_mode=engine.forced_mode,
            ),
            cache_config,
        )
    from sim.scheduler.block_space.v0_2 import Scheduler as V02Scheduler  # noqa: PLC0415

    return V02Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len,
            max_paddings=engine.max_paddings,
            preemption_mode=engine.forced_mode,
        ),
        cache_config,
    )


def _v0(engine: V0Engine) -> GroupScheduler:
    from sim.scheduler.v0.scheduler import Scheduler  # noqa: PLC0415

    return Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len,
            preemption_mode=engine.forced_mode,
            policy=engine.policy,
            enable_chunked_prefill=engine.chunked_prefill,
            num_lookahead_slots=engine.num_lookahead_slots,
            delay_factor=engine.delay_factor,
            max_num_partial_prefills=engine.max_num_partial_prefills,
            max_long_partial_prefills=engine.max_long_partial_prefills,
            long_prefill_token_threshold=engine.long_prefill_token_threshold,
        ),
        CacheConfig(
            block_size=engine.block_size,
            num_gpu_blocks=engine.num_gpu_blocks,
            num_cpu_blocks=engine.num_cpu_blocks,
            watermark=engine.watermark,
            sliding_window=engine.sliding_window,
            enable_prefix_caching=engine.enable_prefix_caching,
        ),
    )


def _v1(engine: V1Engine, engine_version: str) -> V1Scheduler:
    from sim.scheduler.v1.scheduler import V1Scheduler  # noqa: PLC0415

    return V1Scheduler(**_v1_arguments(engine), engine_version=engine_version)


def hosted_scheduler(workload: DecisionWorkload) -> VllmScheduler:
    """Construct the installed vLLM's own scheduler for a workload of V1.

    Parameters
    ----------
    workload
        Its reference may be any release of V1: the installed one decides.

    Raises
    ------
    SchedulerError
        If the workload is of another generation; else see
        `sim.scheduler.hosted.scheduler.VllmScheduler`.
    """
    from sim.scheduler.hosted.scheduler import VllmScheduler  # noqa: PLC0415

    engine = workload.engine
    if not isinstance(engine, V1Engine):
        raise SchedulerError(
            f"a hosted vLLM takes workloads of V1, and the reference "
            f"{workload.reference!r} is of {workload.generation}; leave --scheduler out"
        )
    return VllmScheduler(**_v1_arguments(engine))


def _v1_arguments(engine: V1Engine) -> dict[str, Any]:
    """Return what both V1 schedulers are constructed with."""
    arguments = engine.model_dump()
    arguments["enable_chunked_prefill"] = arguments.pop("chunked_prefill")
    arguments["scheduling_policy"] = arguments.pop("policy")
    return arguments


def _hf_fifo(engine: HfFifoEngine) -> FIFOScheduler:
    from sim.scheduler.hf_fifo.scheduler import FIFOScheduler  # noqa: PLC0415

    return FIFOScheduler(
        engine.num_gpu_blocks,
        engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        num_cpu_blocks=engine.num_cpu_blocks,
        enable_prefix_caching=engine.enable_prefix_caching,
        safety_margin=engine.safety_margin,
        max_blocks_per_request=engine.max_blocks_per_request,
    )


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
