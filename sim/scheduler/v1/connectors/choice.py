"""Which connector an engine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.v1.connectors.offloading import OffloadingConnector
from sim.scheduler.v1.connectors.pulling import ConsumerConnector, ProducerConnector
from sim.scheduler.v1.connectors.settings import KVRole

if TYPE_CHECKING:
    from sim.scheduler.v1.connectors.base import KVConnector
    from sim.scheduler.v1.settings import Settings


def connector_of(
    settings: Settings, block_size: int, *, enable_prefix_caching: bool
) -> KVConnector:
    """Return the connector that an engine is configured with."""
    if settings.offload is not None:
        return OffloadingConnector(
            settings.offload, block_size, enable_prefix_caching=enable_prefix_caching
        )
    transfer = settings.kv_transfer
    assert transfer is not None
    if transfer.kv_role is KVRole.PRODUCER:
        return ProducerConnector(transfer)
    return ConsumerConnector(transfer, block_size)
