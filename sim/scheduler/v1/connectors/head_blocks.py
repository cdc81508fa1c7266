"""Blocks of heads that load, or have loaded: whether they are free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.heads import Head
    from sim.scheduler.v1.gate import Gate
    from sim.scheduler.v1.speculative_config import SpeculativeConfig


class HeadBlocks:
    """Tells whether a head finds its blocks, and leaves enough to those under way.

    Parameters
    ----------
    gate
        Knows the rules of admission.
    tables, has_groups
        The blocks, and whether they go by groups of layers.
    running
        Requests beside which a head leaves some blocks free.
    most_slots
        Most slots of a request.
    """

    def __init__(
        self,
        gate: Gate,
        tables: Any,
        running: Collection[Request],
        most_slots: int,
        *,
        has_groups: bool,
    ) -> None:
        self._gate = gate
        self._tables = tables
        self._running = running
        self._most_slots = most_slots
        self._has_groups = has_groups
        self._extend: Callable[[Request, int, int], bool] = tables.extend

    def num_missing(
        self,
        request: Request,
        num_tokens: int,
        num_computed_tokens: int,
        *,
        is_whole: bool = True,
    ) -> int:
        """Return the blocks that a request lacks for so many tokens.

        If that is the whole of it, of those that it gives up again only what it holds
        at a time counts.
        """
        tables: Any = self._tables
        if self._has_groups:
            num_missing: int = tables.num_missing_blocks(
                *(request, num_tokens, num_computed_tokens), is_whole=is_whole
            )
            return num_missing
        held: int = 0 if request.table is None else tables.num_blocks(request)
        num_blocks: int = -(-num_tokens // tables.block_size) - held
        return max(num_blocks, 0)

    @property
    def _num_spare(self) -> int:
        return self._gate.num_spare_blocks if self._running else 0

    def fits_load(
        self,
        request: Request,
        head: Head,
        step: int,
        under_way: Mapping[Request, int],
    ) -> bool:
        """Whether a head may load: its blocks, and what others under way still need.

        Parameters
        ----------
        request, head, step
            See `Gate.lets_in`.
        under_way
            Requests, and their computed tokens when the call began.
        """
        gate, tables, found = self._gate, self._tables, head.found
        num_tokens, num_external = head.num_computed_tokens, head.num_external_tokens
        if gate.reserves_all and not gate.lets_in(
            request, num_tokens, found, step, num_external_tokens=num_external
        ):
            return False
        num_needed: int = tables.num_needed_blocks(
            *(request, num_tokens, found),
            is_whole=False,
            num_external_tokens=num_external,
        )
        num_reserved = sum(
            self.num_missing(each, min(each.num_tokens, self._most_slots), num_computed)
            for each, num_computed in under_way.items()
        )
        num_free: int = tables.num_free_blocks - self._num_spare
        return num_needed + num_reserved <= num_free

    def begin(self, request: Request, head: Head, num_tokens: int, step: int) -> bool:
        """Give a head its slots up to a token, if they fit; say whether they do.

        Parameters
        ----------
        request, head, num_tokens, step
            See `Gate.lets_in`; one that has loaded has a table.
        """
        if request.table is not None:
            return self.extend(request, num_tokens, head.num_computed_tokens)
        loads = {}
        if self._has_groups and head.num_external_tokens:
            loads = {"num_external_tokens": head.num_external_tokens}
        if not self._gate.lets_in(request, num_tokens, head.found, step, **loads):
            return False
        self._tables.begin(request, num_tokens, head.found, **loads)
        return True

    def extend(self, request: Request, num_tokens: int, num_computed: int) -> bool:
        """Give a head that has loaded its slots up to a token; say if they fit."""
        num_slots = self._num_slots(num_tokens)
        num_needed = self.num_missing(request, num_slots, num_computed, is_whole=False)
        if self._gate.reserves_all:
            num_all = min(request.num_tokens, self._most_slots)
            num_whole = self.num_missing(request, num_all, num_computed)
            num_needed = max(num_needed, num_whole)
        if num_needed + self._num_spare > self._tables.num_free_blocks:
            return False
        self._extend(request, num_tokens, num_computed)
        return True

    def _num_slots(self, num_tokens: int) -> int:
        """Return the slots of a head that computes up to a token."""
        return num_tokens

    # -- proof ----------------------------------------------------------------

    def _num_entries(self, num_tokens: int) -> int:
        """Return the entries of the tables of a request of so many tokens."""
        tables: Any = self._tables
        if self._has_groups:
            num_entries: int = tables.num_entries(num_tokens)
            return num_entries
        num_blocks: int = -(-num_tokens // tables.block_size)
        return num_blocks

    def check_prompt(self, request: Request) -> None:
        """Let a prompt hold what a load failed to fill, until it is computed.

        Raises
        ------
        InvariantError
            If it holds fewer blocks than were computed, or more than it needs.
        """
        num_held = len(self._tables.block_ids(request))
        num_computed = min(request.num_computed_tokens, self._most_slots)
        num_most = self._num_entries(max(request.num_tokens, num_computed))
        require(
            self._num_entries(num_computed) <= num_held <= num_most,
            f"request {request.request_id}: {num_computed} of {request.num_tokens} "
            f"tokens computed, {num_held} blocks held",
        )

    def check_loaded(self, request: Request) -> None:
        """Let a waiting request hold what it has loaded.

        Raises
        ------
        InvariantError
            If it holds fewer blocks.
        """
        num_least = self._num_entries(request.num_computed_tokens)
        require(
            request.table is None or len(self._tables.block_ids(request)) >= num_least,
            f"request {request.request_id} holds fewer blocks than it has loaded",
        )


class DraftingHeadBlocks(HeadBlocks):
    """`HeadBlocks` of requests that will verify drafts.

    Parameters
    ----------
    parts
        See `HeadBlocks`.
    drafts, max_model_len, block_sizes
        Of the engine; sizes by group.
    extend
        Lengthens the table of a request, in which drafts are not findable.
    """

    def __init__(
        self,
        *parts: Any,
        drafts: SpeculativeConfig,
        max_model_len: int,
        block_sizes: Iterable[int],
        extend: Callable[[Request, int, int], bool],
    ) -> None:
        super().__init__(*parts, has_groups=True)
        self._drafts = drafts
        self._num_step_blocks = sum(
            -(-drafts.num_step_tokens // block_size) for block_size in block_sizes
        )
        self._max_model_len = max_model_len
        self._extend = extend

    def fits_load(
        self,
        request: Request,
        head: Head,
        step: int,
        under_way: Mapping[Request, int],
    ) -> bool:
        """Do as `HeadBlocks.fits_load`, and leave room to a first step of each."""
        del step  # all known tokens are loaded: there is no prompt beyond to admit
        tables, num_step_tokens = self._tables, self._drafts.num_step_tokens
        num_needed: int = tables.num_needed_blocks(
            *(request, head.num_computed_tokens, head.found),
            is_whole=False,
            num_external_tokens=head.num_external_tokens,
        )
        num_needed += self._num_step_blocks + sum(
            self.num_missing(
                *(each, min(each.num_tokens, self._max_model_len) + num_step_tokens),
                num_computed,
            )
            for each, num_computed in under_way.items()
        )
        num_free: int = tables.num_free_blocks - self._num_spare
        return num_needed <= num_free

    def _num_slots(self, num_tokens: int) -> int:
        num_written = num_tokens + self._drafts.num_lookahead_tokens
        return min(num_written, self._max_model_len)
