"""Random decision workloads for prefillers and decoders whose layers make groups."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from cache.v1.specs import MambaSpec
from sim.scheduler.v1.dialect import dialect_of
from sim.studies.conformance.random_groups import (
    ROOMY,
    STYLES,
    GroupEngine,
    drawn_engine,
    has_chunks_beside_longer_blocks,
)
from sim.studies.conformance.random_pairs import (
    along_the_way,
    along_the_way_to_pools,
    schedule_some_ahead,
    verify_some,
)
from sim.studies.conformance.random_v1 import (
    MOST_REQUESTS,
    accept_some,
    as_workload,
    later_keys,
    random_requests,
    stop_some,
    with_drafts,
)

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout
    from sim.studies.conformance.workload import DecisionWorkload

_DRAFTED = ("attention", "attention", "attention", "latent")
"""Of layers beside a drafter's: pools take none with states."""
_INTERVAL = "prefix_cache_retention_interval"
_UNLIKE_SHARE = 0.3
"""Of engines that look prefixes up where the first one does not, or the other way
around."""


def random_group_pools_workload(
    seed: int,
    release: str,
    *,
    prefillers: int | None = None,
    decoders: int | None = None,
    async_scheduling: bool = False,
    speculative: bool = False,
    styles: tuple[str, ...] = STYLES,
) -> DecisionWorkload:
    """Return the workload of a seed, for prefillers and decoders of a release.

    Layers, of one of some styles, and the longest sequence are the same on all, all
    else is drawn for each. For the numbers of engines see `random_pools_workload`; None
    for a pair without a proxy.
    """
    draw = Random(f"conform group pools {seed}")
    is_pair = prefillers is decoders is None
    numbers = [draw.randint(1, 4), draw.randint(1, 4)]
    if is_pair:
        numbers = [1, 1]
    num_prefillers, num_decoders = (
        given or drawn
        for given, drawn in zip((prefillers, decoders), numbers, strict=True)
    )
    drafts = Random(f"drafts {seed}")
    core = with_drafts(drafts, {}) if speculative else {}
    first = drawn_engine(draw, core, release, _DRAFTED if speculative else styles)
    drafted = first.config.pop("speculative", None)
    sides = [first.config]
    while len(sides) < num_prefillers + num_decoders:
        sides.append(_alike(first, draw, release))
    policies = sorted({side["policy"] for side in sides})
    requests = random_requests(
        draw,
        sides[0] | {"policy": policies[-1]},
        MOST_REQUESTS + 4 * len(sides) * (not is_pair),
    )
    way = along_the_way(draw, requests)
    name = f"groups in pools, seed {seed}"
    if not is_pair:
        way |= along_the_way_to_pools(draw, requests)
    if async_scheduling:
        schedule_some_ahead(seed, sides, requests)
        name += ", asynchronous"
    if drafted is not None:
        verify_some(
            drafts, sides, num_prefillers=num_prefillers, method=drafted["method"]
        )
        accept_some(drafts, requests)
        name += ", speculative"
        if not async_scheduling:
            stop_some(Random(f"stops {seed}"), requests)
    sides = [side | _size(GroupEngine(side, first.kv), draw, release) for side in sides]
    prefill, decode = sides[:num_prefillers], sides[num_prefillers:]
    config = {"pd": way, "prefill": prefill, "decode": decode}
    return as_workload(name, release, config, requests, first.kv)


def _size(engine: GroupEngine, draw: Random, release: str) -> dict[str, Any]:
    """Return the size of a pool that holds the longest request, and few more."""
    roomy = engine.kv | {"num_gpu_blocks_override": ROOMY}
    least = GroupEngine(engine.config, roomy).num_needed_blocks(release)
    more = draw.randint(0, draw.choice((2, least // 2, 2 * least)))
    return {"num_gpu_blocks": least + more}


def _alike(first: GroupEngine, draw: Random, release: str) -> dict[str, Any]:
    """Return an engine with the layers and the longest sequence of another one."""
    other, longest = first.config, first.config["max_model_len"]
    threshold = draw.choice((0, 0, 0, draw.randint(1, longest)))
    config = {
        "max_model_len": longest,
        "max_num_seqs": draw.choice((1, 3, 4, 8, 8, 16)),
        "chunked_prefill": draw.random() < 0.85,
        "enable_prefix_caching": other["enable_prefix_caching"],
        "policy": draw.choice(("fcfs", "fcfs", "priority")),
        "long_prefill_token_threshold": threshold,
    }
    least = config["max_num_seqs"] if config["chunked_prefill"] else longest
    budget = draw.choice((8, 16, 32, 64, 128, 256, longest))
    config["max_num_batched_tokens"] = max(least, budget, config["max_num_seqs"])
    # An interval is one of the blocks that end together, which are others without hits.
    if draw.random() < _UNLIKE_SHARE and not first.kv.get(_INTERVAL):
        unlike = config | {"enable_prefix_caching": not other["enable_prefix_caching"]}
        if _is_served_beside(GroupEngine(unlike, first.kv), first, release):
            config = unlike
    return config | later_keys(draw, dialect_of(release), config)


def _is_served_beside(engine: GroupEngine, first: GroupEngine, release: str) -> bool:
    """Whether the release takes an engine, and reads its blocks where it has states."""
    layout, others = engine.layout(release), first.layout(release)
    if layout is None or others is None:
        return False
    looks_up = engine.config["enable_prefix_caching"]
    if looks_up and has_chunks_beside_longer_blocks(layout):
        return False
    return _blocks(layout) == _blocks(others)


def _blocks(layout: KVCacheLayout) -> list[tuple[str, int]] | None:
    """Return kind and tokens of the blocks that others read; states have no tokens.

    None without a state.
    """
    specs = [group.spec for group in layout.groups]
    if not any(isinstance(spec, MambaSpec) for spec in specs):
        return None
    return [
        ("state", 0)
        if isinstance(spec, MambaSpec)
        else (type(spec).__name__, spec.block_size)
        for spec in specs
    ]
