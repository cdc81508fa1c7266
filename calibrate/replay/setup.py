"""From the facts of a schedule to something that executes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from calibrate.gpu.attention import Engines
from calibrate.gpu.layers import layer_ops
from calibrate.harness.geometry import Geometry, geometry_of
from calibrate.replay.executor import TorchExecutor
from calibrate.replay.memory import check_memory, free_host_bytes, needs
from calibrate.replay.pool import Moves
from calibrate.replay.stack import Stack
from sim.errors import UserError
from sim.scheduler.generations import generation_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrate.gpu.device import GpuDevice
    from calibrate.replay.log import Facts
    from sim.hardware.models.architecture import ModelArchitecture

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_TINY: Final = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
}


def replay_geometry(
    model: ModelArchitecture, facts: Facts, num_layers: int | None
) -> Geometry:
    """Return the shapes of the stack that stands for a schedule's model."""
    geometry = geometry_of(model, facts.block_size, 1)
    doubts = (
        (facts.tensor_parallel_size != 1, "one GPU, not tensor parallelism"),
        (bool(geometry.num_experts), "dense layers, not routed experts"),
        (geometry.sliding_window is not None, "full attention, not sliding windows"),
        (
            facts.kv_cache_dtype not in {"auto", geometry.dtype},
            "a KV cache in the model's precision",
        ),
    )
    for wrong, what in doubts:
        if wrong:
            raise UserError(
                f"a replay has {what}: {model.name} on {facts.tensor_parallel_size} "
                f"GPU(s), kv_cache_dtype {facts.kv_cache_dtype}, cannot be replayed; "
                "record a run of a dense model on one GPU"
            )
    if num_layers is not None and not 1 <= num_layers <= geometry.num_layers:
        raise UserError(
            f"--num-layers must be 1 to {geometry.num_layers}, those of {model.name}; "
            f"got {num_layers}"
        )
    return replace(geometry, num_layers=num_layers or geometry.num_layers)


def tiny_geometry(facts: Facts) -> Geometry:
    return Geometry(
        "tiny",
        dtype="float32",
        block_size=facts.block_size,
        expert_dtype="",
        **_TINY,
    )


def swap_variant(facts: Facts) -> str:
    """Return how the engine of a schedule swaps: "loop" or "batch"."""
    return generation_of(facts.engine_version).swap.variant


def tiny_executor(
    facts: Facts,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    use_graphs: bool = False,
) -> TorchExecutor:
    """Return a tiny stack on the CPU; contents of its pools are poisoned."""
    geometry = tiny_geometry(facts)
    device = torch.device("cpu")
    stack = Stack(geometry, facts.max_model_len, _seeded(device, seed), dtype, device)
    pool, host_pool = _pools(geometry, facts, dtype, device)
    pool.fill_(float("nan"))
    host_pool.fill_(float("nan"))
    moves = Moves(pool, host_pool, None, swap_variant(facts), "torch")
    variants = {"decode_attention": "sdpa", "mixed_attention": "sdpa"}
    engines = Engines(device, 1, None)
    return TorchExecutor(stack, moves, engines, variants, use_graphs)


def gpu_executor(
    gpu: GpuDevice,
    geometry: Geometry,
    facts: Facts,
    variants: Mapping[str, Sequence[str]],
    *,
    use_graphs: bool,
    seed: int,
) -> TorchExecutor:
    """Return the stack on a GPU.

    `variants` are those that a profile's tables stand on, by operation; of an operation
    without any, the best that is here is taken.
    """
    device, dtype = gpu.timers.device, DTYPES[geometry.dtype]
    free_bytes, _ = torch.cuda.mem_get_info(device)
    wanted = needs(geometry, facts, dtype.itemsize)
    check_memory(wanted, geometry.num_layers, free_bytes, free_host_bytes())
    generator = _seeded(device, seed)
    ops = layer_ops(_layer_variant(gpu, variants.get("layer", ())))
    stack = Stack(geometry, facts.max_model_len, generator, dtype, device, ops=ops)
    moves = moves_on_gpu(gpu, geometry, facts, generator)
    prompts = variants.get("mixed_attention") or variants.get("prefill_attention")
    wanted_here = {
        "decode_attention": variants.get("decode_attention"),
        "mixed_attention": prompts,
    }
    taken = {
        operation: _variant(gpu, operation, names or ())
        for operation, names in wanted_here.items()
    }
    return TorchExecutor(stack, moves, gpu.engines, taken, use_graphs)


def moves_on_gpu(
    gpu: GpuDevice, geometry: Geometry, facts: Facts, generator: torch.Generator
) -> Moves:
    dtype = DTYPES[geometry.dtype]
    pool, host_pool = _pools(geometry, facts, dtype, gpu.timers.device)
    for layer in pool:
        layer.normal_(generator=generator)
    copies = gpu.choices("auto", ["copy_blocks"])
    return Moves(pool, host_pool, gpu.library, swap_variant(facts), copies[0].backend)


def _variant(gpu: GpuDevice, operation: str, named: Sequence[str]) -> str:
    """Return the best variant here of those that are named, if any are."""
    here = [choice.variant for choice in gpu.choices("auto", [operation])]
    for variant in here:
        if not named or variant in named:
            return variant
    raise UserError(
        f"the profile's {operation} is {', '.join(named)}, but here are "
        f"{', '.join(here)}: replay where what was measured is installed, or fit it "
        "with --variant"
    )


def _layer_variant(gpu: GpuDevice, named: Sequence[str]) -> str:
    """Return how norms and what is like them are run; samplers are torch's always."""
    if named and "fused" not in named:
        return "torch"
    return _variant(gpu, "norm", ["fused"] if named else ())


def _seeded(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _pools(
    geometry: Geometry, facts: Facts, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    page = (geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    layers = (geometry.num_layers, 2)
    pool = torch.empty(
        (*layers, facts.num_gpu_blocks + 1, *page), dtype=dtype, device=device
    )
    host_pool = torch.empty(
        (*layers, facts.num_cpu_blocks, *page),
        dtype=dtype,
        pin_memory=device.type == "cuda" and facts.num_cpu_blocks > 0,
    )
    return pool, host_pool
