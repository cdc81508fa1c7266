"""Arguments of the server's command for blocks from elsewhere: tiers, engines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from sim.config.offloading import CONNECTOR
from sim.hardware.models.bundled import load_model
from sim.scheduler.sglang.settings import Disaggregation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.config.engine import EngineConfig
    from sim.config.offloading import ConnectorExtraTable
    from sim.scheduler.v1.connectors.settings import KVTransferSettings

    Side = KVTransferSettings | Disaggregation

KEYS: Final = frozenset(
    {
        "kv_offloading_size",
        "kv_offloading_backend",
        "kv_offloading_link",
        "kv_transfer_config",
    }
)
"""Keys of an engine that are said here."""
_POLICIES: Final = ("lru", "arc")
_LEASE_S: Final = 30


def environment(engine: EngineConfig, side: Side | None) -> list[str]:
    """Return the words before the command.

    Source: vLLM 0.33.0, ``kv_connector/v1/nixl/base_worker.py``, which refuses to start
    with states whose convolutions lie otherwise.
    """
    is_nixl = side is not None and not isinstance(side, Disaggregation)
    if is_nixl and load_model(engine.model).num_state_layers:
        return ["VLLM_SSM_CONV_STATE_LAYOUT=DS"]
    return []


def connector_options(engine: EngineConfig, side: Side | None) -> list[str]:
    """Return the options of the tier, and of the engine's side of a pair."""
    if isinstance(side, Disaggregation):
        mode = ["--disaggregation-mode", side.mode]
        if side.mode == "prefill":
            return mode
        kept = str(side.num_reserved_decode_tokens)
        return [*mode, "--num-reserved-decode-tokens", kept]
    words = []
    if side is None and engine.kv_offloading_size is not None:
        words += ["--kv-offloading-size", f"{engine.kv_offloading_size:g}"]
        if engine.kv_offloading_backend is not None:
            words += ["--kv-offloading-backend", engine.kv_offloading_backend]
    table = _tier(engine) if side is None else _pair(engine, side)
    return [*words, "--kv-transfer-config", json.dumps(table)] if table else words


def connector_not_said(engine: EngineConfig) -> Iterator[str]:
    """Yield settings of the tier that the server does not have."""
    if engine.kv_offloading_link is not None:
        yield f"kv_offloading_link={engine.kv_offloading_link}"
    if engine.kv_transfer_config is not None:
        for key, value in _ours(engine.kv_transfer_config.extra).items():
            yield f"{key}={value}"


def _pair(engine: EngineConfig, side: KVTransferSettings) -> dict[str, Any]:
    """Return the connector of one side of a pair, or of both where it has a tier.

    ``--kv-offloading-size`` would put its own connector in place of them.
    """
    found: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": side.kv_role.value,
    }
    if side.kv_lease_duration != _LEASE_S:
        lease = {"kv_lease_duration": side.kv_lease_duration}
        found["kv_connector_extra_config"] = lease
    if engine.has_tier:
        tier = _tier(engine) | {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
        tier.pop("kv_load_failure_policy", None)
        if engine.kv_offloading_size is not None:
            size_bytes = {"cpu_bytes_to_use": int(engine.kv_offloading_size * 2**30)}
            given = tier.get("kv_connector_extra_config", {})
            tier["kv_connector_extra_config"] = given | size_bytes
        parts = [tier, found] if side.asks_tier_first else [found, tier]
        found = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": parts},
        }
    if side.kv_load_failure_policy != "fail":
        found["kv_load_failure_policy"] = side.kv_load_failure_policy
    return found


def _tier(engine: EngineConfig) -> dict[str, Any]:
    """Return the connector of the tier as it was given, in the keys that vLLM knows."""
    table = engine.kv_transfer_config
    if table is None:
        return {}
    found = table.model_dump(exclude_defaults=True)
    extra = found.get("kv_connector_extra_config", {})
    for key in _ours(table.extra):
        extra.pop(key, None)
    if not extra:
        found.pop("kv_connector_extra_config", None)
    return found


def _ours(extra: ConnectorExtraTable) -> dict[str, Any]:
    """Return the settings for which the connector of vLLM has no key or value."""
    found: dict[str, Any] = {}
    if extra.eviction_policy not in _POLICIES:
        found["eviction_policy"] = extra.eviction_policy
    if extra.eviction_policy == "keep_ttl":
        found["eviction_ttl_s"] = extra.eviction_ttl_s
    if extra.write_policy != "write_through":
        found["write_policy"] = extra.write_policy
    if extra.secondary_tiers:  # their disks and links are described, not named
        found |= {"spec_name": extra.spec_name, "secondary_tiers": "those of the YAML"}
    return found
