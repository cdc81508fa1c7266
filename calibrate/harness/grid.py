"""Which points are timed: a grid for each operation, in three sizes.

The grid is a function of the preset, the model's geometry and what the device holds;
nothing else. Corners that do not fit are pulled in, not dropped: the largest shape that
fits is always there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calibrate.measurement import OPERATIONS, Point, curve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from calibrate.harness.geometry import Geometry
    from calibrate.measurement import Curve

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Preset:
    """The values of each axis, and how often each point is visited."""

    rounds: int
    samples: int
    """Samples of a metric in one round."""
    adaptive_share: float
    """Points added where neighbours disagree, at most this share of the grid."""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    pasts: tuple[int, ...]
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    page_sizes: tuple[int, ...]
    directions: tuple[str, ...]
    memories: tuple[str, ...]
    blocks: tuple[int, ...]
    num_attention_variants: int
    """Best variants of an attention that are timed; the rest are left out."""
    geometries: tuple[tuple[int, int], ...] = ()
    """Heads and KV heads besides the model's own."""


DEFAULT = Preset(
    rounds=3,
    samples=10,
    adaptive_share=0.2,
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    contexts=(16, 128, 512, 2048, 8192, 32768, 131072),
    queries=(16, 64, 256, 1024, 2048, 4096, 8192),
    pasts=(0, 1024, 8192, 32768, 114688),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    pages=(1, 4, 16, 64, 256, 1024, 4096, 16384),
    page_sizes=(4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB),
    directions=("h2d", "d2h"),
    memories=("pinned",),
    blocks=(1, 4, 16, 64, 256, 1024),
    num_attention_variants=2,
)

PRESETS: Mapping[str, Preset] = {
    "quick": replace(
        DEFAULT,
        rounds=1,
        samples=20,
        adaptive_share=0.0,
        batches=(1, 16, 64, 256),
        contexts=(128, 2048, 16384),
        queries=(64, 1024, 8192),
        pasts=(0, 8192),
        tokens=(1, 16, 128, 1024, 8192),
        pages=(1, 64, 4096),
        page_sizes=(32 * KIB,),
        blocks=(1, 32, 1024),
        num_attention_variants=1,
    ),
    "default": DEFAULT,
    "extended": replace(
        DEFAULT,
        rounds=3,
        contexts=(16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
        pages=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536),
        page_sizes=(4 * KIB, 32 * KIB, 64 * KIB, 2 * MIB),
        directions=("h2d", "d2h", "both"),
        memories=("pinned", "pageable"),
        num_attention_variants=3,
        geometries=((32, 8), (8, 1), (16, 2), (64, 8)),
    ),
}
"""Sizes of the grid by name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device and the host hold, for the grid to stay inside."""

    kv_tokens_bytes: int
    """Bytes of one layer's KV that a batch may hold: a third of the arena."""
    transfer_bytes: int
    """Bytes of one transfer."""
    pool_bytes: int
    """Bytes of a pool over all layers, for block copies."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one operation is timed."""

    operation: str
    variant: str
    backend: str


def build_grid(
    preset: Preset, geometry: Geometry, limits: Limits, choices: Sequence[Choice]
) -> list[Point]:
    """Return the points, each once, in a fixed order; of `choices` the best first."""
    makers = {
        "decode_attention": _decodes,
        "prefill_attention": _prefills,
        "mixed_attention": _mixed,
        "swap": _swaps,
        "copy_blocks": _copies,
        "gemm": _gemms,
        "sampler": _samplers,
        "launch": _launches,
    }
    points: dict[Point, None] = {}
    for operation in OPERATIONS:
        chosen = [choice for choice in choices if choice.operation == operation]
        if operation.endswith("_attention"):
            chosen = chosen[: preset.num_attention_variants]
        maker = makers.get(operation, _per_token)
        for choice in chosen:
            points.update(
                dict.fromkeys(maker(preset, geometry, limits, choice)),
            )
    return list(points)


def _points(at: Curve, values: Iterable[tuple[int, ...]]) -> Iterator[Point]:
    return (Point(at, value) for value in dict.fromkeys(values))


def _attention_curves(
    preset: Preset, geometry: Geometry, choice: Choice
) -> Iterator[tuple[Curve, int]]:
    """Yield each geometry's curve, and the bytes of a token."""
    own = (geometry.num_heads, geometry.num_kv_heads)
    for heads, kv_heads in dict.fromkeys((own, *preset.geometries)):
        constants = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": geometry.head_dim,
            "block_size": geometry.block_size,
        }
        at = curve(choice.operation, choice.variant, geometry.dtype, constants)
        yield at, 2 * kv_heads * geometry.head_dim * geometry.itemsize


def _decodes(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    """Yield even batches, then skewed ones: one long sequence holds half of the sum."""
    for at, token_bytes in _attention_curves(preset, geometry, choice):
        most = limits.kv_tokens_bytes // token_bytes
        values = []
        for batch, context in itertools.product(preset.batches, preset.contexts):
            fitting = min(context, most // batch)
            if fitting >= 1:
                values.append((batch, batch * fitting, fitting))
        for batch in preset.batches[3::2]:
            short = min(1024, most // (2 * batch))
            if short >= 1:
                longest = short * (batch - 1)
                values.append((batch, 2 * longest, longest))
        yield from _points(at, values)


def _prefills(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    for at, token_bytes in _attention_curves(preset, geometry, choice):
        most = limits.kv_tokens_bytes // token_bytes
        values = (
            (query, min(past, most - query))
            for query, past in itertools.product(preset.queries, preset.pasts)
            if query <= most
        )
        yield from _points(at, values)


def _mixed(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    for at, token_bytes in _attention_curves(preset, geometry, choice):
        most = limits.kv_tokens_bytes // token_bytes
        shapes = itertools.product(
            preset.queries[2::2] or preset.queries[-1:],
            preset.pasts[:2],
            preset.batches[2::3],
        )
        values = (
            (query, past, batch, batch * context)
            for (query, past, batch), context in itertools.product(shapes, (512, 4096))
            if query + past + batch * context <= most
        )
        yield from _points(at, values)


def _swaps(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    sizes = sorted({*preset.page_sizes, geometry.page_bytes})
    ways = itertools.product(preset.directions, preset.memories)
    for direction, memory in ways:
        if choice.variant == "kernel" and memory == "pageable":
            continue  # a kernel reads pinned memory only
        constants = {"direction": direction, "memory": memory}
        at = curve("swap", choice.variant, "bytes", constants)
        values = [
            (min(pages, limits.transfer_bytes // size), size)
            for size, pages in itertools.product(sizes, preset.pages)
        ]
        yield from _points(at, (value for value in values if value[0]))


def _copies(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    constants = {
        "num_layers": geometry.num_layers,
        "page_bytes": geometry.page_bytes,
    }
    block_bytes = 2 * geometry.num_layers * geometry.page_bytes
    most = limits.pool_bytes // block_bytes // 2  # sources and targets
    at = curve("copy_blocks", choice.variant, geometry.dtype, constants)
    yield from _points(at, ((min(n, most),) for n in preset.blocks if min(n, most)))


def _gemms(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    del limits
    for layer, (n, k) in geometry.gemms.items():
        constants: dict[str, int | str] = {"layer": layer, "n": n, "k": k}
        at = curve("gemm", choice.variant, geometry.dtype, constants)
        # the head sees one token a sequence
        most = preset.batches[-1] if layer == "head" else preset.tokens[-1]
        yield from _points(at, ((m,) for m in preset.tokens if m <= most))


def _per_token(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    del limits
    heads = {
        "num_heads": geometry.num_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
    }
    constants: dict[str, dict[str, int]] = {
        "norm": {"hidden_size": geometry.hidden_size},
        "activation": {"intermediate_size": geometry.intermediate_size},
        "rope": heads,
        "cache_write": {**heads, "block_size": geometry.block_size},
    }
    of = constants[choice.operation]
    at = curve(choice.operation, choice.variant, geometry.dtype, of)
    yield from _points(at, ((tokens,) for tokens in preset.tokens[::2]))


def _samplers(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    del limits
    constants = {"vocab_size": geometry.vocab_size}
    at = curve("sampler", choice.variant, geometry.dtype, constants)
    yield from _points(at, ((batch,) for batch in preset.batches))


def _launches(
    preset: Preset, geometry: Geometry, limits: Limits, choice: Choice
) -> Iterator[Point]:
    del preset, geometry, limits
    at = curve("launch", choice.variant, "none", {})
    yield from _points(at, ((1,), (8,), (64,), (256,)))
