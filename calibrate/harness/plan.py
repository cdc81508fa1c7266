"""In which order points are visited, and which are added where neighbours disagree."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.harness.grid import MIB
from calibrate.measurement import Point, curve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from calibrate.harness.geometry import Geometry
    from calibrate.harness.grid import Choice, Limits
    from calibrate.measurement import Curve

BLOCK = 20
"""Visits between two checkpoints, each of which ends with the sentinels."""
DISAGREEMENT = 0.1
"""Deviation from its neighbours' interpolation, in logarithms, that adds points."""
UNSTABLE = 1.05
"""Ratio of a sentinel's 95th to its 5th percentile that marks a profile unstable."""


@dataclass(frozen=True, slots=True)
class Block:
    """Visits between two checkpoints."""

    name: str
    """Phase, round and number: what the checkpoint is compared by."""
    round: int
    points: tuple[Point, ...]


def seed_of(*parts: object) -> int:
    """Return a seed that depends on every part, and on nothing else."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def ordered_blocks(
    phase: str, points: Sequence[Point], rounds: int, seed: int
) -> Iterator[Block]:
    """Yield the blocks of a phase: rounds one after the other, each in its own order.

    A drift of the device thus falls on all points alike, and not on the last ones.
    """
    for number in range(rounds):
        order = list(points)
        random.Random(seed_of(seed, phase, number)).shuffle(order)
        for first in range(0, len(order), BLOCK):
            chunk = tuple(order[first : first + BLOCK])
            yield Block(f"{phase}/{number}/{first // BLOCK}", number, chunk)


def sentinels(
    geometry: Geometry, limits: Limits, choices: Sequence[Choice]
) -> dict[str, tuple[Point, Choice]]:
    """Return the points that are timed again and again: GEMM, decode, transfer.

    What the device cannot do is left out.
    """
    n, k = geometry.gemms["qkv"]
    batch = 64
    context = max(1, min(2048, limits.kv_tokens_bytes // geometry.token_bytes // batch))
    shapes: dict[str, tuple[Mapping[str, int | str], str, tuple[int, ...]]] = {
        "gemm": ({"layer": "qkv", "n": n, "k": k}, geometry.dtype, (2048,)),
        "decode_attention": (
            {
                "num_heads": geometry.num_heads,
                "num_kv_heads": geometry.num_kv_heads,
                "head_dim": geometry.head_dim,
                "block_size": geometry.block_size,
            },
            geometry.dtype,
            (batch, batch * context, context),
        ),
        "swap": (
            {"direction": "h2d", "memory": "pinned"},
            "bytes",
            (min(32, limits.transfer_bytes // (2 * MIB)) or 1, 2 * MIB),
        ),
    }
    found: dict[str, tuple[Point, Choice]] = {}
    for operation, (constants, dtype, values) in shapes.items():
        choice = next((c for c in choices if c.operation == operation), None)
        if choice:
            at = curve(operation, choice.variant, dtype, constants)
            found[operation] = (Point(at, values), choice)
    return found


def refine(times_s: Mapping[Point, float], most: int) -> list[Point]:
    """Return points to add: beside those that lie off their neighbours' line.

    On every line of points that differ in one coordinate, the middle of each three is
    compared with the interpolation of the other two, logarithm against logarithm; where
    it is off by more than `DISAGREEMENT`, the middles of both gaps are proposed, at
    most `most`, the worst disagreements first.
    """
    wanted: dict[Point, float] = {}
    for line, axis in _lines(times_s):
        for left, middle, right in zip(line, line[1:], line[2:], strict=False):
            off = _disagreement(axis, (left, middle, right), times_s)
            if off <= DISAGREEMENT:
                continue
            for low, high in ((left, middle), (middle, right)):
                added = _between(low, high, axis)
                if added is not None and added not in times_s:
                    wanted[added] = max(off, wanted.get(added, 0.0))
    worst_first = sorted(wanted, key=lambda point: (-wanted[point], point.key))
    return worst_first[:most]


def _coordinates(point: Point) -> tuple[int, ...] | None:
    """Return the coordinates of a point's line; None where it lies on none.

    A decode of even contexts is (sequences, tokens of each).
    """
    if point.curve.operation == "decode_attention":
        num_seqs, total, longest = point.values
        return (num_seqs, longest) if total == num_seqs * longest else None
    if point.curve.operation == "mixed_attention":
        return None
    return point.values


def _at(coordinates: tuple[int, ...], at: Curve) -> Point:
    if at.operation == "decode_attention":
        num_seqs, longest = coordinates
        return Point(at, (num_seqs, num_seqs * longest, longest))
    return Point(at, coordinates)


def _lines(times_s: Mapping[Point, float]) -> Iterator[tuple[list[Point], int]]:
    """Yield lines of three and more points, and the coordinate in which they differ."""
    lines: dict[tuple[Curve, int, tuple[int, ...]], list[tuple[int, Point]]] = {}
    for point in times_s:
        place = _coordinates(point)
        for axis, value in enumerate(place or ()):
            rest = (*(place or ())[:axis], *(place or ())[axis + 1 :])
            lines.setdefault((point.curve, axis, rest), []).append((value, point))
    for (_, axis, _), found in lines.items():
        if len(found) >= 3:
            yield [point for _, point in sorted(found, key=lambda pair: pair[0])], axis


def _disagreement(
    axis: int, three: tuple[Point, Point, Point], times_s: Mapping[Point, float]
) -> float:
    """Return how far the middle lies off the line of the others, in logarithms."""
    places = [(_coordinates(point) or ())[axis] for point in three]
    low, mid, high = (math.log1p(place) for place in places)
    first, middle, last = (math.log(times_s[point]) for point in three)
    return abs(first + (last - first) * (mid - low) / (high - low) - middle)


def _between(low: Point, high: Point, axis: int) -> Point | None:
    """Return the geometric middle of two points; None where there is no integer."""
    places = list(_coordinates(low) or ())
    first, last = places[axis], (_coordinates(high) or ())[axis]
    places[axis] = round(math.exp((math.log1p(first) + math.log1p(last)) / 2) - 1)
    if not first < places[axis] < last:
        return None
    return _at(tuple(places), low.curve)
