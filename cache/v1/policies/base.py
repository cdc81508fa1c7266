"""The base class of eviction policies of the prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class CachePolicy(ABC):
    """Decides which cached block is given up when a block is needed.

    ::

        missing --cached--> in use --released--> evictable --evict--> missing
                               ^                    |
                               +-------- hit -------+

    A block belongs to the policy from `cached` until `evict` returns it. In between it
    is in use or evictable, and `hit` may also come while it is in use. Blocks without
    content are no business of a policy: they are used up before anything is evicted.

    A block is its id; its *content* is a 64-bit key that is the same whenever the same
    prefix is computed, so evicted blocks are remembered by content.
    Two requests that compute the same text side by side leave two blocks of one
    content; each is a block of its own here.

    Policies have no clock. All that they do is a function of the calls.
    """

    exact_on_fast_path: ClassVar[bool] = False
    """Whether the order is that of the engine's own free queue, so that
    `cache.v1.runs.tables` evicts the same blocks. A subclass says it for itself: an
    inherited value speaks for another order."""

    orders_uncached: ClassVar[bool] = False
    """Whether `released` is also told of blocks without content where the release (V1
    before 0.24) queues them behind cached ones; they are evicted like the others."""

    def begins(self, request_id: int) -> None:  # noqa: B027 - most do not care
        """Note that a request gets its first blocks, first or after a preemption.

        Parameters
        ----------
        request_id
            The workload's request; samples of one prompt share it.
        """

    @abstractmethod
    def cached(self, block_id: int, content: int, depth: int) -> None:
        """Note that a block in use can be found from now on.

        Parameters
        ----------
        block_id
            The block.
        content
            Key of its tokens and of all before them.
        depth
            Blocks before it in its prompt.
        """

    @abstractmethod
    def hit(self, block_id: int) -> None:
        """Note that a block was found; it is in use from now on, or still."""

    @abstractmethod
    def released(self, block_id: int) -> None:
        """Note that no table holds a block any more: it is evictable.

        A table is released from its end, so that of one prompt the deepest comes first.
        """

    @abstractmethod
    def evict(self, incoming: int | None) -> int:
        """Choose an evictable block and forget it.

        Parameters
        ----------
        incoming
            Content that is to be computed into the block, or None where it is unknown,
            as it is of generated text.

        Returns
        -------
        int
            The block's id. There is an evictable block whenever this is called.
        """

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Blocks that `evict` can choose from."""

    def check(self) -> None:  # noqa: B027 - nothing to prove by default
        """Prove the policy's own structures in O(n).

        Raises
        ------
        InvariantError
            With the rule and the block.
        """
