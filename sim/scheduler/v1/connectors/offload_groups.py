"""KV cache groups as the offloading connector sees them: chunks and windows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.v1.sliding_window import SlidingWindow, WindowTails
from cache.v1.specs import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from sim.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.v1.specs import KVCacheGroup, KVCacheLayout, KVCacheSpec
    from sim.scheduler.v1.connectors.settings import OffloadSettings


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """The rules of a group.

    Parameters
    ----------
    number
        Place in the layout.
    spec
        Of its layers.
    blocks_per_chunk
        GPU blocks of a chunk.
    tails, segment_blocks
        Which blocks of a window are stored, and after how many a load may end; None
        where all are.

    Attributes
    ----------
    block_size, chunk_tokens
        Tokens of a block, and of a chunk.
    has_window
        Whether some blocks of a request need not be there.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``
    (`GroupOffloadConfig`) and ``config.py`` (`get_sliding_window_size_in_chunks`).
    """

    number: int
    spec: KVCacheSpec
    blocks_per_chunk: int
    tails: WindowTails | None = None
    segment_blocks: int | None = None
    block_size: int = field(init=False)
    chunk_tokens: int = field(init=False)
    has_window: bool = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        is_window = isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
        for name, value in (
            ("block_size", spec.block_size),
            ("chunk_tokens", spec.block_size * self.blocks_per_chunk),
            ("has_window", is_window),
        ):
            object.__setattr__(self, name, value)

    @property
    def window_chunks(self) -> int:
        """Chunks that a hit of a group with a window needs at its end."""
        spec = self.spec
        if isinstance(spec, SlidingWindowSpec):
            return -(-spec.sliding_window // self.chunk_tokens)
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        return -(-spec.attention_chunk_size // self.chunk_tokens)

    def loaded_chunks(self, num_tokens: int) -> int:
        """Return how many of the last chunks of so many tokens are loaded at most.

        A hit may end inside a chunk; then the window may begin in one chunk more.
        """
        spec = self.spec
        if not isinstance(spec, SlidingWindowSpec):
            return self.window_chunks
        reach = spec.sliding_window - 1 + -num_tokens % self.chunk_tokens
        return max(self.window_chunks, -(-reach // self.chunk_tokens))

    def stored(
        self, first: int, stop: int, boundaries: Sequence[int], last: int = 0
    ) -> Sequence[int]:
        """Return which of the blocks from one on and before another are stored.

        Parameters
        ----------
        first, stop, boundaries, last
            See `cache.v1.sliding_window.WindowTails.kept`.
        """
        if self.tails is None:
            return range(first, stop)
        return self.tails.kept(first, stop, boundaries, last)


class OffloadGroups:
    """The groups of an engine.

    Parameters
    ----------
    layout
        The groups.
    settings
        Of the tier.
    interval
        ``prefix_cache_retention_interval``: None where all windows are kept.

    Attributes
    ----------
    all
        In the layout's order.
    in_order, with_windows
        In the order of look-ups: full attention, then the widest window first; and of
        these those with windows.
    is_dense
        Whether windows are stored at every boundary.

    Raises
    ------
    SchedulerError
        If there are states, or the interval is no whole chunks.
    """

    def __init__(
        self, layout: KVCacheLayout, settings: OffloadSettings, interval: int | None
    ) -> None:
        size = settings.blocks_per_chunk
        groups = layout.groups
        if any(isinstance(group.spec, MambaSpec) for group in groups):
            raise SchedulerError(
                "a CPU tier is built of models with attention only, not with states; "
                "leave the tier out"
            )
        if len(groups) > 1 and settings.secondary_tiers:
            raise SchedulerError(
                f"tiers behind the host's are built of one KV cache group, the model "
                f"has {len(groups)}; leave secondary_tiers out"
            )
        alignment = _alignment(groups, size)
        self.is_dense = interval is None
        self.all = tuple(
            OffloadGroup(
                number, group.spec, size, *_kept(group.spec, alignment, interval)
            )
            for number, group in enumerate(groups)
        )
        self.with_windows = sorted(
            (group for group in self.all if group.has_window),
            key=lambda group: -group.window_chunks,
        )
        full = [group for group in self.all if not group.has_window]
        self.in_order = [*full, *self.with_windows]
        for group in self.with_windows:
            if interval is not None and interval % group.chunk_tokens:
                raise SchedulerError(
                    f"prefix_cache_retention_interval must be a multiple of the tokens "
                    f"of a chunk of the CPU tier, which are {group.chunk_tokens}, got "
                    f"{interval}"
                )


def _alignment(groups: Sequence[KVCacheGroup], blocks_per_chunk: int) -> int | None:
    """Return after how many tokens a load may end; None where that is not known.

    The chunks of full attention say so; without any, the longest of all.
    """
    sizes = [group.spec.block_size * blocks_per_chunk for group in groups]
    full = {
        size
        for size, group in zip(sizes, groups, strict=True)
        if not isinstance(group.spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
    }
    if len(full) > 1:
        return None
    return full.pop() if full else max(sizes)


def _kept(
    spec: KVCacheSpec, alignment: int | None, interval: int | None
) -> tuple[WindowTails | None, int | None]:
    size = spec.block_size
    if not isinstance(spec, SlidingWindowSpec):
        return None, None
    if alignment is None or alignment % size:
        return None, None
    window = SlidingWindow(spec.sliding_window, size)
    tails = WindowTails(window, alignment=alignment, interval=interval)
    return tails, alignment // size
