"""Prices derived from the formula of a model: what a loop asks for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sim.costs.base import StepCost, own_method
from sim.costs.parts import (
    FLAG,
    FormulaCost,
    Memo,
    PartsCost,
    cost_columns,
    distinct_counts,
    fill_by_steps,
    late_s,
    launched,
)
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from sim.costs.base import BatchTotal, CostModel, DecodeEnds
    from sim.costs.parts import Columns, Line, SteadyDecodes


_MANY_STEPS: Final = 32
"""From so many on an array of them is quicker than a loop."""
# Found sooner than as attributes of their module:
_add, _multiply, _add_up = np.add, np.multiply, np.add.accumulate


# -- what a loop asks for ------------------------------------------------------------


def batch_total_of(cost_model: CostModel) -> BatchTotal:
    """Return the price of a step that moves no blocks."""
    own: BatchTotal | None = own_method(cost_model, "batch_total")
    if own is not None:
        return own
    parts = own_method(cost_model, "parts")
    if parts is None:
        return lambda *shape: cost_model.step(BatchShape(*shape)).total_s

    if isinstance(cost_model, FormulaCost) and _is_formula(parts):
        return _formula_total(cost_model)

    def batch_total(  # noqa: PLR0917 - the fields of `BatchShape`
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_tokens: int,
        prefill_context: int,
        num_pairs: int,
    ) -> float:
        gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s, _ = parts(
            num_decodes,
            decode_context,
            num_prefills,
            num_tokens,
            prefill_context,
            num_pairs,
        )
        total_s: float = gemm_s + prefill_s + decode_s + head_s + allreduce_s + host_s
        return total_s

    return batch_total


def _is_formula(parts: Any) -> bool:
    return getattr(parts, "__func__", None) is FormulaCost.parts


def _formula_total(model: FormulaCost) -> BatchTotal:
    """Return the sum of `FormulaCost.parts`, in the same order, without a tuple."""
    counted, decode_attention_s = model.counted, model.decode_attention_s
    prefill_attention_s = model.prefill_attention_s

    def batch_total(  # noqa: PLR0917 - the fields of `BatchShape`
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_tokens: int,
        prefill_context: int,
        num_pairs: int,
    ) -> float:
        gemm_s, head_s, allreduce_s, host_s, _ = counted(
            num_decodes, num_prefills, num_tokens
        )
        prefill_s = decode_s = 0.0
        if not (num_decodes or num_tokens):  # nothing is computed
            head_s = 0.0
        else:
            if num_prefills:
                prefill_s = prefill_attention_s(
                    num_prefills, num_tokens, prefill_context, num_pairs
                )
            if num_decodes:
                decode_s = decode_attention_s(num_decodes, decode_context, num_prefills)
        total_s: float = gemm_s + prefill_s + decode_s + head_s + allreduce_s + host_s
        return total_s

    return batch_total


def decode_ends_of(cost_model: CostModel) -> Callable[[int], DecodeEnds]:
    """Return the maker of the `DecodeEnds` of so many decodes, at least 1.

    A model with `kept_ends` keeps them for all engines whose steps it prices.
    """
    found: Memo[DecodeEnds] | None = getattr(cost_model, "kept_ends", None)
    kept = Memo() if found is None else found

    def decode_ends(num_decodes: int) -> DecodeEnds:
        return kept.get(num_decodes) or kept.keep(
            num_decodes, _decode_ends(cost_model, num_decodes)
        )

    return decode_ends


def ends_ahead_of(
    cost_model: CostModel, num_decodes: int, host_s: float, prepare_s: float
) -> DecodeEnds:
    """Return the `DecodeEnds` of steps that start when the one before ends.

    ``now_s`` is when the GPU is free for the first of them. The last one is the first
    that does not start before ``until_s``, or that the host outlasts when it prepares
    the next one, or the one before a step that takes no finite time of more than zero.
    The host takes `host_s` of a step, of which `prepare_s` are part of its price.
    """
    steady = steady_of(cost_model, num_decodes)
    if steady is None or not _outlasts(steady, host_s + prepare_s):
        total_s = (
            _decode_total(cost_model, num_decodes)
            if steady is None
            else partial(_late_total, steady)
        )
        return _ends_ahead_by(total_s, num_decodes, host_s, prepare_s)
    ends = [
        _line_ends_ahead(steady, line, num_decodes, prepare_s) for line in steady.lines
    ]
    return _ends_along(ends, [line.first for line in steady.lines], num_decodes, 1)


def _outlasts(steady: SteadyDecodes, least_s: float) -> bool:
    """Whether steps of these decodes take longer than `least_s`, surely."""
    return not steady.launching_s and all(
        line.slope_s >= 0 and _least_s(steady, line) > least_s * (1 + 1e-9)
        for line in steady.lines
    )


def _ends_ahead_by(
    total_s: Callable[[int], float], num_decodes: int, host_s: float, prepare_s: float
) -> DecodeEnds:
    """Return ends of steps whose GPU part may not hide the host."""

    def ends(
        num_context_tokens: int, num_steps: int, now_s: float, until_s: float
    ) -> list[float]:
        ends_s: list[float] = []
        last = num_context_tokens + num_steps * num_decodes
        for num_tokens in range(num_context_tokens, last, num_decodes):
            gpu_s = total_s(num_tokens) - prepare_s
            end_s = now_s + gpu_s
            if not now_s < end_s < inf:
                break
            ends_s.append(end_s)
            if now_s >= until_s or gpu_s < host_s:
                break
            now_s = end_s
        return ends_s

    return ends


def _line_ends_ahead(
    steady: SteadyDecodes, line: Line, num_decodes: int, prepare_s: float
) -> DecodeEnds:
    """Return the same for contexts of one line on which it is always hidden."""
    gemm_s, head_s, allreduce_s, host_s, *_ = steady
    _, value_s, slope_s, start, *_ = line
    least_s, more = _least_s(steady, line) - prepare_s, float(num_decodes)
    total_s = partial(_late_total, steady)
    one_by_one = _ends_ahead_by(total_s, num_decodes, 0.0, prepare_s)
    at_once = _ends_at_once(steady, line, num_decodes, 1, prepare_s, one_by_one)

    def ends(context: int, num_steps: int, now_s: float, until_s: float) -> list[float]:
        if num_steps >= _MANY_STEPS and until_s - now_s > _MANY_STEPS * least_s:
            return at_once(context, num_steps, now_s, until_s)
        ends_s: list[float] = []
        end_s, ahead = now_s, float(context - start)
        last = ahead + more * (num_steps - 1)
        while True:
            begin_s = end_s
            end_s += (
                gemm_s
                + (value_s + slope_s * ahead)
                + head_s
                + allreduce_s
                + host_s
                - prepare_s
            )
            ends_s.append(end_s)
            if begin_s >= until_s or ahead >= last:
                break
            ahead += more
        if end_s + least_s > end_s:
            return ends_s
        return one_by_one(context, num_steps, now_s, until_s)

    return ends if slope_s >= 0.0 < least_s else one_by_one


def _decode_ends(cost_model: CostModel, num_decodes: int) -> DecodeEnds:
    steady = steady_of(cost_model, num_decodes)
    if steady is None:
        return _ends_by(_decode_total(cost_model, num_decodes), num_decodes)
    if steady.launching_s:
        return _ends_by(partial(_late_total, steady), num_decodes)
    ends = [_line_ends(steady, line, num_decodes) for line in steady.lines]
    return _ends_along(ends, [line.first for line in steady.lines], num_decodes, 0)


def _decode_total(cost_model: CostModel, num_decodes: int) -> Callable[[int], float]:
    own = own_method(cost_model, "decode_total")
    if own is not None:
        decode_total: Callable[[int], float] = own(num_decodes)
        return decode_total
    attention_s = own_method(cost_model, "decode_attention_s")
    if (
        attention_s is None
        or not isinstance(cost_model, FormulaCost)
        or not _is_formula(cost_model.parts)
    ):
        any_total = batch_total_of(cost_model)
        return lambda context: any_total(num_decodes, context, 0, 0, 0, 0)
    gemm_s, head_s, allreduce_s, host_s, _ = cost_model.counted(num_decodes, 0, 0)

    def total(context: int) -> float:
        decode_s = attention_s(num_decodes, context, 0)
        return float(gemm_s + decode_s + head_s + allreduce_s + host_s)

    return total


def _late_total(steady: SteadyDecodes, context: int) -> float:
    """Return the price of decodes that may wait for their launches."""
    gemm_s, head_s, allreduce_s, host_s, lines, _, _, _, kernels_s, launching_s = steady
    line = lines[bisect_right(lines, (context, inf)) - 1]
    decode_s = line.value_s + line.slope_s * (context - line.start)
    gpu_s = gemm_s + decode_s + head_s + allreduce_s + kernels_s
    return (
        gemm_s
        + decode_s
        + head_s
        + allreduce_s
        + (host_s + float(late_s(launching_s, gpu_s)))
    )


def _ends_by(total_s: Callable[[int], float], num_decodes: int) -> DecodeEnds:
    """Return ends of steps from the price of each."""

    def ends(
        num_context_tokens: int, num_steps: int, now_s: float, until_s: float
    ) -> list[float]:
        ends_s: list[float] = []
        last = num_context_tokens + num_steps * num_decodes
        for num_tokens in range(num_context_tokens, last, num_decodes):
            end_s = now_s + total_s(num_tokens)
            ends_s.append(end_s)
            if not now_s < end_s < until_s:
                break
            now_s = end_s
        return ends_s

    return ends


def _line_ends(steady: SteadyDecodes, line: Line, num_decodes: int) -> DecodeEnds:
    """Return the same for contexts of one line, without a call for each step.

    That each ends later than the one before is known at the last: if the shortest step
    of the line moves the clock there, all did. Contexts are whole numbers that a float
    holds as they are, and Python multiplies two floats sooner than a float by an int.
    """
    gemm_s, head_s, allreduce_s, host_s, *_ = steady
    _, value_s, slope_s, start, *_ = line
    least_s, more = _least_s(steady, line), float(num_decodes)
    one_by_one = _ends_by(partial(_late_total, steady), num_decodes)
    at_once = _ends_at_once(steady, line, num_decodes, 0, 0.0, one_by_one)

    def ends(context: int, num_steps: int, now_s: float, until_s: float) -> list[float]:
        if num_steps >= _MANY_STEPS and until_s - now_s > _MANY_STEPS * least_s:
            return at_once(context, num_steps, now_s, until_s)
        ends_s: list[float] = []
        end_s, ahead = now_s, float(context - start)
        for _ in range(num_steps):
            end_s += (
                gemm_s + (value_s + slope_s * ahead) + head_s + allreduce_s + host_s
            )
            ends_s.append(end_s)
            if end_s >= until_s:
                break
            ahead += more
        if end_s + least_s > end_s:
            return ends_s
        return one_by_one(context, num_steps, now_s, until_s)

    return ends if slope_s >= 0.0 < least_s else one_by_one


def _ends_at_once(  # noqa: PLR0917 - the parts of a line
    steady: SteadyDecodes,
    line: Line,
    num_decodes: int,
    num_ahead: int,
    prepare_s: float,
    one_by_one: DecodeEnds,
) -> DecodeEnds:
    """Return the same ends of many steps of a line, added up in an array."""
    gemm_s, head_s, allreduce_s, host_s, *_ = steady
    _, value_s, slope_s, start, *_ = line
    least_s, more = _least_s(steady, line) - prepare_s, float(num_decodes)
    # As arrays, which numpy adds sooner than floats; x + 0.0 is x.
    slope = np.array(slope_s)
    parts_s = (value_s, gemm_s, head_s, allreduce_s, host_s, -prepare_s)
    added = [np.array(part_s) for part_s in parts_s if part_s]

    def ends(context: int, num_steps: int, now_s: float, until_s: float) -> list[float]:
        most = (until_s - now_s) / least_s
        num = num_steps if most >= num_steps else min(num_steps, int(most) + 2)
        first = float(context - start)
        ends_s = np.arange(first - more, first + num * more, more)
        _multiply(ends_s, slope, ends_s)
        for part in added:
            _add(ends_s, part, ends_s)
        ends_s[0] = now_s
        found: list[float] = _add_up(ends_s, out=ends_s).tolist()
        del found[0]
        del found[bisect_left(found, until_s) + 1 + num_ahead :]
        if found[-1] + least_s > found[-1]:
            return found
        return one_by_one(context, num_steps, now_s, until_s)

    return ends


def _least_s(steady: SteadyDecodes, line: Line) -> float:
    """Return the length of the shortest step of a line that does not fall."""
    gemm_s, head_s, allreduce_s, host_s, *_ = steady
    decode_s = line.value_s + line.slope_s * (line.first - line.start)
    return gemm_s + decode_s + head_s + allreduce_s + host_s


def _ends_along(
    ends: Sequence[DecodeEnds], firsts: Sequence[int], num_decodes: int, num_ahead: int
) -> DecodeEnds:
    """Return the ends of steps that go from a line to the next one.

    Steps ahead, 0 or 1, are taken behind the first that ends at ``until_s`` or later.
    """
    if len(ends) == 1:
        return ends[0]

    def ends_along(
        context: int, num_steps: int, now_s: float, until_s: float
    ) -> list[float]:
        place = bisect_right(firsts, context)
        ends_s: list[float] = []
        while True:
            here = num_steps
            if place < len(firsts):
                here = min(here, -((context - firsts[place]) // num_decodes))
            found = ends[place - 1](context, here, now_s, until_s)
            ends_s += found
            num_steps -= here
            if not num_steps or len(found) < here:
                return ends_s
            before_s = found[-2] if here > 1 else now_s
            bounded_s = before_s if num_ahead else found[-1]
            if not (bounded_s < until_s and before_s < found[-1]):
                return ends_s
            now_s = found[-1]
            context += here * num_decodes
            place = bisect_right(firsts, context)

    return ends_along


# -- many steps of decodes ----------------------------------------------------------


def steady_of(cost_model: CostModel, num_decodes: int) -> SteadyDecodes | None:
    """Return steps of so many decodes, at least 1; None where they follow no lines."""
    formula = ("step", "parts", "counted", "decode_attention_s")
    steady = own_method(cost_model, "steady_decodes", formula)
    return steady(num_decodes) if steady else None


class LineTable(NamedTuple):
    """`SteadyDecodes` as arrays."""

    fixed: Columns
    """Its parts but for attention, and what `DecodeLines` says of these."""
    firsts: NDArray[np.int64]
    lines: Columns
    """Each `Line` from `value_s` on."""


def lines_and_steps(
    model: PartsCost, shapes: NDArray[np.int64], kept: Memo[LineTable | None]
) -> Columns:
    """Return `step` of each row: of decodes alone by their lines, others one by one.

    `kept` are the tables by the number of decodes, None where there are no lines.
    """
    costs = np.empty((len(StepCost._fields), len(shapes))).T
    if not len(shapes):
        return costs
    decodes, context = shapes[:, 0], shapes[:, 1]
    is_alone = (decodes != 0) & ~shapes[:, 2:].any(axis=1)
    distinct, places = distinct_counts(np.where(is_alone, decodes, 0))
    for count in distinct:
        if count not in kept:
            kept.keep(count, _line_table(model, count))
    tables = [kept[count] for count in distinct]
    is_alone &= np.array([table is not None for table in tables])[places]
    rows = np.flatnonzero(is_alone)
    if len(rows):
        costs[rows] = _line_columns(tables, places[rows], context[rows])
    fill_by_steps(model, costs, shapes, ~is_alone)
    return costs


def _line_table(model: PartsCost, num_decodes: int) -> LineTable | None:
    steady = steady_of(model, num_decodes) if num_decodes else None
    if steady is None:
        return None
    return LineTable(
        np.array((*steady[:4], *steady[5:]), np.float64),
        np.array([line.first for line in steady.lines]),
        np.array([line[1:] for line in steady.lines], np.float64),
    )


def _line_columns(
    tables: Sequence[LineTable | None],
    places: NDArray[np.int64],
    context: NDArray[np.int64],
) -> Columns:
    """Return steps of decodes, each by the table whose place is given."""
    span = int(context.max()) + 1
    found = [(place, table) for place, table in enumerate(tables) if table is not None]
    firsts = np.concatenate(
        [place * span + np.minimum(table.firsts, span) for place, table in found]
    )
    own = np.searchsorted(firsts, places * span + context, side="right") - 1
    lines = np.concatenate([table.lines for _, table in found])[own].T
    value_s, slope_s, start, beyond, share_down, share_up = lines
    fixed = np.zeros((len(tables), len(found[0][1].fixed)))
    fixed[[place for place, _ in found]] = [table.fixed for _, table in found]
    gemm_s, head_s, allreduce_s, host_s, outside, down, up, kernels_s, launching_s = (
        fixed[places].T
    )
    decode_s = value_s + slope_s * (context - start)
    half_down, half_up = decode_s * share_down, decode_s * share_up
    squares = np.array([down + half_down * half_down, up + half_up * half_up])
    if launching_s.any():
        gpu_s = gemm_s + decode_s + head_s + allreduce_s + kernels_s
        host_s = host_s + late_s(launching_s, gpu_s)
        rest_s = (gpu_s - launching_s).tolist()
        for row in np.flatnonzero(launching_s).tolist():
            down_s, up_s = squares[:, row].tolist()
            squares[:, row] = launched(down_s, up_s, rest_s[row])
    costs = cost_columns(
        len(context),
        *(gemm_s, 0.0, decode_s, head_s, allreduce_s, 0.0, 0.0, host_s),
        squares=squares,
    )
    costs[:, FLAG] = (outside != 0) | (beyond != 0)
    return costs
