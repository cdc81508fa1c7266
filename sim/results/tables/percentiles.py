"""Percentiles of values that come in batches, each with a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.int64]

MAX_NUM_SORTED = 1 << 20
"""Values that are sorted at once; more are first narrowed down, which takes 8 MB."""

_LEAST_NUM_COUNTED = 1 << 18
"""Values that are counted at once: counts of 65,536 digits are added up for each."""

_DIGIT_BITS = 16
_NUM_DIGITS = 1 << _DIGIT_BITS


def percentiles(
    batches: Callable[[], Iterable[tuple[Floats, Weights]]],
    percents: Sequence[float],
    max_num_sorted: int = MAX_NUM_SORTED,
) -> list[float]:
    """Return percentiles of values, each taken as often as its weight says.

    Equals ``numpy.percentile`` (linear interpolation) on the repeated values, without
    repeating them and, where they are many, without holding them.
    """
    num_values = total = 0
    for values, weights in batches():
        num_values += len(values)
        total += int(weights.sum())
    if not total:
        raise ValueError("percentile of nothing")
    ranks = [(total - 1) * percent / 100 for percent in percents]
    wanted = {min(int(rank) + i, total - 1) for rank in ranks for i in (0, 1)}
    found = _select(batches, sorted(wanted), num_values, max_num_sorted)
    results = []
    for rank in ranks:
        below = int(rank)
        low, high = found[below], found[min(below + 1, total - 1)]
        results.append(float(low + (high - low) * (rank - below)))
    return results


class _Range:
    """Values whose bit patterns begin alike, with the ranks that lie among them."""

    def __init__(self, prefix: int, num_below: int, ranks: list[int]) -> None:
        self.prefix = prefix
        self.num_below = num_below
        self.ranks = ranks


def _select(
    batches: Callable[[], Iterable[tuple[Floats, Weights]]],
    ranks: list[int],
    num_values: int,
    max_num_sorted: int,
) -> dict[int, float]:
    """Return the values at `ranks` of the repeated and sorted values.

    Bit patterns of floats from 0 up are ordered as the floats are. While too many
    values share their leading bits with a wanted one, the next 16 bits are counted.
    """
    shift = 64
    ranges = [_Range(0, 0, ranks)]
    while num_values > max_num_sorted and shift:
        shift -= _DIGIT_BITS
        ranges, num_values = _narrowed(batches, ranges, shift)
    if not shift:
        return {
            rank: float(np.array(each.prefix, np.uint64).view(np.float64))
            for each in ranges
            for rank in each.ranks
        }
    return _sorted_out(batches, ranges, shift)


def _leading(values: Floats, shift: int) -> npt.NDArray[np.uint64]:
    bits = values.view(np.uint64)
    return bits >> np.uint64(shift) if shift < 64 else np.zeros_like(bits)


def _narrowed(
    batches: Callable[[], Iterable[tuple[Floats, Weights]]],
    ranges: list[_Range],
    shift: int,
) -> tuple[list[_Range], int]:
    """Return the parts of `ranges` that hold their ranks, and how many values they do.

    Parts are told apart by the 16 bits above `shift`.
    """
    counts = np.zeros((len(ranges), 2, _NUM_DIGITS))  # values, and their weights
    for values, weights in _gathered(batches()):
        above = _leading(values, shift + _DIGIT_BITS)
        digits = _leading(values, shift) & np.uint64(_NUM_DIGITS - 1)
        for each, count in zip(ranges, counts, strict=True):
            inside = above == np.uint64(each.prefix)
            here = digits[inside].astype(np.intp)
            count[0] += np.bincount(here, minlength=_NUM_DIGITS)
            count[1] += np.bincount(here, weights[inside], minlength=_NUM_DIGITS)
    parts, num_values = [], 0
    for each, (num, weight) in zip(ranges, counts, strict=True):
        until = each.num_below + np.cumsum(weight).astype(np.int64)
        digit_of = np.searchsorted(until, each.ranks, side="right")
        for digit in np.unique(digit_of).tolist():
            inner = [
                rank
                for rank, d in zip(each.ranks, digit_of.tolist(), strict=True)
                if d == digit
            ]
            prefix = (each.prefix << _DIGIT_BITS) | digit
            parts.append(_Range(prefix, int(until[digit] - weight[digit]), inner))
            num_values += int(num[digit])
    return parts, num_values


def _gathered(
    batches: Iterable[tuple[Floats, Weights]],
) -> Iterator[tuple[Floats, Weights]]:
    """Yield the same values in batches that are not short, but for the last."""
    held: list[tuple[Floats, Weights]] = []
    num_held = 0
    for batch in batches:
        held.append(batch)
        num_held += len(batch[0])
        if num_held >= _LEAST_NUM_COUNTED:
            yield _joined(held)
            held, num_held = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[tuple[Floats, Weights]]) -> tuple[Floats, Weights]:
    values, weights = zip(*batches, strict=True)
    return np.concatenate(values), np.concatenate(weights)


def _sorted_out(
    batches: Callable[[], Iterable[tuple[Floats, Weights]]],
    ranges: list[_Range],
    shift: int,
) -> dict[int, float]:
    """Return the values at the ranks, by sorting the values in `ranges`."""
    held: list[tuple[list[Floats], list[Weights]]] = [([], []) for _ in ranges]
    for values, weights in batches():
        leading = _leading(values, shift)
        for each, (some, their_weights) in zip(ranges, held, strict=True):
            inside = leading == np.uint64(each.prefix)
            some.append(values[inside])
            their_weights.append(weights[inside])
    found: dict[int, float] = {}
    for each, (some, their_weights) in zip(ranges, held, strict=True):
        values = np.concatenate(some)
        order = np.argsort(values, kind="stable")
        until = each.num_below + np.cumsum(np.concatenate(their_weights)[order])
        at = np.searchsorted(until, each.ranks, side="right")
        found |= zip(each.ranks, values[order][at].tolist(), strict=True)
    return found
