"""The correctness gate: every variant against high precision, before it is timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from calibrate.gpu.arena import batches
from calibrate.gpu.attention import attention_call
from calibrate.gpu.faults import is_broken
from calibrate.gpu.layers import Inputs, layer_call, layer_inputs, precise
from calibrate.gpu.transfers import copy_call
from calibrate.harness.device import Check, DeviceFaultError, said
from calibrate.kernels import reference
from calibrate.measurement import Point

if TYPE_CHECKING:
    from calibrate.gpu.gpu_device import GpuDevice
    from calibrate.measurement import Curve

    Lens = tuple[list[int], list[int]]

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
"""Relative errors of a row that the precision explains."""
DECODES: Lens = ([1] * 5, [1, 17, 80, 600, 1100])
PREFILLS: tuple[Lens, ...] = (([130], [130]), ([37], [87]), ([1], [65]))
MIXED: Lens = ([40, 1, 1, 70], [73, 17, 300, 70])
SWAPS = ((7, 4096), (3, 32768))
"""(pages, bytes of a page)"""


def check(device: GpuDevice, at: Curve, backend: str) -> Check:
    """Return how far a variant is off on small shapes of its curve.

    A variant that cannot even be called is refused with its reason: an engine's
    functions change between releases, and a calibration goes on without it.

    Raises
    ------
    DeviceFaultError
        When the device answers nothing more.
    """
    try:
        if at.operation.endswith("_attention"):
            return _attention(device, at)
        if at.operation == "swap":
            return _exact(all(_swapped(device, at, backend, s) for s in SWAPS))
        if at.operation == "copy_blocks":
            return _exact(_copied(device, at, backend))
        return _layer(device, at)
    except Exception as error:
        if is_broken(device.timers.device):
            raise DeviceFaultError(said(error)) from error
        return Check(error=float("inf"), tolerance=0.0, reason=said(error))


def _exact(holds: bool) -> Check:
    """Return the verdict on copies, which are right or wrong."""
    return Check(error=0.0 if holds else float("inf"), tolerance=0.0)


def _wait(device: GpuDevice) -> None:
    if device.timers.device.type == "cuda":
        torch.cuda.synchronize(device.timers.device)


def _attention(device: GpuDevice, at: Curve) -> Check:
    shapes = {
        "decode_attention": (DECODES,),
        "prefill_attention": PREFILLS,
        "mixed_attention": (MIXED,),
    }[at.operation]
    arena = device.arena(_dtype(at))
    worst = 0.0
    for lens in shapes:
        (batch,) = batches(arena, at, lens, 1, device.generator(7))
        call, out = attention_call(at.variant, batch, device.engines)
        call()
        _wait(device)
        expected = reference.paged_attention(batch)
        worst = max(worst, reference.worst_row_error(out, expected))
    return Check(worst, TOLERANCES[arena.dtype])


def _swapped(
    device: GpuDevice, at: Curve, backend: str, shape: tuple[int, int]
) -> bool:
    """Return whether all pages arrived, and the source is what it was."""
    transfers = device.transfers()
    pairs = transfers.pairs(Point(at, shape), torch.Generator().manual_seed(7))
    page_bytes = shape[1]
    host = transfers.memory.host[at.text("memory")]
    there = transfers.memory.device_bytes
    half = (len(pairs) + 1) // 2
    ways = {
        "h2d": [(host, there, pairs)],
        "d2h": [(there, host, pairs)],
        "both": [(host, there, pairs[:half]), (there, host, pairs[half:])],
    }[at.text("direction")]
    sent = [
        torch.stack([_page(source, first, page_bytes).cpu() for first, _ in moved])
        for source, _, moved in ways
        if moved
    ]
    seconds = device.timers.transfer(transfers.call(Point(at, shape), backend, pairs))
    _wait(device)
    arrived = [
        torch.stack([_page(target, second, page_bytes).cpu() for _, second in moved])
        for _, target, moved in ways
        if moved
    ]
    return seconds > 0 and all(map(torch.equal, sent, arrived))


def _page(region: torch.Tensor, index: int, page_bytes: int) -> torch.Tensor:
    return region[index * page_bytes : (index + 1) * page_bytes]


def _copied(device: GpuDevice, at: Curve, backend: str) -> bool:
    """Return whether targets hold their sources, and nothing else has changed."""
    page = at.constant("page_bytes") // _dtype(at).itemsize
    draw = Inputs(_dtype(at), device.timers.device, device.generator(7))
    pool = draw.normal(at.constant("num_layers"), 2, 9, 1, 1, page)
    expected = pool.clone()
    pairs = [(4, 0), (8, 2), (1, 7)]
    for first, second in pairs:
        expected[:, :, second] = pool[:, :, first]
    copy_call(pool, pairs, backend, device.library)()
    _wait(device)
    return torch.equal(pool, expected)


def _layer(device: GpuDevice, at: Curve) -> Check:
    if at.operation == "launch":
        return _exact(True)
    draw = Inputs(_dtype(at), device.timers.device, device.generator(7))
    if at.operation == "sampler":
        return _exact(_sampled(at, draw))
    point = Point(at, (24,))
    inputs = layer_inputs(point, draw)
    exact = layer_call(point, precise(inputs))()
    got = layer_call(point, inputs)()
    _wait(device)
    return Check(reference.relative_error(got, exact), TOLERANCES[draw.dtype])


def _sampled(at: Curve, draw: Inputs) -> bool:
    """Return whether a token without a rival is drawn, in every row."""
    point = Point(at, (3,))
    logits, noise = layer_inputs(point, draw)
    logits[:, 5] += 1000.0
    return layer_call(point, (logits, noise))().tolist() == [5] * 3


def _dtype(at: Curve) -> torch.dtype:
    dtype = getattr(torch, at.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{at.dtype} is no dtype of torch")
    return dtype
