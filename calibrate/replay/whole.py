"""Whole steps for a profile: what its sum of kernels is corrected by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.harness.device import DeviceFaultError, UnsupportedPointError
from calibrate.replay.log import Facts, Query, Step
from calibrate.tabulate import with_tables
from calibrate.writing import build_profile
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from calibrate.replay.run import Executor
    from sim.costs.measured.profile import Profile
    from sim.hardware.models.architecture import ModelArchitecture

Batch = tuple[tuple[int, int, int], ...]
"""``(sequences, query tokens of each, context of each)``."""

BATCHES: Final[tuple[Batch, ...]] = (
    ((1, 1, 1024),),
    ((8, 1, 2048),),
    ((16, 1, 4096),),
    ((32, 1, 1024),),
    ((64, 1, 2048),),
    ((128, 1, 512),),
    ((128, 1, 2048),),
    ((256, 1, 256),),
    ((256, 1, 1024),),
    ((1, 512, 512),),
    ((1, 2048, 2048),),
    ((4, 512, 512),),
    ((1, 8192, 8192),),
    ((1, 2048, 6144),),
    ((16, 1, 1024), (1, 512, 512)),
    ((64, 1, 2048), (1, 1024, 1024)),
    ((128, 1, 1024), (1, 2048, 4096)),
)
"""Decodes, prompts and both, from small to what a busy engine computes."""
REPEATS: Final = 7


def most_tokens() -> int:
    """Return the tokens that a pool must hold for all of `BATCHES`."""
    return max(map(_num_tokens, BATCHES))


def _num_tokens(batch: Batch) -> int:
    return sum(count * context for count, _, context in batch)


def whole_steps(facts: Facts, seed: int) -> Iterator[Step]:
    """Yield the steps of `BATCHES` that fit a pool, over random blocks."""
    for number, batch in enumerate(BATCHES):
        longest = max(context for _, _, context in batch)
        size = facts.block_size
        needed = sum(count * -(-context // size) for count, _, context in batch)
        if longest > facts.max_model_len or needed > facts.num_gpu_blocks:
            continue
        rng = np.random.default_rng((seed, number))
        blocks = iter(rng.permutation(facts.num_gpu_blocks).tolist())
        queries: list[Query] = []
        for count, num_tokens, context in batch:
            for _ in range(count):
                table = tuple(next(blocks) for _ in range(-(-context // size)))
                name = str(len(queries))
                queries.append(Query(name, name, num_tokens, context, table))
        yield Step(number, 0.0, 0.0, tuple(queries), (), (), (), ())


def measured_steps(
    executor: Executor, facts: Facts, num_layers: int, seed: int
) -> list[dict[str, Any]]:
    """Return entries of a profile's ``steps``: shape, seconds, and how it was run.

    Steps that do not fit the device are left out.
    """
    found, reason = [], "none fits the pool"
    for step in whole_steps(facts, seed):
        try:
            wall_s = executor.time(step, REPEATS).wall_s
        except UnsupportedPointError as error:
            reason = str(error)
            continue
        except DeviceFaultError as error:
            raise UserError(
                f"the device failed in whole step {step.number}: {error}; run again, "
                "or replay without --into"
            ) from error
        found.append(
            {
                "shape": step.shape._asdict(),
                "p50_s": float(f"{wall_s:.6g}"),
                "num_layers": num_layers,
                "graphs": executor.variants["graphs"] != "none",
            }
        )
    if not found:
        raise UserError(f"no whole step was executed: {reason}; take --num-layers")
    return found


def with_steps(
    profile: Profile, steps: list[dict[str, Any]], model: ModelArchitecture
) -> Profile:
    """Return a profile with measured steps, fitted to them for `model`."""
    found = build_profile(
        profile.kind,
        profile.provenance,
        profile.body["ops"],
        profile.fit,
        steps=steps,
        interference=dict(profile.interference),
    )
    return with_tables(found, found, model)
