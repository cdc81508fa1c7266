"""Which chunk of a tier goes first: the role of a policy, and the release's two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from collections.abc import Set as AbstractSet

    from cache.tiers.access import RequestAccess


class TierPolicy(ABC):
    """Orders the chunks of a tier; which of them may go is said by the tier.

    ::

        missing --inserted--> stored --evict--> missing

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

    now_s = 0.0
    """When the engine calls, in seconds, as far as that was said."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def store_missed(  # noqa: B027 - most do not care
        self, keys: Sequence[int], access: RequestAccess
    ) -> None:
        """Note keys that a request is about to store, before there is room for them."""

    def accessed(  # noqa: B027 - most do not care
        self, keys: Sequence[int], access: RequestAccess
    ) -> None:
        """Note a contact of a request: keys that are there, shown for the first time.

        None of them is there where it shows only what it is to store.
        """

    def reused(  # noqa: B027 - most do not care
        self, keys: Sequence[int], access: RequestAccess
    ) -> None:
        """Note keys that a request reads, or offers while they are there."""

    @abstractmethod
    def inserted(self, keys: Sequence[int], access: RequestAccess) -> None:
        """Note chunks that are being written from now on."""

    @abstractmethod
    def finished(self, access: RequestAccess) -> None:
        """Settle what a request that ends has shown."""

    @abstractmethod
    def evict(self, num_chunks: int, held: Sequence[AbstractSet[int]]) -> list[int]:
        """Give up chunks that are in no set of `held`, the first to go first.

        Exactly `num_chunks`, or none, which refuses the lot at hand; the tier knows
        that there are as many. `held` are the
        chunks that are written, those that are read, and a lot at hand, there or not.
        """

    @abstractmethod
    def check(self, keys: Collection[int]) -> None:
        """Prove its own structures in O(n).

        Parameters
        ----------
        keys
            Every chunk of the tier.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """

    def sizes(self) -> Collection[float]:
        """Return what there is to say of its parts; nothing for one list."""
        return ()
