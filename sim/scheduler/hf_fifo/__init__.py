"""The continuous batching of transformers 5.17."""

from __future__ import annotations

from types import MappingProxyType

from sim.scheduler.generation import Generation, Parts, Server, SwapRule


def _parts() -> Parts:
    from sim.scheduler.hf_fifo.scheduler import FIFOScheduler
    from sim.scheduler.hf_fifo.settings import Settings
    from sim.scheduler.log.hf_fifo import HfFifoLog

    return Parts(FIFOScheduler, Settings, HfFifoLog)


HF_FIFO = Generation(
    name="hf_fifo",
    parts=_parts,
    engine_version="5.17",
    versions=r"5\.17(\.\d{1,3})?",
    versions_in_words="transformers 5.17",
    keys=frozenset({"max_blocks_per_request", "preemption_victim", "safety_margin"}),
    enable_prefix_caching=True,
    has_cpu_tier=True,
    schedules_groups=False,
    # gathers blocks on the GPU, then copies contiguous pieces, before the step
    swap=SwapRule("batch"),
    defaults=MappingProxyType({"block_size": 256, "swap_space": 0.0}),
    always_chunks=True,
    fills_last_block=True,
    server=Server(options=frozenset({"swap_space"})),
)
