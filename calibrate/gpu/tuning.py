"""Times tiles, warps and stages of the attention kernels on the GPU at hand.

``python -m calibrate.gpu.tuning`` prints a line for each shape of program, the fastest
first, with the bandwidth or rate that it reaches. Nothing is chosen or kept: what
`DecodeShape` and `MixedShape` say by default is changed in the source, by a person.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calibrate.gpu.arena import Arena, batches, lengths
from calibrate.gpu.timers import CudaTimers
from calibrate.harness.device import UnsupportedPointError, said
from calibrate.harness.work import least_bytes, least_flops
from calibrate.kernels.triton_decode import (
    DecodeShape,
    DecodeWorkspace,
    paged_decode,
    plan_decode,
)
from calibrate.kernels.triton_mixed import MixedShape, paged_mixed, plan_mixed
from calibrate.measurement import Point, curve, median

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from calibrate.gpu.timers import Timers
    from calibrate.kernels.paged import PagedBatch

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
"""Of an 8B model."""
DECODES = ((1, 128), (1, 131072), (64, 2048), (128, 2048), (512, 1024))
"""(sequences, context of each)."""
PREFILLS = ((2048, 0), (8192, 0), (1024, 32768))
"""(query tokens, past tokens)."""
ARENA_BYTES = 4 << 30
SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """One shape of a program on one batch."""

    what: str
    seconds: float
    """Of a call; infinite where it could not run."""
    note: str


def decode_shapes() -> Iterator[tuple[DecodeShape, int]]:
    """Yield shapes of a decode's programs, and programs for each multiprocessor."""
    tiles = ((32, 4), (64, 4), (128, 4), (128, 8))
    for (tile, warps), stages in itertools.product(tiles, (2, 3, 4)):
        for per_sm in (2, 4, 8):
            yield DecodeShape(tile, warps, stages), per_sm


def mixed_shapes() -> Iterator[MixedShape]:
    whole = ((64, 64, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8))
    for (rows, tile, warps), stages in itertools.product(whole, (2, 3)):
        yield MixedShape(rows, tile, warps, stages)


def seconds_of(timers: Timers, calls: Sequence[Callable[[], object]]) -> float:
    for call in calls:
        call()
    replay = timers.graph(calls)
    if replay is None:
        return median([timers.eager(calls[0]) for _ in range(SAMPLES)])
    replay.seconds()
    return median([replay.seconds() for _ in range(SAMPLES)]) / len(calls)


def tried(
    what: str, timers: Timers, bind: Callable[[], list[Callable[[], None]]]
) -> Trial:
    """Time what `bind` returns; one that does not compile or fit is a note."""
    try:
        return Trial(what, seconds_of(timers, bind()), "")
    except UnsupportedPointError as error:
        return Trial(what, float("inf"), str(error))
    except Exception as error:
        # a shape too large for registers or shared memory, which Triton says in its way
        return Trial(what, float("inf"), said(error)[:80])


def decode_trials(
    timers: Timers, made: Sequence[PagedBatch], num_sms: int
) -> list[Trial]:
    """Time all shapes of a decode's programs on batches that differ in memory only."""

    def bind(shape: DecodeShape, per_sm: int) -> list[Callable[[], None]]:
        calls = []
        for batch in made:
            out = torch.empty_like(batch.query)
            plan = plan_decode(
                batch.context_lens,
                batch.num_kv_heads,
                per_sm * num_sms,
                batch.query.device,
                shape,
            )
            space = DecodeWorkspace(batch.query, plan)
            calls.append(_decode(out, batch, plan, space))
        return calls

    return [
        tried(
            f"{shape}, {per_sm} an SM", timers, functools.partial(bind, shape, per_sm)
        )
        for shape, per_sm in decode_shapes()
    ]


def _decode(*arguments: object) -> Callable[[], None]:
    return lambda: paged_decode(*arguments)  # type: ignore[arg-type]


def mixed_trials(timers: Timers, made: Sequence[PagedBatch]) -> list[Trial]:
    """Time all shapes of a prefill's programs on batches that differ in memory only."""

    def bind(shape: MixedShape) -> list[Callable[[], None]]:
        return [
            _mixed(torch.empty_like(batch.query), batch, plan_mixed(batch, shape))
            for batch in made
        ]

    return [
        tried(str(shape), timers, functools.partial(bind, shape))
        for shape in mixed_shapes()
    ]


def _mixed(*arguments: object) -> Callable[[], None]:
    return lambda: paged_mixed(*arguments)  # type: ignore[arg-type]


def report(point: Point, trials: Sequence[Trial], most: int) -> list[str]:
    best = sorted(trials, key=lambda trial: trial.seconds)
    lines = [f"{point.curve.operation} {point.values}"]
    for trial in best[:most]:
        if trial.note:
            break
        bandwidth = least_bytes(point) / trial.seconds / 1e12
        rate = least_flops(point) / trial.seconds / 1e12
        rates = f"{bandwidth:6.2f} TB/s {rate:7.1f} TFLOP/s"
        lines.append(f"  {1e6 * trial.seconds:10,.1f} us {rates}  {trial.what}")
    failed = [trial for trial in trials if trial.note]
    if failed:
        lines.append(f"  {len(failed)} could not run, such as {failed[0].what}:")
        lines.append(f"    {failed[0].note}")
    return lines


def points() -> list[Point]:
    decode = curve("decode_attention", "split_kv", "bfloat16", HEADS)
    prefill = curve("prefill_attention", "mixed", "bfloat16", HEADS)
    decodes = [Point(decode, (batch, batch * n, n)) for batch, n in DECODES]
    return decodes + [Point(prefill, values) for values in PREFILLS]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibrate.gpu.tuning")
    parser.add_argument("--most", type=int, default=5, help="lines for each shape")
    most = parser.parse_args(arguments).most
    if not torch.cuda.is_available():
        print("tuning needs an NVIDIA GPU and a CUDA build of torch", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    timers = CudaTimers(device, properties.L2_cache_size)
    generator = torch.Generator(device).manual_seed(0)
    arena = Arena(ARENA_BYTES, torch.bfloat16, device, generator)
    for point in points():
        made = batches(arena, point.curve, lengths(point), 3, generator)
        trials = (
            mixed_trials(timers, made)
            if point.curve.variant == "mixed"
            else decode_trials(timers, made, properties.multi_processor_count)
        )
        print("\n".join(report(point, trials, most)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
