"""Which chunk of a tier goes first: the role of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.extents import Chunks, Extent, ExtentIndex
    from cache.tiers.places import Ints, Lot


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
        self, lots: Sequence[Lot], access: RequestAccess
    ) -> None:
        """Note the chunks that a request will store, before there is room for them."""

    def accessed(  # noqa: B027 - most do not care
        self, chunks: Sequence[Chunks], access: RequestAccess
    ) -> None:
        """Note a contact of a request: chunks that are there, shown for the first time.

        None of them is there where it shows only what it is to store.
        """

    def reused(  # noqa: B027 - most do not care
        self, chunks: Sequence[Chunks], access: RequestAccess
    ) -> None:
        """Note chunks that a request reads, or offers while they are there."""

    @abstractmethod
    def inserted(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        """Note chunks that are being written from now on."""

    def settles(self, access: RequestAccess) -> bool:
        """Settle a request that ends, if its chunks need not be looked up for that.

        Returns
        -------
        bool
            Whether that is done; if not, `finished` follows.
        """
        del access
        return False

    @abstractmethod
    def finished(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        """Settle the chunks that an ended request has shown, as far as they are there.

        Parameters
        ----------
        chunks
            Group by group, by their position in the request.
        access
            The request.
        """

    @abstractmethod
    def evict(self, num_chunks: int, index: ExtentIndex) -> Ints:
        """Give up chunks that nothing holds; return their places, in order.

        Exactly `num_chunks`, or none, which refuses the lot at hand; the tier knows
        that there are as many.

        Parameters
        ----------
        num_chunks
            How many.
        index
            Takes them out.
        """

    @abstractmethod
    def check(self, extents: Collection[Extent]) -> None:
        """Prove its own structures in O(n).

        Parameters
        ----------
        extents
            All of the tier.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """

    def sizes(self) -> Collection[float]:
        """Return the sizes of its parts; none for a policy of one list."""
        return ()
