"""Which GPUs a model fits, and by how much it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sim.errors import CapacityError, ConfigError
from sim.hardware.capacity.arguments import parse_engine_version, resolve_batch
from sim.hardware.gpus import GIB, load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_capacity

if TYPE_CHECKING:
    from sim.config.engine import EngineConfig

_ROOMY = 64
"""Times the memory of a GPU, so that what a model needs there can be counted."""
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why an engine has no room for its model.

    Parameters
    ----------
    gpu, tensor_parallel_size
        What was tried.
    needed_gib, usable_gib
        Of a GPU: weights and what a step takes, and what the engine may use.
    fits_from
        The least number of ranks, a power of two, on which it fits; None for none.
    """

    gpu: str
    tensor_parallel_size: int
    needed_gib: float
    usable_gib: float
    fits_from: int | None

    def sentence(self, model: str) -> str:
        more = self.needed_gib - self.usable_gib
        remedy = (
            f"it fits from tensor_parallel_size {self.fits_from}"
            if self.fits_from is not None
            else f"nor does it on any number of ranks up to {MOST_RANKS}"
        )
        return (
            f"{model} does not fit {self.tensor_parallel_size} x {self.gpu}: a GPU "
            f"lacks {more:.1f} GiB (weights and a step take {self.needed_gib:.1f}, the "
            f"engine may use {self.usable_gib:.1f}); {remedy}"
        )


def misfit_of(engine: EngineConfig) -> Misfit | None:
    """Return by how much an engine's model does not fit, or None if it does.

    Raises CapacityError for what no memory would mend, such as heads that the ranks do
    not divide.
    """
    if fits(engine):
        return None
    model, gpu = load_model(engine.model), load_gpu(engine.gpu)
    tokens, seqs = resolve_batch(
        model,
        gpu,
        parse_engine_version(engine.version),
        max_model_len=engine.max_model_len,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
    )
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    roomy = replace(gpu, memory_bytes=gpu.memory_bytes * _ROOMY)
    there = make_capacity(engine.model_copy(update=limits), model, roomy)
    needed = there.requested_bytes - there.left_bytes + 2 * there.block_bytes
    return Misfit(
        gpu.name,
        engine.tensor_parallel_size,
        needed / GIB,
        gpu.memory_bytes * engine.gpu_memory_utilization / GIB,
        _fits_from(engine),
    )


def fits(engine: EngineConfig) -> bool:
    try:
        make_capacity(engine, load_model(engine.model), load_gpu(engine.gpu))
    except CapacityError:
        return False
    return True


def _fits_from(engine: EngineConfig) -> int | None:
    ranks = engine.tensor_parallel_size * 2
    while ranks <= MOST_RANKS:
        try:
            if fits(engine.model_copy(update={"tensor_parallel_size": ranks})):
                return ranks
        except ConfigError:  # heads that so many ranks do not divide
            return None
        ranks *= 2
    return None
