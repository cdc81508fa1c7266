"""Random decision workloads for V1 whose layers need KV caches of several kinds.

Layers of a few kinds are drawn and planned as a release plans them; the pool holds the
longest request, and few more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from random import Random
from typing import TYPE_CHECKING, Any

from cache.v1.specs import (
    ChunkedLocalAttentionSpec,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)
from sim.errors import ConfigError
from sim.scheduler.v1.dialect import dialect_of
from sim.studies.conformance.random_v1 import (
    ABORTED_SHARE,
    accept_some,
    as_workload,
    later_keys,
    random_requests,
    room_for_drafts,
    stop_some,
    with_drafts,
    withdraw_some,
)

if TYPE_CHECKING:
    from cache.v1.planning import KVCachePlan
    from cache.v1.specs import KVCacheLayout
    from sim.studies.conformance.workload import DecisionWorkload

MOST_GROUPS = 8

STYLES = ("attention", "attention", "latent", "states", "states")

_REDRAWN_SHARE = 0.75
"""Of models whose layers all fit one group."""

_SOME_LEN = 4096
"""A length to plan with before the real one is drawn."""
ROOMY = 1 << 20
"""Blocks for the longest request of any plan here."""

Kinds = list[dict[str, Any]]


def random_group_workload(
    seed: int,
    release: str,
    *,
    async_scheduling: bool = False,
    speculative: bool = False,
) -> DecisionWorkload:
    """Return the workload of a seed, for an engine of a release.

    Layers of which no release makes groups are drawn again.
    """
    draw = Random(f"conform groups {seed}")
    core: dict[str, Any] = {"async_scheduling": True} if async_scheduling else {}
    drafts = Random(f"drafts {seed}")
    if speculative:
        core |= with_drafts(drafts, core)
    engine = drawn_engine(draw, core, release)
    if speculative and any("state_shapes" in layer for layer in engine.repeated):
        # Of these it is not known how a hit loses its last block.
        engine.config["speculative"].pop("disable_lookahead_block_hashes", None)
    requests = random_requests(draw, engine.config)
    if draw.random() < ABORTED_SHARE:
        withdraw_some(draw, requests)
    name = f"groups, seed {seed}"
    if async_scheduling:
        name += ", asynchronous"
    if speculative:
        accept_some(drafts, requests)
        name += ", speculative"
    if async_scheduling or speculative:
        stop_some(Random(f"stops {seed}"), requests)
    return as_workload(name, release, engine.config, requests, engine.kv)


@dataclass(frozen=True, slots=True)
class GroupEngine:
    """An engine of a release, and the layers whose pool it plans."""

    config: dict[str, Any]
    kv: dict[str, Any]

    @property
    def repeated(self) -> Kinds:
        """The target's layers, of which there may be several of each."""
        return self.kv["layers"]["repeated"]  # type: ignore[no-any-return]

    def layout(self, release: str) -> KVCacheLayout | None:
        """Return the groups; None where the release plans no such pool."""
        plan = self._plan(release)
        return None if plan is None else plan.layout

    def num_needed_blocks(self, release: str) -> int:
        """Return the blocks of the longest request, and the null block."""
        plan = self._plan(release)
        assert plan is not None
        return 1 + sum(plan.blocks_per_request)

    def _plan(self, release: str) -> KVCachePlan | None:
        try:
            return as_workload("planned", release, self.config, [], self.kv).plan
        except ConfigError:
            return None


def drawn_engine(
    draw: Random,
    core: dict[str, Any],
    release: str,
    styles: tuple[str, ...] = STYLES,
) -> GroupEngine:
    """Return an engine with layers of some styles, of which the release makes groups.

    `core` are keys of its configuration that are not drawn.
    """
    while (engine := _engine(draw, core, release, styles)) is None:
        pass
    return engine


def _engine(
    draw: Random, core: dict[str, Any], release: str, styles: tuple[str, ...]
) -> GroupEngine | None:
    caching = draw.random() < 0.85
    layers, block_size = _layers(draw, styles)
    kv: dict[str, Any] = {
        "layers": layers,
        "block_size": block_size,
        "available_bytes": 0,
        "num_gpu_blocks_override": ROOMY,
        "disable_hybrid_kv_cache_manager": draw.random() < 0.08,
    }
    config = {
        "max_model_len": _SOME_LEN,
        "max_num_batched_tokens": _SOME_LEN,
        "max_num_seqs": draw.choice((1, 3, 4, 8, 8, 16)),
        "chunked_prefill": draw.random() < 0.85,
        "enable_prefix_caching": caching,
        "policy": draw.choice(("fcfs", "fcfs", "priority")),
        **core,
    }
    if core.get("speculative", {}).get("method", "ngram") != "ngram":
        kv["draft_layers"] = [_draft_layer(draw, layers["repeated"])]
    layout = GroupEngine(config, kv).layout(release)
    if layout is None or len(layout.groups) > MOST_GROUPS:
        return None
    if len(layout.groups) == 1 and draw.random() < _REDRAWN_SHARE:
        return None
    if caching:
        kv |= _kept(draw, layout)
        layout = GroupEngine(config, kv).layout(release)
        if layout is None or has_chunks_beside_longer_blocks(layout):
            return None
    config |= _lengths(draw, config, layout)
    config |= later_keys(draw, dialect_of(release), config)
    config |= room_for_drafts(config)
    least = GroupEngine(config, kv).num_needed_blocks(release)
    kv["num_gpu_blocks_override"] = least + draw.randint(
        0, draw.choice((2, least // 2, 2 * least))
    )
    return GroupEngine(config, kv)


def has_chunks_beside_longer_blocks(layout: KVCacheLayout) -> bool:
    """Whether the release ends at its first lookup."""
    return any(
        isinstance(group.spec, ChunkedLocalAttentionSpec)
        and group.spec.block_size != layout.cache_hit_alignment
        for group in layout.groups
    )


def _layers(draw: Random, styles: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """Return layers, and the block size that goes with them."""
    style = draw.choice(styles)
    block_size = draw.choice((1, 2, 4, 4, 8, 16))
    kinds: Kinds = [_attention(draw) for _ in range(draw.randint(1, 3))]
    if style == "latent":
        kinds = [_latent(draw) for _ in range(draw.randint(1, 2))]
        if draw.random() < 0.3:
            kinds.append(_attention(draw))
    if style == "states":
        block_size = draw.choice((4, 16, 16, 32))
        kinds = kinds[: draw.choice((1, 1, 1, 2))]
        kinds.append(_state(draw, kinds[0]))
    draw.shuffle(kinds)
    more = draw.choices(kinds, k=draw.randint(0, 3))
    repeated = [*kinds, *more]
    num_layers = draw.randint(len(repeated), 3 * len(repeated))
    return {"num_layers": num_layers, "repeated": repeated}, block_size


def _draft_layer(draw: Random, targets: Kinds) -> list[Any]:
    """Return a layer that reads all tokens, or has a window of the target's."""
    windows = [layer for layer in targets if "sliding_window" in layer]
    if windows and draw.random() < 0.4:
        own = draw.choice(windows)
        heads = own["num_kv_heads"], own["head_size"]
        return ["window", *heads, own["sliding_window"]]
    return ["full", draw.choice((4, 4, 8, 2)), 8]


def _attention(draw: Random) -> dict[str, Any]:
    layer = {"num_kv_heads": draw.choice((4, 4, 4, 8, 2, 3)), "head_size": 8}
    kind, tokens = draw.random(), draw.choice((2, 5, 16, 30, 33, 64, 100))
    if kind < 0.4:
        return layer | {"sliding_window": tokens}
    if kind < 0.55:
        return layer | {"attention_chunk_size": tokens}
    return layer


def _latent(draw: Random) -> dict[str, Any]:
    return {"num_kv_heads": 1, "head_size": draw.choice((8, 16)), "latent": True}


def _state(draw: Random, first: dict[str, Any]) -> dict[str, Any]:
    """Return a state that takes the room of 1 to 80 tokens of attention."""
    row = first["num_kv_heads"] * first["head_size"] * 2  # elements a token
    num_tokens = draw.choice((1, 16, 17, 40, 80))
    layer: dict[str, Any] = {"state_shapes": [[3, 4], [num_tokens, row]]}
    if (alignment := draw.choice((None, None, 1, 1, 8, 32))) is not None:
        layer["checkpoint_alignment"] = alignment
    return layer


def _kept(draw: Random, layout: KVCacheLayout) -> dict[str, Any]:
    """Return the retention of windows and states, and the unit of hits."""
    kept: dict[str, Any] = {}
    specs = [group.spec for group in layout.groups]
    if any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in specs):
        every = layout.scheduler_block_size * draw.randint(1, 4)
        interval = draw.choice((0, 0, None, every))
        kept["prefix_cache_retention_interval"] = interval
    has_states = any(isinstance(spec, MambaSpec) for spec in specs)
    if len(specs) > 1 and draw.random() < (0.6 if has_states else 0.1):
        common = gcd(*(spec.block_size for spec in specs))
        units = [n for n in range(1, common + 1) if common % n == 0]
        kept["prefix_match_unit"] = draw.choice(units[len(units) // 3 :])
    return kept


def _lengths(
    draw: Random, config: dict[str, Any], layout: KVCacheLayout
) -> dict[str, int]:
    """Return the longest sequence, in a few blocks, and the budget of a step."""
    sizes = [
        group.spec.block_size
        for group in layout.groups
        if not isinstance(group.spec, MambaSpec)
        or group.spec.mamba_cache_mode is MambaCacheMode.ALIGN
    ]
    longest = max(sizes) * draw.choice((4, 8, 16)) + draw.randint(0, 64)
    max_model_len = draw.randint(max(4, longest // 2), max(8, longest))
    chunked = config["chunked_prefill"]
    least = config["max_num_seqs"] if chunked else max_model_len
    budget = draw.choice((8, 16, 32, 64, 128, 256, max_model_len))
    threshold = draw.choice((0, 0, 0, draw.randint(1, max_model_len)))
    return {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(least, budget, config["max_num_seqs"]),
        "long_prefill_token_threshold": threshold,
    }
