"""From a profile to the tables that price the steps of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.costs.measured_tables import (
    BOOST,
    Curve,
    Surface,
    geometry_of,
    linear_elements,
    read_surface,
    weight_bits_of,
)
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from sim.costs.roofline import RooflineCost
    from sim.profile import Profile

    Seconds = NDArray[np.float64]


def entry_of(profile: Profile, rest: RooflineCost) -> Mapping[str, Any]:
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


def kv_key_s(rest: RooflineCost) -> float:
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


def decode_surface(tables: Mapping[str, Any], rest: RooflineCost) -> Surface:
    """Return seconds of all layers over decodes and their mean context."""
    amounts = np.array(next(iter(tables.values()))["amounts"], float)
    key_s = kv_key_s(rest) / rest.model.num_hidden_layers

    def floor(counts: Seconds, window: int) -> Seconds:
        seen = np.minimum(amounts, window) if window else amounts
        least: Seconds = counts * seen * key_s
        return least

    return Surface(*_over_layers(tables, rest, floor))


def prefill_surface(tables: Mapping[str, Any], rest: RooflineCost) -> Surface:
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


def token_curves(
    table: Mapping[str, Any], rest: RooflineCost
) -> tuple[Curve, Curve | None]:
    """Return seconds of products, and of collectives if there are, over tokens."""
    tokens, beyond = table["tokens"], table["beyond"]
    elements = linear_elements(rest.model, rest.tensor_parallel_size)
    bits = weight_bits_of(rest.model)
    peak = rest.gpu.bf16_flops_per_s
    if bits < 16:
        peak = (rest.gpu.fp8_flops_per_s or peak) * (2.0 if bits < 8 else 1.0)
    weights_s = elements * bits / 8 / rest.gpu.memory_bandwidth_bytes_per_s
    floors = [max(weights_s, 2.0 * elements * m / peak) / BOOST for m in tokens]
    seconds = [max(s, f) for s, f in zip(table["gemm_s"], floors, strict=True)]
    reduce_s = table.get("allreduce_s")
    collectives = Curve(tokens, reduce_s, beyond) if reduce_s else None
    return Curve(tokens, seconds, beyond), collectives
