"""Which connector an engine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.v1.specs import MambaSpec
from sim.errors import SchedulerError
from sim.scheduler.v1.connectors.exchange import Exchange
from sim.scheduler.v1.connectors.multi import MultiConnector
from sim.scheduler.v1.connectors.offloading import OffloadingConnector
from sim.scheduler.v1.connectors.pulling import ConsumerConnector, ProducerConnector
from sim.scheduler.v1.connectors.settings import KVRole
from sim.scheduler.v1.connectors.write_back import WriteBackConnector

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.connectors.base import KVConnector
    from sim.scheduler.v1.connectors.pulling import PairConnector
    from sim.scheduler.v1.settings import Settings


def check_layout(settings: Settings, layout: KVCacheLayout) -> None:
    """Refuse layers of which no connector knows how their blocks come and go.

    Raises
    ------
    SchedulerError
        With the rule and the remedy.
    """
    has_both = settings.offload is not None and settings.kv_transfer is not None
    if has_both and not layout.keeps_all_blocks:
        raise SchedulerError(
            "tiers of prefill and decode pools are known of models with full attention "
            "only, not with windows, states or several KV cache groups; leave the tier "
            "out, or let all pools serve"
        )
    has_states = any(isinstance(group.spec, MambaSpec) for group in layout.groups)
    if settings.speculative_config is not None and has_states:
        raise SchedulerError(
            "drafts in prefill and decode pools are known of models with attention "
            "only, not with states; leave speculative_config out, or let all pools "
            "serve"
        )


def connector_of(
    settings: Settings, cache: CacheConfig, layout: KVCacheLayout, tables: object
) -> KVConnector:
    """Return the connector of an engine with these block tables."""
    offload, transfer = settings.offload, settings.kv_transfer
    if transfer is None:
        return _offloading_of(settings, cache, layout, tables)
    is_producer = transfer.kv_role is KVRole.PRODUCER
    side: Any = ProducerConnector if is_producer else ConsumerConnector
    pairing: PairConnector = side(transfer, Exchange(layout, tables))
    if offload is None:
        return pairing
    return MultiConnector(
        _offloading_of(settings, cache, layout, tables),
        pairing,
        asks_tier_first=transfer.asks_tier_first,
    )


def _offloading_of(
    settings: Settings, cache: CacheConfig, layout: KVCacheLayout, tables: object
) -> OffloadingConnector:
    offload, caches = settings.offload, cache.enable_prefix_caching
    assert offload is not None
    if offload.write_policy == "write_back":
        return WriteBackConnector(
            offload,
            layout,
            enable_prefix_caching=caches,
            tables=tables,
            most_tokens=settings.token_budget,
        )
    return OffloadingConnector(
        offload,
        layout,
        tables=tables,
        enable_prefix_caching=caches,
        interval=cache.retention_interval,
    )
