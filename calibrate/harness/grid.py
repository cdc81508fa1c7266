"""Which points are timed: a grid for each operation, in three sizes.

The grid is a function of the preset, the model's geometry and the device's limits;
nothing else. Corners that do not fit are pulled in, not dropped: the largest shape that
fits is always there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calibrate.measurement import OPERATIONS, Point, curve
from sim.costs.experts.routed import touched_experts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from calibrate.harness.geometry import Geometry
    from calibrate.measurement import Curve

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_DECODES = 256
"""Tokens of a step up to which decodes alone are usual."""
_KERNELS_OF: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("fused_moe", "torch"),
    "float16": ("fused_moe", "torch"),
    "fp8": ("fused_moe",),
    "fp8_block": ("fused_moe",),
    "w4a16_mxfp4": ("matmul_ogs", "marlin"),
}
"""Variants of routed experts by the precision of their weights."""


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
    rows: tuple[int, ...]
    """Tokens of products: between powers of two, too, where tiles begin."""
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
    rows=(
        *(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536),
        *(2048, 4096, 8192),
    ),
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
        rows=(1, 16, 128, 1024, 8192),
        pages=(1, 64, 4096),
        page_sizes=(32 * KIB,),
        blocks=(1, 32, 1024),
        num_attention_variants=1,
    ),
    "brief": replace(
        DEFAULT,
        rounds=2,
        adaptive_share=0.0,
        pages=(1, 16, 256, 4096),
        page_sizes=(32 * KIB, 2 * MIB),
        blocks=(1, 16, 256, 1024),
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
    """Bytes that the device and the host hold, for the grid to stay inside."""

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
    grid = _Grid(preset, geometry, limits)
    makers = {
        "decode_attention": grid.decodes,
        "prefill_attention": grid.prefills,
        "mixed_attention": grid.mixed,
        "swap": grid.swaps,
        "copy_blocks": grid.copies,
        "gemm": grid.gemms,
        "router": grid.routers,
        "routed_experts": grid.experts,
        "sampler": grid.samplers,
        "launch": grid.launches,
    }
    points: dict[Point, None] = {}
    for operation in OPERATIONS:
        chosen = [choice for choice in choices if choice.operation == operation]
        if operation.endswith("_attention"):
            chosen = chosen[: preset.num_attention_variants]
        for choice in chosen:
            points.update(dict.fromkeys(makers.get(operation, grid.per_token)(choice)))
    return list(points)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The points of each operation."""

    preset: Preset
    geometry: Geometry
    limits: Limits

    def _attention_curves(self, choice: Choice) -> Iterator[tuple[Curve, int]]:
        """Yield each geometry's curve, and the bytes of a token."""
        own = (self.geometry.num_heads, self.geometry.num_kv_heads)
        for heads, kv_heads in dict.fromkeys((own, *self.preset.geometries)):
            constants = {
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": self.geometry.head_dim,
                "block_size": self.geometry.block_size,
            }
            at = curve(choice.operation, choice.variant, self.geometry.dtype, constants)
            yield at, 2 * kv_heads * self.geometry.head_dim * self.geometry.itemsize

    def decodes(self, choice: Choice) -> Iterator[Point]:
        """Yield even batches, then skewed: one long sequence holds half of the sum."""
        for at, token_bytes in self._attention_curves(choice):
            most = self.limits.kv_tokens_bytes // token_bytes
            values = []
            for batch, context in itertools.product(
                self.preset.batches, self.preset.contexts
            ):
                fitting = min(context, most // batch)
                if fitting >= 1:
                    values.append((batch, batch * fitting, fitting))
            for batch in self.preset.batches[3::2]:
                short = min(1024, most // (2 * batch))
                if short >= 1:
                    longest = short * (batch - 1)
                    values.append((batch, 2 * longest, longest))
            yield from _points(at, values)

    def prefills(self, choice: Choice) -> Iterator[Point]:
        for at, token_bytes in self._attention_curves(choice):
            most = self.limits.kv_tokens_bytes // token_bytes
            values = (
                (query, min(past, most - query))
                for query, past in itertools.product(
                    self.preset.queries, self.preset.pasts
                )
                if query <= most
            )
            yield from _points(at, values)

    def mixed(self, choice: Choice) -> Iterator[Point]:
        for at, token_bytes in self._attention_curves(choice):
            most = self.limits.kv_tokens_bytes // token_bytes
            shapes = itertools.product(
                self.preset.queries[2::2] or self.preset.queries[-1:],
                self.preset.pasts[:2],
                self.preset.batches[2::3],
            )
            values = (
                (query, past, batch, batch * context)
                for (query, past, batch), context in itertools.product(
                    shapes, (512, 4096)
                )
                if query + past + batch * context <= most
            )
            yield from _points(at, values)

    def swaps(self, choice: Choice) -> Iterator[Point]:
        sizes = sorted({*self.preset.page_sizes, self.geometry.page_bytes})
        ways = itertools.product(self.preset.directions, self.preset.memories)
        for direction, memory in ways:
            if choice.variant == "kernel" and memory == "pageable":
                continue  # a kernel reads pinned memory only
            constants = {"direction": direction, "memory": memory}
            at = curve("swap", choice.variant, "bytes", constants)
            values = [
                (min(pages, self.limits.transfer_bytes // size), size)
                for size, pages in itertools.product(sizes, self.preset.pages)
            ]
            yield from _points(at, (value for value in values if value[0]))

    def copies(self, choice: Choice) -> Iterator[Point]:
        constants = {
            "num_layers": self.geometry.num_layers,
            "page_bytes": self.geometry.page_bytes,
        }
        block_bytes = 2 * self.geometry.num_layers * self.geometry.page_bytes
        most = self.limits.pool_bytes // block_bytes // 2  # sources and targets
        at = curve("copy_blocks", choice.variant, self.geometry.dtype, constants)
        yield from _points(
            at, ((min(n, most),) for n in self.preset.blocks if min(n, most))
        )

    def gemms(self, choice: Choice) -> Iterator[Point]:
        for layer, (n, k) in self.geometry.gemms.items():
            constants: dict[str, int | str] = {"layer": layer, "n": n, "k": k}
            at = curve("gemm", choice.variant, self.geometry.dtype, constants)
            # the head sees one token a sequence
            most = self.preset.batches[-1] if layer == "head" else self.preset.rows[-1]
            yield from _points(at, ((m,) for m in self.preset.rows if m <= most))

    def per_token(self, choice: Choice) -> Iterator[Point]:
        heads = {
            "num_heads": self.geometry.num_heads,
            "num_kv_heads": self.geometry.num_kv_heads,
            "head_dim": self.geometry.head_dim,
        }
        constants: dict[str, dict[str, int]] = {
            "norm": {"hidden_size": self.geometry.hidden_size},
            "activation": {"intermediate_size": self.geometry.intermediate_size},
            "rope": heads,
            "cache_write": {**heads, "block_size": self.geometry.block_size},
        }
        of = constants[choice.operation]
        at = curve(choice.operation, choice.variant, self.geometry.dtype, of)
        yield from _points(at, ((tokens,) for tokens in self.preset.tokens[::2]))

    def _expert_constants(self) -> dict[str, int]:
        return {
            "hidden_size": self.geometry.hidden_size,
            "num_experts": self.geometry.num_experts,
            "experts_per_token": self.geometry.experts_per_token,
        }

    def routers(self, choice: Choice) -> Iterator[Point]:
        if self.geometry.num_experts:
            of = self._expert_constants()
            at = curve("router", choice.variant, self.geometry.dtype, of)
            yield from _points(at, ((n,) for n in self.preset.tokens[::2]))

    def experts(self, choice: Choice) -> Iterator[Point]:
        """Yield tokens that choose freely, then some that choose alike.

        A free choice touches as many experts as it does on average; the others as few
        as it can, and the middle of both. Prompts touch nearly all of them.
        """
        of = self.geometry
        if choice.variant not in _KERNELS_OF.get(of.expert_dtype, ()):
            return
        constants = self._expert_constants() | {"intermediate_size": of.expert_size}
        at = curve("routed_experts", choice.variant, of.expert_dtype, constants)
        total, least = of.num_experts, of.experts_per_token
        values = []
        for number, tokens in enumerate(self.preset.tokens):
            free = round(touched_experts(total, least, tokens))
            values.append((tokens, free))
            if number % 2:
                values.append((tokens, (least + free) // 2))
                if tokens <= _DECODES:
                    values.append((tokens, least))
        yield from _points(at, values)

    def samplers(self, choice: Choice) -> Iterator[Point]:
        constants = {"vocab_size": self.geometry.vocab_size}
        at = curve("sampler", choice.variant, self.geometry.dtype, constants)
        yield from _points(at, ((batch,) for batch in self.preset.batches))

    def launches(self, choice: Choice) -> Iterator[Point]:
        at = curve("launch", choice.variant, "none", {})
        yield from _points(at, ((1,), (8,), (64,), (256,)))


def _points(at: Curve, values: Iterable[tuple[int, ...]]) -> Iterator[Point]:
    return (Point(at, value) for value in dict.fromkeys(values))
