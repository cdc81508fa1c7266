"""Settings of connectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from cache.tiers import TIER_POLICIES
from sim.errors import SchedulerError
from sim.scheduler.settings import at_least

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cache.tiers import SecondaryTier

LOAD_FAILURE_POLICIES = ("fail", "recompute")
WRITE_POLICIES = ("write_through", "write_back")


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """A CPU tier behind the pool, under vLLM's names.

    Parameters
    ----------
    num_chunks
        Room of the tier; see `cache.tiers.num_chunks_of`.
    blocks_per_chunk
        GPU blocks of a chunk.
    eviction_policy
        A name out of `cache.tiers.TIER_POLICIES`.
    offload_prompt_only
        Whether only blocks of the prompt are stored.
    store_threshold, max_tracker_size
        See `cache.tiers.CPUTier`.
    sync_load_budget_tokens
        Tokens that a call may load into its own batch; 0 for none.
    kv_load_failure_policy
        ``"fail"``: a request whose load fails ends with an error; ``"recompute"``: it
        computes what was not loaded.
    stores
        Whether anything is stored: nothing is over a link that carries nothing.
    write_policy
        ``"write_through"``: chunks are stored as they are computed, the release's rule;
        ``"write_back"``: blocks when the pool is about to take them for new content.
    eviction_ttl_s
        Of ``keep_ttl``: seconds for which a chunk is kept.
    secondary_tiers
        Tiers behind the host's, by name, in the order in which they are asked.

    Raises
    ------
    SchedulerError
        If a value is impossible.
    """

    num_chunks: int
    blocks_per_chunk: int = 1
    eviction_policy: str = "lru"
    offload_prompt_only: bool = True
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    sync_load_budget_tokens: int = 0
    kv_load_failure_policy: str = "fail"
    stores: bool = True
    write_policy: str = "write_through"
    eviction_ttl_s: float = 300.0
    secondary_tiers: Mapping[str, SecondaryTier] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(
            1,
            num_chunks=self.num_chunks,
            blocks_per_chunk=self.blocks_per_chunk,
            max_tracker_size=self.max_tracker_size,
        )
        at_least(
            0,
            store_threshold=self.store_threshold,
            sync_load_budget_tokens=self.sync_load_budget_tokens,
        )
        _one_of(tuple(TIER_POLICIES), eviction_policy=self.eviction_policy)
        _one_of(WRITE_POLICIES, write_policy=self.write_policy)
        _one_of(
            LOAD_FAILURE_POLICIES, kv_load_failure_policy=self.kv_load_failure_policy
        )


class KVRole(Enum):
    """The role of an engine in a pair."""

    PRODUCER = "kv_producer"
    """Computes prompts, and holds their blocks until they have been read."""
    CONSUMER = "kv_consumer"
    """Reads the blocks of a prompt, and decodes."""


@dataclass(frozen=True, slots=True)
class KVTransferSettings:
    """One side of a pair of engines, under vLLM's names.

    Parameters
    ----------
    kv_role
        Which side.
    kv_lease_duration
        Seconds that a producer holds blocks that no consumer asks for. A consumer says
        every sixth of it, rounded down to a second, which it still wants.
    kv_load_failure_policy
        As of `OffloadSettings`, in place of that where the engine has a tier, too.
    asks_tier_first
        Whether a consumer with a tier loads what that has, and reads the prompt only
        where it has nothing; if not, it reads. Of a producer it makes no difference.

    Raises
    ------
    SchedulerError
        If a value is impossible.
    """

    kv_role: KVRole
    kv_lease_duration: int = 30
    kv_load_failure_policy: str = "fail"
    asks_tier_first: bool = False

    def __post_init__(self) -> None:
        at_least(1, kv_lease_duration=self.kv_lease_duration)
        _one_of(
            LOAD_FAILURE_POLICIES, kv_load_failure_policy=self.kv_load_failure_policy
        )


def _one_of(known: tuple[str, ...], **given: str) -> None:
    for name, value in given.items():
        if value not in known:
            raise SchedulerError(
                f"{name} must be one of {', '.join(known)}, got {value!r}"
            )
