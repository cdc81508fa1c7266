"""Seconds of a step from tables of measured kernels: a profile, fitted for a model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable  # noqa: TC003 - `sim.plug` resolves annotations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.architecture import ModelArchitecture  # noqa: TC001 - as above
from sim.cost import EMPTY_SHAPE, BatchShape, StepCost
from sim.costs.measured_tables import (
    BOOST,
    Curve,
    Surface,
    geometry_of,
    linear_elements,
    read_surface,
    weight_bits_of,
)
from sim.costs.parts import Memo, cost_columns, step_cost
from sim.costs.roofline import RooflineCost
from sim.errors import ConfigError
from sim.hardware import GpuSpec  # noqa: TC001 - as above
from sim.profile import read_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from sim.costs.transfers import Transfer
    from sim.generations import KvLayout, SwapVariant
    from sim.profile import Profile

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
        head_s, swap_s,      the datasheet's, as `RooflineCost` has them
        copy_s
        host_s               host a step and a request, and the kernels between

    The sum of contexts decides what decodes cost, never the longest one. Tables hold
    no chunk with a past; such a chunk costs what a fresh one with as many query-key
    pairs costs, and says `extrapolated`, as do swaps, copies and everything outside
    the measured shapes. Times below the physical floor are raised to it when the
    tables are read.

    Parameters
    ----------
    profile
        Path of a kvprofile/1 file that was fitted for this model.
    model, gpu, tensor_parallel_size, block_size, kv_cache_dtype
        Injected from the engine's configuration.
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
            **overheads,
        )
        entry = _entry_of(self.profile, self._rest)
        self._decode = _decode_surface(entry["decode"], self._rest)
        self._prefill = _prefill_surface(entry["prefill"], self._rest)
        self._key_s = _kv_key_s(self._rest)
        self._read_tokens(entry["tokens"])
        one = BatchShape(0, 0, 0, 0, 0, 0, 1, 0, 1)
        moved = self._rest.step(one)
        self._swap_block_s, self._copy_block_s = moved.swap_s, moved.copy_s
        self._token_parts: Memo[tuple[float, float, float, bool]] = Memo()
        self._row_parts: Memo[tuple[float, float]] = Memo()
        self._decode_totals: Memo[Callable[[int], float]] = Memo()

    def _read_tokens(self, table: Mapping[str, Any]) -> None:
        tokens, beyond = table["tokens"], table["beyond"]
        rest = self._rest
        elements = linear_elements(rest.model, rest.tensor_parallel_size)
        bits = weight_bits_of(rest.model)
        peak = rest.gpu.bf16_flops_per_s
        if bits < 16:
            peak = (rest.gpu.fp8_flops_per_s or peak) * (2.0 if bits < 8 else 1.0)
        weights_s = elements * bits / 8 / rest.gpu.memory_bandwidth_bytes_per_s
        floors = [max(weights_s, 2.0 * elements * m / peak) / BOOST for m in tokens]
        seconds = [max(s, f) for s, f in zip(table["gemm_s"], floors, strict=True)]
        self._gemm = Curve(tokens, seconds, beyond)
        reduce_s = table.get("allreduce_s")
        self._allreduce = Curve(tokens, reduce_s, beyond) if reduce_s else None

    # -- one step ---------------------------------------------------------------

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step of this shape, in seconds."""
        (
            num_decodes,
            decode_context,
            num_prefills,
            num_prefill_tokens,
            prefill_context,
            pairs,
            num_swapped_in,
            num_swapped_out,
            num_copied,
        ) = shape
        num_tokens = num_decodes + num_prefill_tokens
        num_rows = num_decodes + num_prefills
        gemm_s, allreduce_s, kernels_s, outside = self._token_parts.get(
            num_tokens
        ) or self._price_tokens(num_tokens)
        head_s, host_s = self._row_parts.get(num_rows) or self._price_rows(num_rows)
        prefill_s = decode_s = 0.0
        if not num_tokens:
            head_s = 0.0
        elif num_prefills:
            prefill_s, beyond = self._prefill.at(num_prefills, pairs)
            read_s = self._key_s * prefill_context
            prefill_s = max(prefill_s, read_s)
            outside = outside or beyond or prefill_context != num_prefill_tokens
        if num_decodes:
            decode_s, beyond = self._decode.at(num_decodes, decode_context)
            outside = outside or beyond
        num_swapped = num_swapped_in + num_swapped_out
        return step_cost(
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            self._swap_block_s * num_swapped,
            self._copy_block_s * num_copied,
            host_s + kernels_s,
            bool(outside or num_swapped or num_copied),
        )

    def _price_tokens(self, num_tokens: int) -> tuple[float, float, float, bool]:
        """Return seconds of products, collectives and other kernels, and the flag."""
        parts = 0.0, 0.0, 0.0, False
        if num_tokens:
            gemm_s, allreduce_s, kernels_s = self._rest.token_parts(num_tokens)
            if self._rest.model.num_experts:
                outside = True  # experts are not in the tables
            else:
                gemm_s, outside = self._gemm.at(num_tokens)
            if self._allreduce is not None:
                allreduce_s, _ = self._allreduce.at(num_tokens)
            parts = gemm_s, allreduce_s, kernels_s, outside
        return self._token_parts.keep(num_tokens, parts)

    def _price_rows(self, num_rows: int) -> tuple[float, float]:
        return self._row_parts.keep(num_rows, self._rest.row_parts(num_rows))

    def bounds(self, shape: BatchShape) -> tuple[float, float]:
        """Return seconds between which nine steps of ten of this shape should lie.

        The errors of an operation are the same in every layer, those of different
        operations independent: half-widths add as squares. Host time has none.
        """
        cost = self.step(shape)
        squares = 0.0
        for operation, seconds in (
            ("gemm", cost.gemm_s),
            ("decode_attention", cost.decode_attention_s),
            ("prefill_attention", cost.prefill_attention_s),
            ("allreduce", cost.allreduce_s),
        ):
            inside, beyond = self.profile.fit["intervals"].get(operation, (0.0, 0.0))
            share = (max(inside, beyond) if cost.extrapolated else inside) / 100.0
            squares += (seconds * share) ** 2
        half = min(squares**0.5, cost.total_s - cost.host_s)
        return cost.total_s - half, cost.total_s + half

    # -- many steps -------------------------------------------------------------

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
        gemm_s, allreduce_s, kernels_s, _ = self._price_tokens(num_decodes)
        head_s, host_s = self._price_rows(num_decodes)
        if not num_decodes:
            empty_s = host_s + kernels_s
            return lambda _: empty_s
        host_s += kernels_s
        values, slopes, _ = self._decode.row(num_decodes)
        amounts = self._decode.amounts

        def total(context: int) -> float:
            j = bisect_right(amounts, context // num_decodes) - 1
            if j < 0:
                decode_s = values[0]
            else:
                decode_s = values[j] + slopes[j] * (context - num_decodes * amounts[j])
            return gemm_s + decode_s + head_s + allreduce_s + host_s

        return total

    def columns(self, shapes: Counts) -> Seconds:
        """Return `step` of each row of `shapes`; as `StepPricer.columns`."""
        if not len(shapes):
            return np.empty((0, len(StepCost._fields)))
        decodes, context, prefills, prefill_tokens, past, pairs, *moved = shapes.T
        num_tokens, num_rows = decodes + prefill_tokens, decodes + prefills
        gemm_s, allreduce_s, kernels_s, outside = self._token_columns(num_tokens)
        head_s, host_s = self._row_columns(num_rows)
        computes = num_tokens != 0
        chunks = np.where(computes, prefills, 0)
        prefill_s, prefill_beyond = self._prefill.column(chunks, pairs)
        read_s = np.where(chunks != 0, self._key_s * past, 0.0)
        decode_s, decode_beyond = self._decode.column(decodes, context)
        swapped, copied = moved[0] + moved[1], moved[2]
        found = cost_columns(
            len(shapes),
            gemm_s,
            np.maximum(prefill_s, read_s),
            decode_s,
            np.where(computes, head_s, 0.0),
            allreduce_s,
            self._swap_block_s * swapped,
            self._copy_block_s * copied,
            host_s + kernels_s,
        )
        flags = (outside != 0) | (prefill_beyond != 0) | (decode_beyond != 0)
        flags |= (chunks != 0) & (past != prefill_tokens)
        found[:, -1] = flags | (swapped != 0) | (copied != 0)
        return found

    def _token_columns(self, counts: Counts) -> Seconds:
        distinct, places = np.unique(counts, return_inverse=True)
        parts = [
            self._token_parts.get(count) or self._price_tokens(count)
            for count in distinct.tolist()
        ]
        return np.array(parts, np.float64).T[:, places]

    def _row_columns(self, counts: Counts) -> Seconds:
        distinct, places = np.unique(counts, return_inverse=True)
        parts = [
            self._row_parts.get(count) or self._price_rows(count)
            for count in distinct.tolist()
        ]
        return np.array(parts, np.float64).T[:, places]

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        """Return the price of moving blocks by a variant; as the roofline's."""
        return self._rest.transfer(variant, load=load, layout=layout)

    def describe(self) -> dict[str, Any]:
        """Return parameters and sources, JSON-ready, for the results' provenance."""
        rest = self._rest.describe()
        empty = self._rest.step(EMPTY_SHAPE)
        keys = ("step_overhead_s", "request_overhead_s", "swap_efficiency")
        return rest | {
            "kind": "measured",
            "profile": self.profile.id,
            "source": self.profile.provenance.get("source"),
            "intervals_percent": self.profile.fit.get("intervals", {}),
            "empty_step_s": empty.total_s,
            "parameters": {key: rest["parameters"][key] for key in keys},
        }


def _entry_of(profile: Profile, rest: RooflineCost) -> Mapping[str, Any]:
    """Return the tables for the model, ranks and precision of `rest`."""
    device = profile.device.get("name")
    if device != rest.gpu.name:
        raise ConfigError(
            f"profile is of {device}, but engine.gpu is {rest.gpu.name}: use one of "
            "that GPU, or set engine.gpu"
        )
    wanted = geometry_of(
        rest.model, rest.tensor_parallel_size, rest.kv_itemsize_bytes()
    )
    entries = profile.fit.get("models") or []
    for entry in entries:
        if entry.get("geometry") == wanted:
            found: Mapping[str, Any] = entry
            return found
    there = sorted(
        f"{e.get('model')} on {e.get('geometry', {}).get('tensor_parallel_size')}"
        for e in entries
    )
    raise ConfigError(
        f"profile has no tables of {rest.model.name} on {rest.tensor_parallel_size} "
        f"ranks with a {8 * rest.kv_itemsize_bytes()}-bit KV cache; it has "
        f"{', '.join(sorted(set(there))) or 'none'}: import it with --model "
        f"{rest.model.name}"
    )


def _kv_key_s(rest: RooflineCost) -> float:
    """Return the least seconds to read a token's KV in all layers."""
    token_bytes = rest.model.kv_bytes_per_token(
        rest.tensor_parallel_size, rest.kv_itemsize_bytes()
    )
    return token_bytes / rest.gpu.memory_bandwidth_bytes_per_s / BOOST


def _over_layers(
    tables: Mapping[str, Any],
    rest: RooflineCost,
    floor: Callable[[Seconds, int], Seconds],
) -> tuple[list[int], list[int], Seconds, NDArray[np.bool_]]:
    """Return nodes, and seconds of all layers, raised to the floor of each kind."""
    model = rest.model
    num_sliding = model.num_sliding_layers if model.sliding_window else 0
    layers = {0: model.num_hidden_layers - num_sliding}
    if num_sliding:
        layers[model.sliding_window or 0] = num_sliding
    total: Any = 0.0
    outside: Any = False
    for window, count in layers.items():
        where = f"profile: table of window {window}"
        if str(window) not in tables:
            raise ConfigError(f"{where} is missing; import it with --model again")
        counts, amounts, seconds, beyond = read_surface(tables[str(window)], where)
        grid = np.outer(np.array(counts, float), np.ones(len(amounts)))
        least = floor(grid, window)
        total = total + count * np.maximum(seconds, least)
        outside = outside | (beyond if count else np.zeros_like(beyond))
    return counts, amounts, total, outside


def _decode_surface(tables: Mapping[str, Any], rest: RooflineCost) -> Surface:
    amounts = np.array(next(iter(tables.values()))["amounts"], float)
    key_s = _kv_key_s(rest) / rest.model.num_hidden_layers

    def floor(counts: Seconds, window: int) -> Seconds:
        seen = np.minimum(amounts, window) if window else amounts
        least: Seconds = counts * seen * key_s
        return least

    return Surface(*_over_layers(tables, rest, floor))


def _prefill_surface(tables: Mapping[str, Any], rest: RooflineCost) -> Surface:
    """Return seconds over query-key pairs of a chunk without a past."""
    model = rest.model
    query = np.array(next(iter(tables.values()))["amounts"], np.int64)
    heads = model.num_attention_heads / rest.tensor_parallel_size
    pair_s = 4.0 * heads * model.head_dim / rest.gpu.bf16_flops_per_s / BOOST

    def floor(counts: Seconds, window: int) -> Seconds:
        ramp = np.minimum(query, window) if window else query
        pairs = ramp * (ramp + 1) // 2 + (query - ramp) * ramp
        least: Seconds = counts * pairs * pair_s
        return least

    counts, queries, seconds, beyond = _over_layers(tables, rest, floor)
    return Surface(counts, [q * (q + 1) // 2 for q in queries], seconds, beyond)
