"""Tiers behind prefill and decode pools: keys that are not read there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.config.pairs import ConnectorTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.config.engine import EngineConfig
    from sim.config.fleet import FleetTable


def check_tiers(
    engines: Mapping[str, EngineConfig], roles: Mapping[str, str], table: FleetTable
) -> None:
    """Refuse keys of tiers behind prefill and decode pools that are not read there.

    Parameters
    ----------
    engines, roles
        Of the pools, by name.
    table
        Of the fleet.

    Raises
    ------
    ValueError
        With the rule, the value and the remedy.
    """
    given = table.connector or ConnectorTable()
    policy = given.settings("nixl")["kv_load_failure_policy"]
    tiered = [name for name, engine in engines.items() if engine.has_tier]
    for name in tiered:
        transfer = engines[name].kv_transfer_config
        if transfer is None:
            continue
        own = transfer.kv_load_failure_policy
        if own != policy and "kv_load_failure_policy" in transfer.model_fields_set:
            raise ValueError(
                f"connector.kv_load_failure_policy: it says what happens to all loads "
                f"that fail, {policy}, and kv_transfer_config of pool {name} says "
                f"{own}; give it in fleet.connector only"
            )
    if given.asks_tier_first and not any(roles[each] == "decode" for each in tiered):
        raise ValueError(
            "connector.asks_tier_first: it says where decoders look for a prompt "
            "first, and none has a tier; give a decode pool kv_offloading_size, or "
            "remove it"
        )
    links = table.links
    if links is not None and links.shares_gpu_port is not None and not tiered:
        raise ValueError(
            "links.shares_gpu_port: it is shared with copies to and from a tier, and "
            "no pool has one; give one kv_offloading_size, or remove it"
        )
