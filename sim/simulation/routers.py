"""The router of a fleet, made from its configuration, and what it looks at."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from sim.config.plug import build
from sim.errors import ConfigError
from sim.fleet.balancer import LoadBalancer
from sim.fleet.routers import ROUTERS
from sim.fleet.routers.own import hold_to_contract

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOKS = frozenset({"env", "loads"})
"""Arguments of routers that may look at engines when they like."""


def make_router(
    table: Mapping[str, Any],
    where: str,
    context: Mapping[str, Any],
    changing: str | None,
) -> Any:
    """Make a router.

    Parameters
    ----------
    table
        Its ``kind``, and its arguments.
    where
        Path of the table in the configuration.
    context
        Arguments that a run gives.
    changing
        The key of the fleet by which engines come and go; None if they stay.

    Raises
    ------
    ConfigError
        If it cannot be made, or does not do what a router of these engines has to.
    """
    router = build(ROUTERS, table, where, context)
    if changing is not None and not hasattr(router, "set_ready"):
        raise ConfigError(
            f"fleet.{changing}: a router of engines that come and go needs a method "
            f"set_ready(places), which {table['kind']} has not; choose another one"
        )
    if table["kind"] not in ROUTERS:
        hold_to_contract(router, where, context["num_engines"])
    return router


def _arguments(router: Any) -> set[str]:
    return {*signature(type(router)).parameters}


def looks_at_caches(router: Any) -> bool:
    """Whether a router asks what engines cache whenever a request comes."""
    takes_caches = "cached_blocks" in _arguments(router)
    return bool(getattr(router, "hears_kv_events", takes_caches))


def looks_at_arrivals(router: Any) -> bool:
    """Whether a router looks at engines when a request comes: caches, or loads."""
    is_bound = bool(getattr(router, "looks_at_arrivals_only", False))
    return looks_at_caches(router) or (is_bound and "loads" in _arguments(router))


def may_look(router: Any) -> bool:
    """Whether a router is given what it can look at engines by, at any time."""
    return not _LOOKS.isdisjoint(_arguments(router))


def looks_when_it_likes(router: Any) -> bool:
    """Whether a router may look at engines at other times than those known of it."""
    if isinstance(router, LoadBalancer):
        return True
    is_bound = getattr(router, "looks_at_arrivals_only", False)
    return not is_bound and may_look(router)
