"""Connectors of an installed vLLM: an engine's only one, or one of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.scheduler.hosted.engine import HostedEngine, HostedStep
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import TransferReport


class HostedPart(ABC):
    """Base of connectors of which an engine may have several.

    Parameters
    ----------
    engine
        The installed engine.
    place
        In its connector of several; None for the only one.
    """

    def __init__(self, engine: HostedEngine, place: int | None) -> None:
        self._engine = engine
        self._place = place
        connector = engine.api.attribute(engine.scheduler, "connector")
        if place is not None:
            connector = engine.api.attribute(connector, "_connectors")[place]
        self._theirs: Any = engine.api.attribute(connector, "connector_scheduler")

    def _metadata(self, step: HostedStep) -> Any:
        """Return what theirs asks of its workers."""
        asked = self._engine.api.attribute(step.output, "kv_connector_metadata")
        if self._place is None:
            return asked
        return self._engine.api.attribute(asked, "metadata")[self._place]

    @abstractmethod
    def told(
        self, report: TransferReport, now_s: float
    ) -> tuple[dict[str, Any], list[Request]]:
        """Return a report by its names there, and the requests that have loaded."""

    def reported(
        self, report: TransferReport, now_s: float
    ) -> tuple[Any, list[Request]]:
        """Return a report as theirs, and the requests that waited for a load."""
        told, received = self.told(report, now_s)
        return self._engine.worker_output(**told), received
