"""Which chunk of a tier goes first: the role of a policy, and the release's two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from cache.tiers.access import RequestAccess


class TierPolicy(ABC):
    """Orders the chunks of a tier; which of them may go is said by the tier.

    ::

        missing --inserted--> written --mark_evictable--> evictable --evict--> missing
                                              ^              |
                                              +--- read <----+ pin

    A chunk is its key. What a request shows is noted once per request, at first
    contact; its end is the moment when recency is settled.

    Parameters
    ----------
    capacity
        Chunks of the tier.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/policies/base.py`` (`CachePolicy`).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def store_missed(self, keys: Sequence[int]) -> None:  # noqa: B027 - most do not care
        """Note keys that a request is about to store, before there is room for them.

        Once per request and key.
        """

    def accessed(  # noqa: B027 - most do not care
        self, keys: Iterable[int], access: RequestAccess
    ) -> None:
        """Note keys that a request shows for the first time, stored already or not."""

    @abstractmethod
    def inserted(self, key: int, access: RequestAccess) -> None:
        """Note a chunk that is being written from now on."""

    @abstractmethod
    def mark_evictable(self, key: int) -> None:
        """Note that nothing reads or writes a chunk any more."""

    @abstractmethod
    def pin(self, key: int) -> None:
        """Note that an evictable chunk is being read from now on."""

    @abstractmethod
    def finished(self, access: RequestAccess) -> None:
        """Settle what a request that ends has shown."""

    @abstractmethod
    def evict(self, num_chunks: int, protected: AbstractSet[int]) -> list[int] | None:
        """Give up evictable chunks that are not `protected`, the first to go first.

        Exactly `num_chunks`; None, and nothing changes, where there are fewer.
        """

    @abstractmethod
    def check(self, evictable: Mapping[int, bool]) -> None:
        """Prove its own structures in O(n).

        Parameters
        ----------
        evictable
            Every chunk of the tier, and whether it may go.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """

    def sizes(self) -> Collection[float]:
        """Return what there is to say of its parts; nothing for one list."""
        return ()
