"""Heads of the waiting queue, and what is found of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cache.stats import PrefixCacheStats
from cache.v1.block_tables import BlockTables

if TYPE_CHECKING:
    from cache.v1.tables import Found, Tables
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import KVConnector, Match


class Look(NamedTuple):
    """A look-up of a waiting head.

    Attributes
    ----------
    request, num_local_tokens
        The head, and its hit in the GPU's pool.
    num_external_tokens
        Tokens beyond that the connector has; None to be asked again.
    """

    request: Request
    num_local_tokens: int
    num_external_tokens: int | None


class Head(NamedTuple):
    """A request that could be admitted, and what is known of it.

    Attributes
    ----------
    found, num_local_tokens
        Its hit in the GPU's pool.
    num_external_tokens, is_async
        See `sim.scheduler.v1.connectors.base.Match`.
    is_looked_up
        Whether that is from now; if not, it holds blocks that are computed.
    """

    found: Found
    num_local_tokens: int
    num_external_tokens: int
    is_async: bool
    is_looked_up: bool = True

    @property
    def num_computed_tokens(self) -> int:
        return self.num_local_tokens + self.num_external_tokens


class ExternalStats(PrefixCacheStats):
    """Counts of tokens asked of a connector and found there, beyond local hits."""

    def note(self, request: Request, head: Head) -> None:
        """Count a look-up of a head that has got its blocks."""
        self.record(
            *(request.num_tokens - head.num_local_tokens, head.num_external_tokens),
            preempted=request.num_preemptions > 0,
        )

    def external_summary(self) -> dict[str, Any]:
        """Return the counters as those of the connector, JSON-ready."""
        return {
            f"external_{key}": number
            for key, number in self.summary(0).items()
            if key.startswith("prefix_cache")
        }


class Heads:
    """Looks heads up: in the pool, then in what the connector has.

    Parameters
    ----------
    tables, connector
        The pool, and what may be loaded.
    hit_tokens
        Tokens that the blocks of a hit stand for.
    block_size
        Tokens after which blocks of all groups end.

    Attributes
    ----------
    looks
        Look-ups so far, in order.
    """

    def __init__(
        self,
        tables: Tables,
        connector: KVConnector,
        hit_tokens: int,
        block_size: int,
    ) -> None:
        self.looks: list[Look] = []
        self._tables: Any = tables
        self._connector = connector
        self._hit_tokens = hit_tokens
        self._block_size = block_size
        self._has_groups = isinstance(tables, BlockTables)

    def look_up(self, request: Request) -> Head | None:
        """Return what is found of a head; None to ask again in another call.

        A load begins where blocks of all groups end; the rest of a hit behind that is
        kept where nothing lies beyond it. It may do without some states.
        """
        tables, must_load = self._tables, False
        if self._has_groups:
            found, must_load = tables.find_to_load(request, request.num_tokens)
        else:
            found = tables.find(request, request.num_tokens)
        num_local = found.num_blocks * self._hit_tokens
        num_in_tail = num_local % self._block_size
        num_tokens, is_async = self._match(request, num_local - num_in_tail)
        if num_tokens is None:
            return None
        if num_in_tail and num_tokens > num_in_tail:
            num_local -= num_in_tail
            found = tables.without_tail(found, num_local)
        elif num_in_tail:
            num_tokens, is_async = 0, False
        if must_load and not num_tokens:
            found = tables.find(request, request.num_tokens)
            num_local = found.num_blocks * self._hit_tokens
        return Head(found, num_local, num_tokens, is_async)

    def _match(self, request: Request, num_local_tokens: int) -> Match:
        match = self._connector.get_num_new_matched_tokens(request, num_local_tokens)
        self.looks.append(Look(request, num_local_tokens, match.num_tokens))
        return match
