"""Which connector an engine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.v1.specs import MambaSpec
from sim.errors import SchedulerError
from sim.scheduler.v1.connectors.exchange import Exchange
from sim.scheduler.v1.connectors.offloading import OffloadingConnector
from sim.scheduler.v1.connectors.pulling import ConsumerConnector, ProducerConnector
from sim.scheduler.v1.connectors.settings import KVRole
from sim.scheduler.v1.connectors.write_back import WriteBackConnector

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout
    from sim.scheduler.v1.connectors.base import KVConnector
    from sim.scheduler.v1.settings import Settings


def check_layout(settings: Settings, layout: KVCacheLayout) -> None:
    """Refuse layers of which no connector knows how their blocks come and go.

    Raises
    ------
    SchedulerError
        With the rule and the remedy.
    """
    if settings.offload is not None and not layout.keeps_all_blocks:
        raise SchedulerError(
            "a CPU tier is known of models with full attention only, not with windows, "
            "states or several KV cache groups; leave the tier out"
        )
    if any(isinstance(group.spec, MambaSpec) for group in layout.groups):
        raise SchedulerError(
            "prefill and decode pools are known of models with attention only, not "
            "with states, which stop a token short of the prompt; let all pools serve"
        )


def connector_of(
    settings: Settings,
    layout: KVCacheLayout,
    tables: object,
    *,
    enable_prefix_caching: bool,
) -> KVConnector:
    """Return the connector of an engine with these block tables."""
    if settings.offload is not None:
        block_size = layout.block_size
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
    exchange = Exchange(layout, tables)
    if transfer.kv_role is KVRole.PRODUCER:
        return ProducerConnector(transfer, exchange)
    return ConsumerConnector(transfer, exchange)
