"""The connector of two of an installed vLLM: one side of a pair with a CPU tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.scheduler.hosted.offloading import HostedTierConnector
from sim.scheduler.hosted.pulling import HostedPairConnector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.scheduler.hosted.engine import HostedEngine, HostedStep
    from sim.scheduler.hosted.scheduler import HostedSettings
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import StepTransfers, TransferReport


class HostedMultiConnector:
    """Their connector of several, with an offloading and a NIXL connector.

    Parameters
    ----------
    engine, settings
        The installed engine that has the connector, and its settings.
    requests
        All requests, by their ids.
    """

    def __init__(
        self,
        engine: HostedEngine,
        settings: HostedSettings,
        requests: dict[str, Request],
    ) -> None:
        assert settings.kv_transfer is not None
        self._engine = engine
        self._tier_place = 0 if settings.kv_transfer.asks_tier_first else 1
        parts = engine, settings, requests
        self.offloading = HostedTierConnector(*parts, self._tier_place)
        self.pairing = HostedPairConnector(*parts, 1 - self._tier_place)

    @property
    def awaits_transfers(self) -> bool:
        return self.offloading.awaits_transfers or self.pairing.awaits_transfers

    def parameters(self, request: Request) -> Mapping[str, Any] | None:
        return self.pairing.parameters(request)

    def begin(self, now_s: float) -> StepTransfers:
        transfers = self.offloading.begin(now_s)
        self.pairing.begin(now_s, transfers)
        return transfers

    def asked(self, step: HostedStep) -> None:
        self.offloading.asked(step)
        self.pairing.asked(step)

    def offered(self, request: Request) -> tuple[list[int], ...]:
        """Return the blocks of a prompt that theirs holds for others, by group."""
        return self.pairing.offered(request)

    def reported(
        self, report: TransferReport, now_s: float
    ) -> tuple[Any, list[Request]]:
        theirs, loaded = self.offloading.told(report, now_s)
        told, moved = self.pairing.told(report, now_s)
        for key, each in told.items():  # lists and sets
            theirs[key] = type(each)([*theirs.get(key, ()), *each])
        by_place: list[Any] = [None, None]
        by_place[self._tier_place] = theirs["kv_connector_worker_meta"]
        theirs["kv_connector_worker_meta"] = self._engine.api.call(
            "MultiKVConnectorWorkerMetadata", {"metadata": tuple(by_place)}
        )
        return self._engine.worker_output(**theirs), [*loaded, *moved]
