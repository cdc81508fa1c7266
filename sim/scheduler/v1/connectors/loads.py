"""Requests whose blocks are being loaded, and how far that came."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sim.scheduler.request import Request


class Loads:
    """Loads that requests wait for.

    ::

        begin --> in flight --receive--> ended --take--> seen by a scan
                      |
                      cut, where blocks were not filled

    Attributes
    ----------
    begun
        Requests from their load on, until all known tokens are computed. One that has
        failed holds no blocks and is one of them still.
    """

    def __init__(self) -> None:
        self.begun: dict[Request, None] = {}
        self._received: set[Request] = set()
        self._misloaded: set[Request] = set()  # in part, or whole

    @property
    def are_unseen(self) -> bool:
        """Whether one has ended that no scan has seen."""
        return bool(self._received)

    def begin(self, request: Request) -> None:
        self.begun[request] = None

    def receive(self, request: Request) -> None:
        """Note that a load has ended."""
        self._received.add(request)

    def has_received(self, request: Request) -> bool:
        return request in self._received

    def take(self, request: Request) -> bool:
        """Let a scan see a load that has ended; return whether all of it failed."""
        self._received.remove(request)
        is_misloaded = request in self._misloaded
        self._misloaded.discard(request)
        return is_misloaded and not request.num_computed_tokens

    def end(self, request: Request) -> None:
        """Note a request that runs."""
        self.begun.pop(request, None)

    def forget(self, request: Request) -> None:
        """Note a request that leaves, wherever it stands."""
        self.begun.pop(request, None)
        self._received.discard(request)
        self._misloaded.discard(request)

    def cut(
        self,
        request: Request,
        block_ids: Sequence[int],
        block_size: int,
        *,
        invalid: Collection[int],
        failed: Iterable[Request],
    ) -> bool:
        """Cut what a loading request has at the first block that was not filled.

        Parameters
        ----------
        request, block_ids, block_size
            It, its table, and the tokens of a block.
        invalid
            Blocks that were not filled.
        failed
            Requests of which nothing was.

        Returns
        -------
        bool
            Whether a part of it is missing, by now or since an earlier report.
        """
        if request in failed:
            request.num_computed_tokens = 0
            self._misloaded.add(request)
        for index, block_id in enumerate(block_ids):
            if block_id in invalid:
                request.num_computed_tokens = index * block_size
                self._misloaded.add(request)
                break
        return request in self._misloaded
