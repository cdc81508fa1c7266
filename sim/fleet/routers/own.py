"""Routers of users: held to what a router promises, whenever they choose."""

from __future__ import annotations

from math import inf
from operator import index
from typing import TYPE_CHECKING, Any, Final

from sim.config.contracts import require_methods, watch
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.request import Request

LEAST_INTERVAL_S: Final = 1e-3
"""Least time between two reads of metrics."""


def hold_to_contract(router: Any, where: str, num_engines: int) -> None:
    """Refuse a router that lacks a method, and from now on what it should not choose.

    Parameters
    ----------
    router
        Of a class that is not built in.
    where
        Path of its table in the configuration.
    num_engines
        Engines to choose from.

    Raises
    ------
    ConfigError
        Now, or from the call of `choose` that returns no engine that is ready.
    """
    interval_s = getattr(router, "interval_s", None)
    if interval_s is not None:
        is_number = type(interval_s) in {int, float}
        if not (is_number and LEAST_INTERVAL_S <= interval_s < inf):
            raise ConfigError(
                f"{where}: interval_s must be {LEAST_INTERVAL_S} s or more, got "
                f"{interval_s!r}; mend your class"
            )
    set_ready: Any = getattr(router, "set_ready", None)
    calls = ["choose(request)", "ended(request, place)"]
    calls += ["hear(loads)"] if interval_s else []
    calls += ["set_ready(places)"] if set_ready is not None else []
    require_methods(router, where, "a router", calls)
    choose = router.choose
    ready = set(range(num_engines))

    def chosen(request: Request) -> int:
        place = choose(request)
        try:
            found = index(place)
        except TypeError:
            found = -1
        if found not in ready:
            raise ConfigError(
                f"{where}: choose must return the number of an engine that is ready, "
                f"of {num_engines} that count from 0, got {place!r}; mend your class"
            )
        return found

    def heard(places: Sequence[int]) -> None:
        ready.clear()
        ready.update(places)
        set_ready(places)

    watch(router, where, "a router", choose=chosen)
    if set_ready is not None:
        watch(router, where, "a router", set_ready=heard)
