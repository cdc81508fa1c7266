"""Observers of a tier's blocks, and counters of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class BlockObserver(Protocol):
    """Is told which blocks move. Costs nothing where there is none.

    A structure that has an `observer` calls these with the ids of all blocks that an
    operation moved, in no order that means anything, and never with none. One
    operation may make several calls of a kind.
    """

    def taken(self, block_ids: Sequence[int]) -> None:
        """Blocks left the free queue for new content."""
        ...

    def released(self, block_ids: Sequence[int]) -> None:
        """Blocks lost their last reference and joined the free queue."""
        ...

    def revived(self, block_ids: Sequence[int]) -> None:
        """Free blocks were hit: they left the queue with their content."""
        ...

    def evicted(self, block_ids: Sequence[int]) -> None:
        """Blocks lost their hash because they are about to be taken."""
        ...


class BlockStore(Protocol):
    """The blocks of a tier, which tell an observer how they move."""

    observer: BlockObserver | None

    def cached_block_ids(self) -> Iterable[int]:
        """Return the blocks that a look-up could find, held or free."""
        ...


class BlockTier(NamedTuple):
    """A tier whose blocks can be observed."""

    name: str
    store: BlockStore
    num_blocks: int
    num_ids: int
    """Above all ids of its blocks."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Prefix-cache queries and hits in tokens, of requests admitted.

    A request that is preempted looks its tokens up again; those look-ups, which may
    hit its own old blocks, are counted apart, so that ``hits / queries`` stays the
    share of prompt tokens that caching saved.

    The real engine counts a look-up each time the head of its queue is examined,
    admitted or not; here a look-up counts when it leads to an admission.
    """

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, *, preempted: bool) -> None:
        """Count one admission: `num_hits` of `num_tokens` tokens were cached."""
        if preempted:
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.queries += num_tokens
            self.hits += num_hits

    def summary(self, num_evictions: int) -> dict[str, Any]:
        """Return the counters for a run's summary, JSON-ready."""
        return {
            "prefix_cache_queries": self.queries,
            "prefix_cache_hits": self.hits,
            "prefix_cache_hit_rate": self.hits / self.queries if self.queries else 0.0,
            "prefix_cache_preempted_queries": self.preempted_queries,
            "prefix_cache_preempted_hits": self.preempted_hits,
            "num_evictions": num_evictions,
        }
