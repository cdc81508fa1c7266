"""A smaller configuration that still shows a difference."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sim.config.tables import RunConfig, parse_config
from sim.errors import ConfigError
from tests.identity.compare import Build, Look, compare, of_one_group

if TYPE_CHECKING:
    from collections.abc import Iterator


def shrink(
    config: RunConfig,
    look: Look,
    reference: Build = of_one_group,
    most_tries: int = 400,
) -> RunConfig:
    """Return a configuration with fewer requests and keys on which the paths differ.

    Greedy: whatever can be left out is, as long as some difference of the same kind
    is left.

    Parameters
    ----------
    config
        One on which they differ.
    look
        How closely to watch it.
    reference
        See `compare`.
    most_tries
        Runs to spend.
    """
    data = config.model_dump(exclude_unset=True)
    kinds = _kinds(config, look, reference)
    changed = True
    while changed and most_tries > 0:
        changed = False
        for smaller in _smaller(data):
            most_tries -= 1
            if _differs(smaller, look, reference, kinds):
                data, changed = smaller, True
                break
            if most_tries <= 0:
                break
    return parse_config(data)


def _differs(
    data: dict[str, Any], look: Look, reference: Build, kinds: set[str]
) -> bool:
    try:
        config = parse_config(data)
    except ConfigError:
        return False
    return bool(_kinds(config, look, reference) & kinds)


def _kinds(config: RunConfig, look: Look, reference: Build) -> set[str]:
    """Return which tables differ, and which errors were raised."""
    compared = compare(config, look, reference)
    error = compared.chosen.error.partition(":")[0]
    kinds = {line.partition(":")[0] for line in compared.differences}
    return {f"{error}{kind}" for kind in kinds}


def _smaller(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield configurations with something left out, the largest parts first."""
    requests = (data["workload"].get("trace") or {}).get("requests", [])
    size = len(requests) // 2
    while size:
        for first in range(0, len(requests) - size + 1, size):
            kept = requests[:first] + requests[first + size :]
            if kept:
                yield _with(data, ("workload", "trace", "requests"), kept)
        size //= 2
    for table in ("engine", "workload"):
        for key in data[table]:
            if key not in ("model", "gpu", "trace", "synthetic", "block_size"):
                yield _with(data, (table, key), None)
    if data["cost"] != {"kind": "constant", "step_s": 1.0}:
        yield _with(data, ("cost",), {"kind": "constant", "step_s": 1.0})
    for index, request in enumerate(requests):
        if request["out"] > 1:
            for out in {1, request["out"] // 2, request["out"] - 1} - {0}:
                smaller = {**request, "out": out}
                kept = [*requests[:index], smaller, *requests[index + 1 :]]
                yield _with(data, ("workload", "trace", "requests"), kept)


def _with(data: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy with one value changed, or left out for None."""
    data = copy.deepcopy(data)
    *tables, key = path
    table = data
    for name in tables:
        table = table[name]
    if value is None:
        del table[key]
    else:
        table[key] = value
    return data
