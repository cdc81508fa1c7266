"""SGLang's argument names, beside the names that all engines share here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.errors import ConfigError
from sim.hardware.capacity.sglang import MAX_PREFILL_TOKENS
from sim.scheduler.sglang.names import (
    MAX_TOTAL_TOKENS,
    NAMES,
    NEGATED,
    SAME_SWITCHES,
)
from sim.scheduler.sglang.settings import SCHEDULE_POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterable

_COMMON = NAMES | NEGATED | SAME_SWITCHES
_PAGES = "num_gpu_blocks_override"
_OTHER_POLICIES = {
    "hrrn": "SGLang 0.5.23",
    "shortest-prefill-first": "SGLang 0.5.23",
    "random": "SGLang",
    "routing-key": "SGLang",
}
"""Orders of the queue that are not built, and which releases have them."""


def read_arguments(engine: dict[str, Any]) -> dict[str, Any]:
    """Return an engine table in common names.

    Parameters
    ----------
    engine
        As it was written, not checked yet.

    Raises
    ------
    ConfigError
        If a key is given in both names, or makes no sense, or has no effect, or asks
        for what is not built.
    """
    found = dict(engine)
    for name, common in _COMMON.items():
        if name not in found:
            continue
        if found.get(common) is not None:
            raise ConfigError(
                f"{name}: SGLang's name for {common}, which is given, too; "
                f"leave one of them out"
            )
        value = found.pop(name)
        if name in NEGATED and isinstance(value, bool):
            value = not value
        if name == "chunked_prefill_size" and isinstance(value, int) and value <= 0:
            found["enable_chunked_prefill"] = False
            continue
        if value is not None:
            found[common] = value
    if MAX_TOTAL_TOKENS in found:
        if found.get(_PAGES) is not None:
            raise ConfigError(
                f"{MAX_TOTAL_TOKENS}: SGLang's name for {_PAGES}, in tokens, which is "
                f"given, too; leave one of them out"
            )
        found[_PAGES] = _pages(found)
    policy = found.get("schedule_policy")
    if isinstance(policy, str) and policy in _OTHER_POLICIES:
        raise ConfigError(
            f"schedule_policy: {policy}, which {_OTHER_POLICIES[policy]} has, is not "
            f"built; take one of {', '.join(SCHEDULE_POLICIES)}"
        )
    size, whole = found.get("max_num_batched_tokens"), found.get("max_prefill_tokens")
    if found.get("enable_chunked_prefill") is False and size not in {
        None,
        whole or MAX_PREFILL_TOKENS,  # of earlier results
    }:
        raise ConfigError(
            f"max_num_batched_tokens: without chunks SGLang has no such size "
            f"(chunked_prefill_size is -1), and whole prompts fill a batch as far as "
            f"max_prefill_tokens; leave it out, or enable_chunked_prefill, got {size!r}"
        )
    return found


def _pages(found: dict[str, Any]) -> int:
    """Return the pages of a pool that is given in tokens."""
    num_tokens, size = found.pop(MAX_TOTAL_TOKENS), found.get("block_size") or 1
    if (
        isinstance(num_tokens, bool)
        or not isinstance(num_tokens, int)
        or not isinstance(size, int)
        or num_tokens < 2 * size
    ):
        raise ConfigError(
            f"{MAX_TOTAL_TOKENS}: must be a whole number of tokens, two pages of "
            f"{size} at least, got {num_tokens!r}"
        )
    return num_tokens // size


def replaced_by(own: Iterable[str]) -> set[str]:
    """Return the common keys that keys of a pool stand for, beside those of all pools.

    Examples
    --------
    >>> replaced_by(["page_size", "model"])
    {'block_size'}
    """
    found = {_COMMON[name] for name in own if name in _COMMON}
    if "chunked_prefill_size" in own:
        found.add("enable_chunked_prefill")
    if MAX_TOTAL_TOKENS in own:
        found.add(_PAGES)
    return found


def in_tokens(
    shared: dict[str, Any], page_size: int, own: Iterable[str]
) -> dict[str, Any]:
    """Return keys of all pools for a pool of its own pages: as many tokens in these.

    Examples
    --------
    >>> in_tokens({"num_gpu_blocks_override": 40}, 16, ["page_size"])
    {'max_total_tokens': 640}
    """
    own = set(own)
    if own.isdisjoint({"page_size", "block_size"}) or own & {_PAGES, MAX_TOTAL_TOKENS}:
        return shared
    found = dict(shared)
    num_pages = found.pop(_PAGES, None)
    if num_pages is not None:
        found[MAX_TOTAL_TOKENS] = num_pages * page_size
    return found
