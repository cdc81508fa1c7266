"""Seconds of a step from tables of measured kernels: a profile, fitted for a model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable  # noqa: TC003 - `sim.config.plug` resolves annotations
from functools import partial
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.costs.base import (
    BOUNDS,
    EMPTY_SHAPE,
    BatchShape,
    Bound,
    GraphRule,
    KvLayout,
    StepCost,
    SwapRule,
    SwapVariant,
)
from sim.costs.measured.attention import Attention
from sim.costs.measured.counted import Counted
from sim.costs.measured.reading import corrected, entry_of, read_correction
from sim.costs.measured.rest import MeasuredRest
from sim.costs.parts import FLAG, Memo, cost_columns, step_cost
from sim.costs.profile import read_profile
from sim.costs.roofline import RooflineCost
from sim.hardware.gpus import GpuSpec  # noqa: TC001 - as above
from sim.hardware.models.architecture import ModelArchitecture  # noqa: TC001 - as above

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.costs.transfers import Transfer

    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]

_OTHER_KERNELS_S: Final = 12e-6
"""Seconds that a layer's norms, rotary embedding, activation and cache write spend on
starting: five of 2.4 us. Those of products and attention are in their measurements."""


class MeasuredCost:
    """Seconds of a step from measured kernels.

    ::

        gemm_s               table over tokens: the products of all layers
        decode_attention_s   table over (decodes, mean context), all layers
        prefill_attention_s  table over (chunks, mean query-key pairs), all layers,
                             at least KV bytes / bandwidth
        allreduce_s          table over tokens, all layers
        head_s               tables over requests: output projection, sampler
        swap_s, copy_s       tables over pieces and blocks; see `sim.costs.transfers`
        host_s               host a step and a request, and a table over tokens of the
                             kernels between; where kernels are launched one by one
                             and that takes longer than running them, what it is longer

    A table that the profile lacks is the datasheet's, as `RooflineCost` has it.

    Bounds: the errors of an operation are the same in every layer, those of different
    operations independent, so that half-widths add as squares. Each operation has the
    width of its own region, inside or beyond what was measured; host time has none, and
    a step that waits for its launches gets no shorter. See `sim.costs.widths`.

    The sum of contexts decides what decodes cost, never the longest one. A chunk with
    a past costs what a fresh one with as many query-key pairs costs, times a factor
    where the profile has such chunks; where it has none it says `extrapolated`, as do
    swaps and copies without a table and attention and products outside the measured
    shapes (head and element-wise kernels only widen the bounds). Where attention of
    mixed batches was measured, a factor says what chunks and decodes do to each other;
    elsewhere their times add up. Times below the physical floor are raised to it when
    the tables are read. Where whole steps were measured, the profile's
    ``step_correction`` multiplies all operations of the GPU; `describe` tells it.

    Parameters
    ----------
    profile
        Path of a kvprofile/1 file that was fitted for this model.
    model, gpu, tensor_parallel_size, block_size, kv_cache_dtype, swap_rule, graph_rule
        Injected from the engine's configuration.
    swap_variant, swap_layout, swap_overlap
        As `RooflineCost` has them; null for what the engine does.
    step_overhead_s, request_overhead_s
        Host seconds a step, and a request of the batch; null for what the profile
        says, or else for the roofline's.

    Raises
    ------
    ConfigError
        If the profile cannot be trusted, is of another GPU, or has no tables of this
        model on so many ranks in this precision.
    """

    def __init__(
        self,
        profile: str,
        *,
        model: ModelArchitecture,
        gpu: GpuSpec,
        tensor_parallel_size: int = 1,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        swap_rule: SwapRule = SwapRule(),  # noqa: B008 - frozen
        graph_rule: GraphRule = GraphRule(),  # noqa: B008 - frozen
        swap_variant: SwapVariant | None = None,
        swap_layout: KvLayout | None = None,
        swap_overlap: bool | None = None,
        step_overhead_s: float | None = None,
        request_overhead_s: float | None = None,
    ) -> None:
        self.profile = read_profile(Path(profile))
        host = self.profile.fit.get("host") or {}
        overheads: dict[str, Any] = {
            key: value
            for key, given in (
                ("step_overhead_s", step_overhead_s),
                ("request_overhead_s", request_overhead_s),
            )
            if (value := host.get(key) if given is None else given) is not None
        }
        self._rest = RooflineCost(
            model=model,
            gpu=gpu,
            tensor_parallel_size=tensor_parallel_size,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            layer_latency_s=_OTHER_KERNELS_S,
            swap_rule=swap_rule,
            swap_variant=swap_variant,
            swap_layout=swap_layout,
            swap_overlap=swap_overlap,
            **overheads,
        )
        correction = read_correction(self.profile.fit)
        entry = corrected(entry_of(self.profile, self._rest), correction)
        self.attention = Attention(self.profile.fit, entry, self._rest)
        self._attend = self.attention.at
        self._other = MeasuredRest(
            self.profile.fit, entry, self._rest, graph_rule, correction
        )
        self._counted = Counted(
            self.profile.fit, entry, self._rest, self._other, correction
        )
        self._token_parts, self._row_parts = self._counted.tokens, self._counted.rows
        self._decode_totals: Memo[Callable[[int], float]] = Memo()

    # -- one step ---------------------------------------------------------------

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step of this shape, in seconds."""
        num_decodes, context, num_prefills, num_prefill_tokens, past, pairs = shape[:6]
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        gemm_s, allreduce_s, kernels_s, alone_s, launching_s, outside, down, up = (
            self._token_parts.get(num_tokens) or self._counted.price_tokens(num_tokens)
        )
        head_s, host_s, head_down, head_up = self._row_parts.get(
            num_rows
        ) or self._counted.price_rows(num_rows)
        if num_tokens:
            down += head_down
            up += head_up
        else:
            head_s = 0.0
        prefill_s, decode_s, chunks, decodes = self._attend(
            num_decodes, context, num_prefills, num_prefill_tokens, past, pairs
        )
        more_down, more_up = self.attention.squares(
            prefill_s, decode_s, chunks, decodes
        )
        down += more_down
        up += more_up
        flag = bool(outside or chunks or decodes)
        host_s += kernels_s
        gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
        if not num_prefills:
            launching_s = alone_s
        if launching_s:
            down, up = _launched(down, up, gpu_s - launching_s)
            if launching_s > gpu_s:
                host_s += launching_s - gpu_s
        swap_s = copy_s = 0.0
        blocks = shape[6:]
        if any(blocks):
            swap_s, copy_s, beyond, more_down, more_up = self._other.moves(
                blocks, gpu_s
            )
            down += more_down
            up += more_up
            flag = flag or beyond
        gpu_parts = gemm_s, prefill_s, decode_s, head_s, allreduce_s
        return step_cost(*gpu_parts, swap_s, copy_s, host_s, flag, (down, up))

    # -- many steps -------------------------------------------------------------

    def batch_total(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_prefill_tokens: int,
        prefill_context: int,
        pairs: int,
    ) -> float:
        """Return ``total_s`` of a step that moves no blocks; see `StepPricer`."""
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        gemm_s, allreduce_s, kernels_s, alone_s, launching_s, _, _, _ = (
            self._token_parts.get(num_tokens) or self._counted.price_tokens(num_tokens)
        )
        head_s, host_s, _, _ = self._row_parts.get(
            num_rows
        ) or self._counted.price_rows(num_rows)
        if not num_tokens:
            head_s = 0.0
        prefill_s, decode_s, _, _ = self._attend(
            num_decodes,
            decode_context,
            num_prefills,
            num_prefill_tokens,
            prefill_context,
            pairs,
        )
        host_s += kernels_s
        if not num_prefills:
            launching_s = alone_s
        if launching_s:
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            if launching_s > gpu_s:
                host_s += launching_s - gpu_s
        return gemm_s + prefill_s + decode_s + head_s + allreduce_s + host_s

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        """Return ``total_s`` of steps of so many decodes, a function of their context.

        As `StepPricer.decode_total`.
        """
        total = self._decode_totals.get(num_decodes)
        if total is None:
            total = self._decode_totals.keep(
                num_decodes, self._price_decodes(num_decodes)
            )
        return total

    def _price_decodes(self, num_decodes: int) -> Callable[[int], float]:
        tokens = self._counted.price_tokens(num_decodes)
        gemm_s, allreduce_s, kernels_s, launching_s, *_ = tokens
        head_s, host_s, *_ = self._counted.price_rows(num_decodes)
        host_s += kernels_s
        if not num_decodes:
            return lambda _: host_s
        row = self.attention.decode.row(num_decodes)
        amounts = self.attention.decode.amounts

        def total(context: int) -> float:
            value, slope, start, _ = row[bisect_right(amounts, context // num_decodes)]
            decode_s = value + slope * (context - start)
            return gemm_s + decode_s + head_s + allreduce_s + host_s

        def launched(context: int) -> float:
            value, slope, start, _ = row[bisect_right(amounts, context // num_decodes)]
            decode_s = value + slope * (context - start)
            gpu_s = gemm_s + decode_s + head_s + allreduce_s + kernels_s
            late_s = launching_s - gpu_s if launching_s > gpu_s else 0.0
            return gemm_s + decode_s + head_s + allreduce_s + (host_s + late_s)

        return launched if launching_s else total

    def decode_bound(self, num_decodes: int, bound: Bound) -> Callable[[int], float]:
        """Return ``lo_s`` or ``hi_s`` of steps of so many decodes; see `StepPricer`."""
        total = self.decode_total(num_decodes)
        if not num_decodes:
            return total
        tokens = self._counted.price_tokens(num_decodes)
        if tokens.launch_decodes_s:
            return partial(self._decode_bound, num_decodes, bound)
        rows = self._counted.price_rows(num_decodes)
        place = BOUNDS.index(bound)
        sign = -1.0 if bound == "lo" else 1.0
        fixed = (tokens.down, tokens.up)[place] + (rows.down, rows.up)[place]
        shares = [width[place] for width in self.attention.decode_widths]
        seconds = self.attention.decode.at

        def at_bound(context: int) -> float:
            decode_s, beyond = seconds(num_decodes, context)
            half_s = decode_s * shares[beyond]
            return total(context) + sign * sqrt(fixed + half_s * half_s)

        return at_bound

    def _decode_bound(self, num_decodes: int, bound: Bound, context: int) -> float:
        cost = self.step(BatchShape(num_decodes, context, 0, 0, 0, 0))
        return cost.lo_s if bound == "lo" else cost.hi_s

    def columns(self, shapes: Counts) -> Seconds:
        """Return `step` of each row of `shapes`; as `StepPricer.columns`."""
        if not len(shapes):
            return np.empty((0, len(StepCost._fields)))
        decodes, _, prefills, prefill_tokens = shapes[:, :4].T
        num_tokens = decodes + prefill_tokens
        gemm_s, allreduce_s, kernels_s, alone_s, launching_s, outside, *squared = (
            self._counted.token_columns(num_tokens)
        )
        head_s, host_s, *head_squares = self._counted.row_columns(decodes + prefills)
        computes = num_tokens != 0
        head_s = np.where(computes, head_s, 0.0)
        squares = np.array(squared) + np.where(computes, head_squares, 0.0)
        found = self.attention.columns(shapes)
        prefill_s, decode_s, prefill_region, decode_region = found
        squares += self.attention.square_columns(found)
        gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
        launching_s = np.where(prefills != 0, launching_s, alone_s)
        for row in np.flatnonzero(launching_s).tolist():
            rest_s = gpu_s[row] - launching_s[row]
            squares[:, row] = _launched(
                float(squares[0, row]), float(squares[1, row]), float(rest_s)
            )
        late_s = np.where(launching_s > gpu_s, launching_s - gpu_s, 0.0)
        swap_s, copy_s, moves_beyond, more = self._other.move_columns(shapes, gpu_s)
        costs = cost_columns(
            len(shapes),
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            swap_s,
            copy_s,
            host_s + kernels_s + late_s,
            squares=squares + more,
        )
        regions = prefill_region + decode_region
        costs[:, FLAG] = (outside != 0) | (regions != 0) | moves_beyond
        return costs

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        """Return the price of moving blocks by a variant; as the roofline's."""
        return self._other.transfer(variant, load=load, layout=layout)

    def describe(self) -> dict[str, Any]:
        """Return parameters and sources, JSON-ready, for the results' provenance."""
        rest = self._rest.describe()
        empty = self._rest.step(EMPTY_SHAPE)
        keys = ("step_overhead_s", "request_overhead_s", "swap_efficiency")
        return rest | {
            "kind": "measured",
            "profile": self.profile.id,
            "source": self.profile.provenance.get("source"),
            "bounds": True,
            "intervals_percent": self.profile.fit.get("intervals", {}),
            "empty_step_s": empty.total_s,
            "parameters": {key: rest["parameters"][key] for key in keys},
            "step_correction": self.profile.fit.get("step_correction"),
            "rest": self._other.describe(),
        }


def _launched(down: float, up: float, rest_s: float) -> tuple[float, float]:
    """Return the squares of the width where launching kernels bounds a step.

    Parameters
    ----------
    down, up
        Squares of the width of the GPU's operations.
    rest_s
        By how much these outlast the launches, below zero if they do not.
    """
    if rest_s <= 0.0:
        late_s = sqrt(up) + rest_s
        return 0.0, late_s * late_s if late_s > 0.0 else 0.0
    return min(down, rest_s * rest_s), up
