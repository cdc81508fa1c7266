"""Tables of fleets that prefill and decode apart: links, connector and proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, model_validator

from sim.config.types import ConfigTable, Named, Positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.config.speculative import SpeculativeTable

ORDERS: Final = ("prefill_first", "decode_first")
_POLICIES: Final = ("fail", "recompute")
_CONNECTORS: Final[dict[str, dict[str, Any]]] = {
    "nixl": {
        "kv_lease_duration": 30,
        "kv_load_failure_policy": "fail",
        "asks_tier_first": False,
    },
    "sglang": {"num_reserved_decode_tokens": 512},
}
"""Keys of each kind, and their defaults."""

_Delay = Annotated[float, Field(ge=0, le=1e6)]


class LinksTable(ConfigTable):
    """How engines are connected, and what a transfer costs besides."""

    interconnect: str | dict[str, Any] | None = None
    bytes_per_s: Annotated[float | None, Field(ge=1e3, allow_inf_nan=False)] = None
    latency_s: _Delay = 0.0
    descriptor_s: _Delay = 0.0
    handshake_s: _Delay = 0.0
    shares_gpu_port: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> LinksTable:
        if (self.interconnect is None) is (self.bytes_per_s is None):
            given = "neither" if self.interconnect is None else "both"
            raise ValueError(
                f"links need either an interconnect, such as infiniband_ndr, or "
                f"bytes_per_s of a GPU, got {given}; give one"
            )
        return self


class ConnectorTable(ConfigTable):
    """How a decoder gets the blocks of a prompt."""

    kind: str | None = None
    kv_lease_duration: Positive | None = None
    kv_load_failure_policy: str | None = None
    asks_tier_first: bool | None = None
    num_reserved_decode_tokens: Annotated[int | None, Field(ge=0)] = None

    @model_validator(mode="after")
    def _built(self) -> ConnectorTable:
        if self.kind not in {None, *_CONNECTORS}:
            raise ValueError(
                f"kind: must be one of {', '.join(_CONNECTORS)}, got {self.kind!r}"
            )
        if self.kv_load_failure_policy not in {None, *_POLICIES}:
            raise ValueError(
                f"kv_load_failure_policy: must be one of {', '.join(_POLICIES)}, got "
                f"{self.kv_load_failure_policy!r}"
            )
        return self

    def settings(self, kind: str) -> dict[str, Any]:
        """Return the configuration of a kind of connector."""
        given = self.model_dump(exclude_none=True)
        return {key: given.get(key, value) for key, value in _CONNECTORS[kind].items()}


class ProxyTable(ConfigTable):
    """In which order engines are chosen, and which prompts a prefiller computes."""

    order: str = ORDERS[0]
    decider: Named = Field(default_factory=lambda: {"kind": "always"})

    @model_validator(mode="after")
    def _known(self) -> ProxyTable:
        if self.order not in ORDERS:
            raise ValueError(
                f"order: must be one of {', '.join(ORDERS)}, got {self.order!r}"
            )
        if "kind" not in self.decider:
            raise ValueError("decider: needs a kind, such as {kind: always}")
        return self


def check_flow(kind: str, scheduler: str, given: dict[str, Any]) -> None:
    """Refuse keys that a way of handing prompts on does not know.

    Parameters
    ----------
    kind, scheduler
        The way, and its scheduler.
    given
        Values of `PAIR_KEYS`; None for what is left out.

    Raises
    ------
    ValueError
        With the rule, the value and the remedy.
    """
    connector: ConnectorTable = given["connector"] or ConnectorTable()
    links: LinksTable = given["links"]
    if connector.kind not in {None, kind}:
        raise ValueError(
            f"connector.kind: engines of the {scheduler} scheduler hand prompts on by "
            f"{kind}, got {connector.kind}; set it to {kind}, or another "
            f"engine.scheduler"
        )
    for key in connector.model_dump(exclude_none=True).keys() - {"kind"}:
        if key not in _CONNECTORS[kind]:
            raise ValueError(
                f"connector.{key}: {kind} has no such key, which has "
                f"{', '.join(_CONNECTORS[kind])}; remove it"
            )
    if kind != "sglang":
        return
    if given["proxy"] is not None:
        raise ValueError(
            "proxy: SGLang's gateway sends a request to both engines at once, so that "
            "there is no order and no decider; remove it"
        )
    if links.descriptor_s:
        raise ValueError(
            f"links.descriptor_s: SGLang sends slots that lie side by side as one, and "
            f"how they lie is not followed, got {links.descriptor_s}; remove it"
        )


def check_drafters(drafts: Mapping[str, SpeculativeTable | None]) -> None:
    """Refuse prefillers and decoders whose drafters keep unlike caches.

    Parameters
    ----------
    drafts
        Of each pool, by name. How many tokens are drafted may differ.

    Raises
    ------
    ValueError
        With the rule, the pools and the remedy.
    """
    found: dict[str | None, str] = {}
    for name, own in drafts.items():
        drafter = None
        if own is not None and own.method != "ngram":
            drafter = own.model or own.method
        found.setdefault(drafter, name)
    if len(found) > 1:
        told = ", ".join(f"{each or 'none'} in {name}" for each, name in found.items())
        raise ValueError(
            f"fleet.pools: a drafter's cache is a part of every block that is read, so "
            f"prefillers and decoders need the same drafter, got {told}; give "
            f"speculative_config in engine, and another number of drafts at most in a "
            f"pool"
        )


PAIR_KEYS: Final = {
    "links": "they connect prefill and decode pools",
    "connector": "it connects prefill and decode pools",
    "proxy": "it stands before prefill and decode pools",
    "decode_router": "it stands before a decode pool",
}
"""Keys of a fleet that mean nothing without roles, and why."""


def check_roles(roles: list[str], given: dict[str, Any]) -> None:
    """Refuse pools that make no fleet together, and keys that they lack or do not read.

    Parameters
    ----------
    roles
        Of the pools.
    given
        Values of `PAIR_KEYS`; None for what is left out.

    Raises
    ------
    ValueError
        With the rule, the value and the remedy.
    """
    found = set(roles)
    if found == {"serve"}:
        for key, why in PAIR_KEYS.items():
            if given[key] is not None:
                raise ValueError(
                    f"{key}: {why}, and all pools serve; remove it, or give pools the "
                    f"roles prefill and decode"
                )
        return
    if "serve" in found:
        raise ValueError(
            f"pools: those that serve are not built beside those with the roles "
            f"prefill and decode, got {', '.join(roles)}; make two fleets of it"
        )
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one not in found:
            raise ValueError(
                f"pools: a pool with the role {other} needs one with the role {one}, "
                f"got {', '.join(roles)}; add it"
            )
    if given["links"] is None:
        raise ValueError(
            "links: prefill and decode pools need them, got none; give such as "
            "{interconnect: infiniband_ndr}"
        )
