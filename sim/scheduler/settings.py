"""The KV cache that a scheduler manages, beside its own settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.v1.specs import KVCacheLayout
from sim.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache that a scheduler manages, under vLLM's names.

    Parameters
    ----------
    block_size
        Tokens a block.
    num_gpu_blocks
        Size of the GPU pool; in V1 the null block is one of them.
    num_cpu_blocks
        Size of the CPU pool, in generations that have one.
    watermark
        Share of the GPU pool that admissions leave free. Configurations leave 0.01
        free before V1, nothing in V1.
    sliding_window
        Tokens that attention looks back, or None for all.
    enable_prefix_caching
        Whether full blocks are found again by their content.
    evictor
        What makes the policy by which cached blocks are evicted; None for the
        generation's own order.
    layout
        KV cache groups, where layers need caches of several kinds; the smallest block
        is of `block_size` tokens. None for one group, of attention.
    prefix_cache_retention_interval
        Tokens after which windows and states of a `layout` are kept for hits; 0 keeps
        those of prompts and of prefixes seen twice, None all.

    Raises
    ------
    SchedulerError
        Where a value is impossible.
    """

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int = 0
    watermark: float = 0.0
    sliding_window: int | None = None
    enable_prefix_caching: bool = False
    evictor: Callable[[], Any] | None = None
    layout: KVCacheLayout | None = None
    prefix_cache_retention_interval: int | None = 0

    def __post_init__(self) -> None:
        at_least(1, block_size=self.block_size, num_gpu_blocks=self.num_gpu_blocks)
        at_least(0, num_cpu_blocks=self.num_cpu_blocks)
        if not 0 <= self.watermark < 1:
            raise SchedulerError(
                f"watermark must be at least 0 and below 1, got {self.watermark}"
            )
        if self.sliding_window is not None:
            at_least(1, sliding_window=self.sliding_window)
        layout = self.layout
        if layout is None:
            return
        if (layout.block_size, layout.num_blocks) != (
            self.block_size,
            self.num_gpu_blocks,
        ):
            raise SchedulerError(
                f"num_gpu_blocks and block_size must be those of the layout, "
                f"{layout.num_blocks} and {layout.block_size}, got "
                f"{self.num_gpu_blocks} and {self.block_size}"
            )
        if self.sliding_window is not None:
            raise SchedulerError(
                "sliding_window is said by the layers of a layout; leave it out"
            )

    @property
    def groups(self) -> KVCacheLayout:
        """The layout, or that of the one group."""
        return self.layout or KVCacheLayout.of_one_group(
            self.num_gpu_blocks, self.block_size, self.sliding_window
        )

    @property
    def retention_interval(self) -> int | None:
        """The interval of windows and states that layers of a layout have.

        A lone window given by hand is kept whole, as before there were intervals.
        """
        return None if self.layout is None else self.prefix_cache_retention_interval


def at_least(least: int, **values: float | None) -> None:
    """Refuse numbers below a bound; None is no number.

    Raises
    ------
    SchedulerError
        With name, bound and value.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise SchedulerError(f"{name} must be at least {least}, got {value}")
