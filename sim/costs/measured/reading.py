"""From a profile to the tables that price the steps of one model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.costs.measured.geometry import (
    geometry_of,
    linear_elements,
    state_geometry,
    weight_bits_of,
)
from sim.costs.measured.profile import DRY_RUN
from sim.costs.measured.tables import (
    BesideFactor,
    ChosenLayers,
    Curve,
    PastFactor,
    Surface,
    UnlikeLayers,
    read_table,
)
from sim.costs.roofline.volumes import pair_flops
from sim.errors import ConfigError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from sim.costs.measured.profile import Profile
    from sim.costs.roofline import RooflineCost
    from sim.hardware.models.architecture import ModelArchitecture

    Seconds = NDArray[np.float64]
    Flags = NDArray[np.bool_]


BOOST: Final = 1.1
"""Over the datasheet's peak by so much is still believed: clocks boost."""


@contextmanager
def whole_tables(model: ModelArchitecture) -> Iterator[None]:
    """Refuse in one line what has another shape than tables that were fitted."""
    try:
        with np.errstate(over="raise", invalid="raise"):
            yield
    except UserError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        told = " ".join(f"{type(error).__name__} {error}".split())[:60]
        raise ConfigError(
            f"profile: the tables of {model.name} are damaged ({told}); fit the "
            "profile again"
        ) from error


def entry_of(profile: Profile, rest: RooflineCost) -> Mapping[str, Any]:
    """Return the tables for the model, ranks and precision of `rest`."""
    if profile.kind == DRY_RUN:
        raise ConfigError(
            "profile is of a dry run, whose times are made up: price steps by one that "
            "was measured or imported, or by cost: {kind: roofline}"
        )
    device = profile.fit.get("gpu") or profile.device.get("name")
    if device != rest.gpu.name:
        raise ConfigError(
            f"profile is of {device}, but engine.gpu is {rest.gpu.name}: use one of "
            "that GPU, or set engine.gpu"
        )
    wanted = geometry_of(
        rest.model, rest.tensor_parallel_size, rest.kv_itemsize_bytes()
    )
    entries: list[Mapping[str, Any]] = profile.fit.get("models") or []
    for entry in entries:
        if entry["geometry"] == wanted:
            return entry
    there = sorted(
        f"{e.get('model')} on {e['geometry'].get('tensor_parallel_size')}"
        for e in entries
    )
    remedy = f"import it with --model {rest.model.name}"
    if any(e.get("model") == rest.model.name for e in entries):
        remedy = (
            "set engine.tensor_parallel_size, quantization and kv_cache_dtype to its, "
            "or take a profile of these"
        )
    raise ConfigError(
        f"profile has no tables of {rest.model.name} on {rest.tensor_parallel_size} "
        f"ranks with a {8 * rest.kv_itemsize_bytes()}-bit KV cache; it has "
        f"{', '.join(sorted(set(there))) or 'none'}: {remedy}"
    )


_TIMES: Final = frozenset({"time_s", "gemm_s", "allreduce_s"})
"""Keys of the tables that hold seconds."""


def read_correction(fit: Mapping[str, Any]) -> float:
    """Return the factor of whole measured steps on the GPU's operations, or 1."""
    factor = (fit.get("step_correction") or {}).get("factor", 1.0)
    if not isinstance(factor, int | float) or not 0.25 <= factor <= 4.0:
        raise ConfigError(
            "profile: step_correction.factor must be a number from 0.25 to 4; got "
            f"{factor!r}: fit the profile again"
        )
    return float(factor)


def corrected(entry: Mapping[str, Any], factor: float) -> Mapping[str, Any]:
    if factor == 1.0:
        return entry
    return {
        key: _scaled(value, factor)
        if key in _TIMES
        else corrected(value, factor)
        if isinstance(value, dict)
        else value
        for key, value in entry.items()
    }


def _scaled(seconds: Any, factor: float) -> Any:
    if isinstance(seconds, list):
        return [_scaled(value, factor) for value in seconds]
    return seconds * factor


def kv_key_s(rest: RooflineCost) -> float:
    """Return the least seconds to read a token's KV in the layers that see all of it.

    Layers with a window read no more than that, however long the context, and layers
    that choose what they read no more than they chose.
    """
    if rest.model.index_topk:
        return 0.0
    return _layer_key_s(rest) * _layers_of(rest)[0]


def _layer_key_s(rest: RooflineCost) -> float:
    layer_bytes = rest.model.kv_bytes_per_layer(
        rest.tensor_parallel_size, rest.kv_itemsize_bytes()
    )
    return layer_bytes / rest.gpu.memory_bandwidth_bytes_per_s / BOOST


def _over_layers(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    floor: Callable[[Seconds, int], Seconds],
) -> tuple[list[int], list[int], Seconds, NDArray[np.bool_]]:
    """Return nodes, and seconds of all layers, raised to the floor of each kind."""
    total: Any = 0.0
    outside: Any = False
    for window, count in layers.items():
        where = f"profile: table of window {window}"
        if str(window) not in tables:
            raise ConfigError(f"{where} is missing; import it with --model again")
        counts, amounts, seconds, beyond = _read_surface(tables[str(window)], where)
        grid = np.outer(np.array(counts, float), np.ones(len(amounts)))
        least = floor(grid, window)
        total = total + count * np.maximum(seconds, least)
        outside = outside | (beyond if count else np.zeros_like(beyond))
    return counts, amounts, total, outside


def _layers_of(rest: RooflineCost) -> dict[int, int]:
    """Return the attention layers of each window; 0 is a layer that sees all."""
    model = rest.model
    num_sliding = model.num_sliding_layers if model.sliding_window else 0
    layers = {0: model.num_attention_layers - num_sliding}
    if num_sliding:
        layers[model.sliding_window or 0] = num_sliding
    return layers


def read_states(
    entry: Mapping[str, Any], rest: RooflineCost
) -> tuple[Curve, Surface] | None:
    """Return states of decodes, and of chunks over count and tokens; None without."""
    tables = entry.get("states") or {}
    wanted = state_geometry(rest.model, rest.tensor_parallel_size)
    if tables.get("geometry") != wanted:
        return None
    where = "profile: states"
    (counts,), seconds, beyond = read_table(tables["decode"], ("counts",), where)
    chunks = _read_surface(tables["prefill"], where)
    return Curve(counts, seconds.tolist(), beyond.tolist()), Surface(*chunks)


def decode_surface(
    tables: Mapping[str, Any], rest: RooflineCost, states: Curve | None = None
) -> Surface:
    """Return seconds of all layers over decodes and their mean context.

    `states` are those of layers that have one, by the number of decodes; without them
    the datasheet's.
    """
    context = np.array(next(iter(tables.values()))["amounts"], float)
    key_s = _layer_key_s(rest)

    def floor(counts: Seconds, window: int) -> Seconds:
        seen = np.minimum(context, window) if window else context
        least: Seconds = counts * seen * key_s
        return least

    counts, amounts, seconds, beyond = _over_layers(tables, _layers_of(rest), floor)
    if rest.model.index_topk:
        amounts, seconds, beyond = _as_chosen(counts, amounts, seconds, beyond, rest)
    if states is not None:
        each, outside = zip(*map(states.at, counts), strict=True)
        seconds = seconds + np.array(each)[:, None]
        beyond = beyond | np.array(outside)[:, None]
    elif rest.mixture is not None and rest.model.num_state_layers:
        seconds = seconds + rest.mixture.states.sequence_s * np.array(counts)[:, None]
        beyond = np.ones_like(beyond)
    return Surface(counts, amounts, seconds, beyond)


def _as_chosen(
    counts: list[int],
    amounts: list[int],
    seconds: Seconds,
    beyond: Flags,
    rest: RooflineCost,
) -> tuple[list[int], Seconds, Flags]:
    """Return decodes that read as many latents as were chosen, and the indexer's keys.

    The datasheet prices the indexer. As many as are chosen become a node.
    """
    assert rest.mixture is not None
    topk, indexer = rest.model.index_topk, rest.mixture.groups[0]
    nodes = sorted({*amounts, topk})
    read = np.minimum(nodes, topk)
    chosen = np.array([np.interp(read, amounts, row) for row in seconds])
    found = chosen + indexer.kv_token_s * np.outer(counts, nodes)
    places = np.minimum(np.searchsorted(amounts, read), len(amounts) - 1)
    return nodes, found, beyond[:, places]


def prefill_surface(tables: Mapping[str, Any], rest: RooflineCost) -> Surface:
    """Return seconds over query-key pairs of a chunk without a past.

    Where layers differ, of those that see all alone; see `unlike_layers`.
    """
    layers = _layers_of(rest)
    if rest.mixture is not None:
        layers = {0: 0 if rest.model.index_topk else layers[0]}
    counts, queries, seconds, beyond = _chunks_of(tables, rest, layers)
    return Surface(counts, [q * (q + 1) // 2 for q in queries], seconds, beyond)


def unlike_layers(
    tables: Mapping[str, Any], rest: RooflineCost, states: Surface | None = None
) -> UnlikeLayers | ChosenLayers | None:
    """Return the price of chunks in layers that do not see all; None without such."""
    if rest.mixture is None:
        return None
    if rest.model.index_topk:
        return ChosenLayers(rest.mixture)
    found = []
    for group in rest.mixture.groups:
        if group.window:
            layers = {group.window: _layers_of(rest)[group.window]}
            counts, queries, seconds, beyond = _chunks_of(tables, rest, layers)
            seen = [int(group.seen(1, q, q, q * (q + 1) // 2)[1]) for q in queries]
            found.append((group, Surface(counts, seen, seconds, beyond)))
    return UnlikeLayers(found, rest.mixture.states if states is None else states)


def _chunks_of(
    tables: Mapping[str, Any], rest: RooflineCost, layers: Mapping[int, int]
) -> tuple[list[int], list[int], Seconds, NDArray[np.bool_]]:
    """Return nodes, and seconds of chunks in these layers, raised to the floor."""
    model = rest.model
    query = np.array(next(iter(tables.values()))["amounts"], np.int64)
    peak = rest.gpu.bf16_flops_per_s
    if rest.kv_itemsize_bytes() == 1:  # kernels may multiply in this precision, too
        peak = rest.gpu.fp8_flops_per_s or peak
    pair_s = pair_flops(model, rest.tensor_parallel_size) / peak / BOOST

    def floor(counts: Seconds, window: int) -> Seconds:
        ramp = np.minimum(query, window) if window else query
        pairs = ramp * (ramp + 1) // 2 + (query - ramp) * ramp
        if window and model.chunked_attention:
            pairs = pairs // 2
        least: Seconds = counts * pairs * pair_s
        return least

    return _over_layers(tables, layers, floor)


def past_factor(
    entry: Mapping[str, Any], rest: RooflineCost, prefill: Surface
) -> PastFactor | None:
    """Return the factor of a past on a chunk; None where it was not measured."""
    tables = entry.get("prefill_past")
    if tables is None or rest.model.index_topk:
        return None

    def fresh(pairs: int) -> float:
        return prefill.at(1, pairs)[0]

    return read_past(tables, _layers_of(rest), fresh)


def beside_factor(
    entry: Mapping[str, Any],
    rest: RooflineCost,
    past: PastFactor | None,
    prefill: Surface,
    decode: Surface,
) -> BesideFactor | None:
    """Return the factor of chunks and decodes side by side; None if not measured."""
    tables = entry.get("mixed")
    if tables is None or rest.model.index_topk:
        return None
    key_s = kv_key_s(rest)

    def chunk(query: int, before: int) -> float:
        seconds, _ = prefill.at(1, pairs_of(query, before))
        if past is not None and before:
            seconds *= past.at(float(query), float(before))[0]
        return max(seconds, key_s * (query + before))

    def decodes(count: int, context: int) -> float:
        return decode.at(count, count * context)[0]

    return read_beside(tables, _layers_of(rest), chunk, decodes, key_s)


def token_curves(
    table: Mapping[str, Any], rest: RooflineCost
) -> tuple[Curve, Curve | None]:
    """Return seconds of products, and of collectives if there are, over tokens."""
    (tokens,), gemm_s, flags = read_table(
        table, ("tokens",), "profile: tokens", "gemm_s"
    )
    _check([tokens], gemm_s, flags, "tokens")
    beyond = flags.tolist()
    elements = linear_elements(rest.model, rest.tensor_parallel_size)
    bits = weight_bits_of(rest.model)
    peak = rest.gpu.bf16_flops_per_s
    if bits < 16:
        peak = (rest.gpu.fp8_flops_per_s or peak) * (2.0 if bits < 8 else 1.0)
    weights_s = elements * bits / 8 / rest.gpu.memory_bandwidth_bytes_per_s
    floors = [max(weights_s, 2.0 * elements * m / peak) / BOOST for m in tokens]
    seconds = [max(s, f) for s, f in zip(gemm_s.tolist(), floors, strict=True)]
    collectives = None
    if table.get("allreduce_s"):
        where = "collectives of tokens"
        _, reduce_s, _ = read_table(
            table, ("tokens",), f"profile: {where}", "allreduce_s"
        )
        _check([tokens], reduce_s, flags, where)
        collectives = Curve(tokens, reduce_s.tolist(), beyond)
    return Curve(tokens, seconds, beyond), collectives


def _read_surface(table: Mapping[str, Any], where: str) -> tuple[Any, Any, Any, Any]:
    (counts, amounts), seconds, beyond = read_table(table, ("counts", "amounts"), where)
    shape = len(counts), len(amounts)
    if min(shape) < 2 or seconds.shape != shape or beyond.shape != shape:
        raise ConfigError(f"{where} must be at least 2 x 2; got {seconds.shape}")
    if min(*np.diff(counts), *np.diff(amounts), counts[0], amounts[0]) < 1:
        raise ConfigError(f"{where}: nodes must be above zero and ascend")
    if not (np.isfinite(seconds).all() and (seconds > 0.0).all()):
        raise ConfigError(f"{where} must hold finite seconds > 0")
    return counts, amounts, seconds, beyond


def read_past(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    fresh: Callable[[int], float],
) -> PastFactor:
    """Return the factors that the tables of an entry say."""
    axes = ("queries", "pasts")
    (queries, pasts), seconds, beyond = _read(tables, layers, axes, "prefill_past")
    alone = np.array([[fresh(pairs_of(q, p)) for p in pasts] for q in queries])
    return PastFactor(queries, pasts, seconds / alone, beyond)


def read_beside(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    chunk: Callable[[int, int], float],
    decodes: Callable[[int, int], float],
    key_s: float,
) -> BesideFactor:
    """Return the factors of chunks beside decodes; as `read_past`."""
    names = ("queries", "pasts", "num_decodes", "contexts")
    axes, seconds, beyond = _read(tables, layers, names, "mixed")
    queries, pasts, counts, contexts = axes
    q, p, n, k = np.ix_(*map(np.array, axes))
    seconds = np.maximum(seconds, key_s * (q + p + n * k))
    chunks = np.array([[chunk(q, p) for p in pasts] for q in queries])
    rows = np.array([[decodes(n, k) for k in contexts] for n in counts])
    alone = chunks[:, :, None, None] + rows[None, None, :, :]
    return BesideFactor((queries, pasts, counts, contexts), seconds / alone, beyond)


def pairs_of(query: int, past: int) -> int:
    return query * past + query * (query + 1) // 2


def _read(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    names: tuple[str, ...],
    where: str,
) -> tuple[list[list[int]], Seconds, Flags]:
    total: Any = 0.0
    outside: Any = False
    axes: list[list[int]] = []
    for window, count in layers.items():
        table = f"profile: {where} of window {window}"
        if str(window) not in tables:
            raise ConfigError(
                f"{table} is no table ('{window}'); fit the profile again"
            )
        axes, seconds, beyond = read_table(tables[str(window)], names, table)
        _check(axes, seconds, beyond, where)
        total = total + count * seconds
        outside = outside | (beyond if count else np.zeros_like(beyond))
    return axes, total, outside


def _check(axes: list[list[int]], seconds: Seconds, beyond: Flags, where: str) -> None:
    shape = tuple(map(len, axes))
    if min(shape) < 2 or seconds.shape != shape or beyond.shape != shape:
        raise ConfigError(
            f"profile: {where} must be at least 2 along each axis, one value a node; "
            f"got {seconds.shape}: fit the profile again"
        )
    if any(min(np.diff(axis)) < 1 or axis[0] < 0 for axis in axes):
        raise ConfigError(f"profile: {where}: nodes must be >= 0 and ascend")
    if not (np.isfinite(seconds).all() and (seconds > 0.0).all()):
        raise ConfigError(f"profile: {where} must hold finite seconds > 0")
