"""Heads of the waiting queue, and what is found of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cache.v1.tables import Found
    from sim.scheduler.request import Request


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
