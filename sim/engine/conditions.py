"""When the fast path is exact.

Whatever takes part in a run says so itself: the scheduler's class by being in
`FAST_SCHEDULERS` (and by raising `NotExactError` at settings that it does not cover),
the victim policy, the client and the recorder by their own word. What says nothing is
run stepwise.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.scheduler.v1.fast import FastV1Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.config.tables import EngineConfig
    from workloads.spec import RequestSpec

FAST_SCHEDULERS: Mapping[str, type] = MappingProxyType({"v1": FastV1Scheduler})
"""Schedulers of `sim.scheduler.SCHEDULERS` that have a twin on the decode clock."""


def why_stepwise(
    engine: EngineConfig,
    client: type,
    specs: Sequence[RequestSpec],
    recorder: type,
) -> str | None:
    """Return why a run cannot take the fast path, whatever the scheduler's settings.

    Parameters
    ----------
    engine
        The engine's configuration.
    client
        Declares by ``why_stepwise(specs) -> str | None``.
    specs
        The workload.
    recorder
        Declares by ``exact_on_fast_path``.
    """
    if engine.scheduler_kind not in FAST_SCHEDULERS:
        return "the scheduler has no fast path"
    if not engine.admission_check:
        return "admission_check is off: a request may block the queue for ever"
    ask = getattr(client, "why_stepwise", None)
    if ask is None:
        return f"{client.__name__} does not say whether the fast path is exact"
    reason: str | None = ask(specs)
    if reason is None and not _declares(recorder):
        return f"{recorder.__name__} does not say whether the fast path is exact"
    return reason


def _declares(recorder: type) -> bool:
    """Whether a recorder says that it can be told of stretches.

    A subclass that redefines ``step`` must say so again: what it inherits speaks for
    another ``step``.
    """
    for kind in recorder.__mro__:
        if "exact_on_fast_path" in vars(kind):
            return bool(vars(kind)["exact_on_fast_path"])
        if "step" in vars(kind):
            return False
    return False
