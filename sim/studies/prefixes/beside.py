"""Hits of runs in pool and host, to stand beside the curve of their traffic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sim.config.tables import load_config
from sim.errors import ConfigError
from sim.results.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SimulatedHits:
    """Hits of a run on its prompts.

    Parameters
    ----------
    name
        Of its folder.
    num_pool_blocks, num_host_blocks
        Room in the GPU's pool, and in the host behind it; 0 without one.
    pool_hit_rate, host_hit_rate
        Shares of the prompt tokens that were found there.
    """

    name: str
    num_pool_blocks: int
    num_host_blocks: int
    pool_hit_rate: float
    host_hit_rate: float

    @property
    def num_blocks(self) -> int:
        """Blocks that differ, at most: the host has what the pool has."""
        return max(self.num_pool_blocks, self.num_host_blocks)

    @property
    def hit_rate(self) -> float:
        return self.pool_hit_rate + self.host_hit_rate

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"num_blocks": self.num_blocks, "hit_rate": self.hit_rate}


def simulated_hits(directory: Path, block_size: int) -> SimulatedHits:
    """Return the hits of a run of one engine.

    Raises
    ------
    ConfigError
        If its blocks are of another size, or it has no prefix cache.
    ResultsError
        If there is no such run, or it is of several engines.
    """
    folder = RunFolder(directory).of_one_engine()
    engine, told = load_config(directory / "config.yaml").engine, folder.summary
    if engine.block_size != block_size:
        raise ConfigError(
            f"the curve has blocks of {block_size} tokens, the run in {directory} has "
            f"{engine.block_size}; give --block-size {engine.block_size}"
        )
    queries = told.get("prefix_cache_queries")
    if not queries:
        raise ConfigError(
            f"the run in {directory} looked nothing up; run it with "
            f"engine.enable_prefix_caching"
        )
    size = 1
    if engine.kv_transfer_config is not None:
        extra = engine.kv_transfer_config.extra
        in_tokens = (extra.block_size or 0) // engine.block_size
        size = in_tokens or extra.blocks_per_chunk or 1
    return SimulatedHits(
        name=directory.name,
        num_pool_blocks=int(told["num_gpu_blocks"]),
        num_host_blocks=int(told.get("num_tier_chunks", 0)) * size,
        pool_hit_rate=told["prefix_cache_hits"] / queries,
        host_hit_rate=told.get("external_prefix_cache_hits", 0) / queries,
    )
