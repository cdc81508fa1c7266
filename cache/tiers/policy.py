"""Which chunk of a tier goes first: the role of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from cache.tiers.access import RequestAccess
    from cache.tiers.places import Chunks, Ints


class TierPolicy(ABC):
    """Orders the chunks of a tier; which of them may go is said by the tier.

    ::

        missing --inserted--> stored --evict--> missing

    Chunks come in lots. What a request shows is noted once per request, at first
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
        self, keys: Ints, access: RequestAccess
    ) -> None:
        """Note keys that a request is about to store, before there is room for them."""

    def accessed(  # noqa: B027 - most do not care
        self, chunks: Chunks, access: RequestAccess
    ) -> None:
        """Note a contact of a request: chunks that are there, shown for the first time.

        None of them is there where it shows only what it is to store.
        """

    def reused(  # noqa: B027 - most do not care
        self, chunks: Chunks, access: RequestAccess
    ) -> None:
        """Note chunks that a request reads, or offers while they are there."""

    @abstractmethod
    def inserted(self, chunks: Chunks, access: RequestAccess) -> None:
        """Note chunks that are being written from now on."""

    def reach(self, num_places: int) -> None:  # noqa: B027 - not all keep columns
        """Make room for so many places, if there is a column by place."""

    def settles(self, access: RequestAccess, places: Ints) -> bool:
        """Settle a request that ends, if not all of its chunks must be looked at.

        Parameters
        ----------
        access
            The request.
        places
            By cell, as of `cache.tiers.places.ChunkIndex`.

        Returns
        -------
        bool
            Whether that is done; if not, `finished` follows.
        """
        del access, places
        return False

    @abstractmethod
    def finished(self, chunks: Chunks, access: RequestAccess) -> None:
        """Settle what a request that ends has shown, as far as it is there.

        Parameters
        ----------
        chunks
            By their position in the request.
        access
            The request.
        """

    @abstractmethod
    def evict(self, num_chunks: int, num_holds: Ints) -> Ints:
        """Give up chunks that nothing holds; return their places, in order.

        Exactly `num_chunks`, or none, which refuses the lot at hand; the tier knows
        that there are as many.

        Parameters
        ----------
        num_chunks
            How many.
        num_holds
            By place, what keeps a chunk from going: 0 for nothing.
        """

    @abstractmethod
    def check(self, ids: Ints) -> None:
        """Prove its own structures in O(n).

        Parameters
        ----------
        ids
            Places of every chunk of the tier.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """

    def sizes(self) -> Collection[float]:
        """Return what there is to say of its parts; nothing for one list."""
        return ()
