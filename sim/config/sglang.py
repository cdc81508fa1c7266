"""SGLang's argument names, beside the names that all engines share here."""

from __future__ import annotations

from typing import Any

from sim.errors import ConfigError
from sim.hardware.capacity.sglang import MAX_PREFILL_TOKENS, defaults_of, driver_mib
from sim.hardware.gpus import load_gpu
from sim.scheduler.sglang.names import (
    MAX_TOTAL_TOKENS,
    NAMES,
    NEGATED,
    SAME_SWITCHES,
)


def read_arguments(engine: dict[str, Any]) -> dict[str, Any]:
    """Return an engine table in common names, with SGLang's defaults for its GPU.

    Parameters
    ----------
    engine
        As it was written, not checked yet.

    Raises
    ------
    ConfigError
        If a key is given in both names, or makes no sense.
    """
    found = dict(engine)
    for name, common in (NAMES | NEGATED | SAME_SWITCHES).items():
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
        found["num_gpu_blocks_override"] = _pages(found)
    _fill_in(found)
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


def _fill_in(found: dict[str, Any]) -> None:
    """Fill in the prompt tokens of a batch, which follow from the card, if not given.

    Whole prompts fill a batch as far as ``max_prefill_tokens``, and the share of memory
    that is left for activations follows from that.
    """
    if found.get("enable_chunked_prefill") is False:
        found["max_num_batched_tokens"] = MAX_PREFILL_TOKENS
        return
    if found.get("max_num_batched_tokens") is not None:
        return
    gpu, ranks = found.get("gpu"), found.get("tensor_parallel_size", 1)
    if not isinstance(gpu, str) or not isinstance(ranks, int):
        return  # refused later, with its key
    try:
        memory_mib = driver_mib(load_gpu(gpu))
    except ConfigError:
        return
    size = defaults_of(memory_mib, ranks).chunked_prefill_size
    found["max_num_batched_tokens"] = size
