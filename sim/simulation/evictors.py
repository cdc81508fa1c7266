"""From ``engine.evictor`` to what decides which cached block goes first."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from cache.errors import CacheError, PolicyError
from cache.tokens import SegmentTokens
from cache.v0.evictor import Evictor
from cache.v1.policies import CachePolicy, KeyedPolicy
from sim.config.plug import build
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.config.engine import EngineConfig
    from sim.hardware.capacity import CapacityEstimate
    from workloads.spec import RequestSpec


def evictor_factory(
    config: EngineConfig, capacity: CapacityEstimate, specs: Sequence[RequestSpec]
) -> Callable[[], Any] | None:
    """Return the maker of an engine's evictors, tried once; None for its own."""
    kind = config.evictor_kind
    if kind is None:
        return None
    table = (
        {"kind": kind}
        if isinstance(config.evictor, str)
        else dict(config.evictor or {})
    )
    parts = config.generation.parts()
    if parts.evictor_role is Evictor:
        make = partial(build, parts.evictors, table, "engine.evictor")
        _check_evictor(make(), kind)
        return make
    context = {
        # V1's null block holds nothing.
        "num_blocks": capacity.num_gpu_blocks - 1,
        "future": WorkloadReads(specs, config.block_size),
    }
    make = partial(build, parts.evictors, table, "engine.evictor", context)
    try:
        _check_policy(make(), kind)
    except CacheError as error:
        raise ConfigError(f"engine.evictor: {error}") from error
    return make


def _check_evictor(evictor: object, kind: str) -> None:
    """Try an evictor of `v0` on two blocks, before anything is simulated."""
    if not isinstance(evictor, Evictor):
        raise ConfigError(
            f"engine.evictor: '{kind}' must be a subclass of cache.v0.evictor.Evictor, "
            f"such as a KeyedEvictor with a key; mend your class"
        )
    try:
        evictor.add(1, 11, 16, 0.0)
        evictor.add(2, 12, 32, 1.0)
        evicted = sorted(evictor.evict() for _ in range(2))
        problem = f"two blocks must be evicted once each, got {evicted}"
    except Exception as error:
        evicted, problem = None, f"{type(error).__name__}: {error}"
    if evicted != [(1, 11), (2, 12)]:
        raise ConfigError(f"engine.evictor: '{kind}': {problem}; mend your class")


def _check_policy(policy: object, kind: str) -> None:
    """Try a policy on three blocks, one in use, before anything is simulated."""
    if not isinstance(policy, CachePolicy):
        raise ConfigError(
            f"engine.evictor: '{kind}' must be a subclass of "
            f"cache.v1.policies.CachePolicy, such as a KeyedPolicy with a key; mend "
            f"your class (cache.v0.evictor.Evictor is v0's)"
        )
    try:
        evicted = _two_of_three(policy)
        problem = f"of three blocks, 3 in use, 1 and 2 must be evicted, got {evicted}"
    except PolicyError as error:
        evicted, problem = [], str(error)
    except Exception as error:
        evicted, problem = [], f"{type(error).__name__}: {error}"
    if evicted != [1, 2]:
        raise ConfigError(f"engine.evictor: '{kind}': {problem}; mend your class")


def _check_order(policy: KeyedPolicy) -> None:
    """Refuse keys of which neither is the smaller, nor both equal: NaN, or sets.

    They are those of blocks that the policy was told of: a key may ask what it knows.
    """
    keys = {block.block_id: key for key, _, block in policy._heap}
    ours, theirs = keys[1], keys[2]
    if not (ours == theirs or ours < theirs or theirs < ours):
        raise PolicyError(
            f"keys must have an order, got {ours!r:.40} and {theirs!r:.40}"
        )


def _two_of_three(policy: CachePolicy) -> list[int]:
    policy.begins(0)
    for block_id in (1, 2, 3):
        policy.cached(block_id, 10 + block_id, block_id - 1)
    for block_id in (3, 2, 1):
        policy.released(block_id)
    if isinstance(policy, KeyedPolicy):
        _check_order(policy)
    policy.hit(3)
    if policy.num_evictable != 2:
        return [policy.num_evictable]
    return sorted((policy.evict(14), policy.evict(None)))


class WorkloadReads:
    """The full prompt blocks that each request of a workload looks for.

    Read when first asked: it costs a hash for each block, and memory for those that
    several requests share.
    """

    def __init__(self, specs: Sequence[RequestSpec], block_size: int) -> None:
        self._specs = specs
        self._block_size = block_size

    def readers(self, content: int) -> Sequence[int]:
        """Return the requests that look for a block, ascending; of one alone, none."""
        return self._readers.get(content, ())

    def contents(self, request_id: int) -> Sequence[int]:
        """Return the blocks that a request looks for and shares with others."""
        return self._contents.get(request_id, ())

    @cached_property
    def _contents(self) -> dict[int, list[int]]:
        shared = self._shared
        return {
            spec.request_id: [c for c in self._reads(spec) if c in shared]
            for spec in self._specs
        }

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for request_id, contents in self._contents.items():
            for content in contents:
                readers.setdefault(content, []).append(request_id)
        return readers

    @property
    def _shared(self) -> set[int]:
        """Blocks that more than one request looks for."""
        seen: set[int] = set()
        shared: set[int] = set()
        for spec in self._specs:
            for content in self._reads(spec):
                (shared if content in seen else seen).add(content)
        return shared

    def _reads(self, spec: RequestSpec) -> list[int]:
        """Return the contents that V1 looks for: not a whole prompt's last block."""
        contents: list[int] = []
        num_blocks = (spec.num_prompt_tokens - 1) // self._block_size
        tokens = SegmentTokens(spec.prompt, spec.output_segment)
        tokens.extend_block_hashes(contents, num_blocks, self._block_size)
        return contents
