"""Which connector an engine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.v1.connectors.offloading import OffloadingConnector
from sim.scheduler.v1.connectors.pulling import ConsumerConnector, ProducerConnector
from sim.scheduler.v1.connectors.settings import KVRole
from sim.scheduler.v1.connectors.write_back import WriteBackConnector

if TYPE_CHECKING:
    from sim.scheduler.v1.connectors.base import KVConnector
    from sim.scheduler.v1.settings import Settings


def connector_of(
    settings: Settings, block_size: int, *, enable_prefix_caching: bool, tables: object
) -> KVConnector:
    """Return the connector of an engine with these block tables."""
    if settings.offload is not None:
        if settings.offload.write_policy == "write_back":
            return WriteBackConnector(
                settings.offload,
                block_size,
                enable_prefix_caching=enable_prefix_caching,
                tables=tables,
                most_tokens=settings.token_budget,
            )
        return OffloadingConnector(
            settings.offload, block_size, enable_prefix_caching=enable_prefix_caching
        )
    transfer = settings.kv_transfer
    assert transfer is not None
    if transfer.kv_role is KVRole.PRODUCER:
        return ProducerConnector(transfer)
    return ConsumerConnector(transfer, block_size)
