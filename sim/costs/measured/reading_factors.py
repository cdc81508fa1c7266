"""From the tables of a profile to factors of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.costs.measured.factors import BesideFactor, PastFactor
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]
    Flags = NDArray[np.bool_]


def read_past(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    fresh: Callable[[int], float],
) -> PastFactor:
    """Return the factors that the tables of an entry say.

    Parameters
    ----------
    tables
        Window to table of one layer.
    layers
        Window to the number of layers that have it.
    fresh
        Seconds of a fresh chunk with so many pairs, all layers.

    Raises
    ------
    ConfigError
        When a table is missing or misshapen.
    """
    axes = ("queries", "pasts")
    (queries, pasts), seconds, beyond = _read(tables, layers, axes, "prefill_past")
    alone = np.array([[fresh(pairs_of(q, p)) for p in pasts] for q in queries])
    return PastFactor(queries, pasts, seconds / alone, beyond)


def read_beside(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    chunk: Callable[[int, int], float],
    decodes: Callable[[int, int], float],
    key_s: float,
) -> BesideFactor:
    """Return the factors of chunks beside decodes; as `read_past`.

    Parameters
    ----------
    tables, layers
        As in `read_past`.
    chunk
        Seconds of one chunk of (query, past) alone, all layers.
    decodes
        Seconds of so many decodes of so many keys each alone, all layers.
    key_s
        Seconds to read a key in all layers: no time is below it for all keys.
    """
    names = ("queries", "pasts", "num_decodes", "contexts")
    axes, seconds, beyond = _read(tables, layers, names, "mixed")
    queries, pasts, counts, contexts = axes
    q, p, n, k = np.ix_(*map(np.array, axes))
    seconds = np.maximum(seconds, key_s * (q + p + n * k))
    chunks = np.array([[chunk(q, p) for p in pasts] for q in queries])
    rows = np.array([[decodes(n, k) for k in contexts] for n in counts])
    alone = chunks[:, :, None, None] + rows[None, None, :, :]
    return BesideFactor((queries, pasts, counts, contexts), seconds / alone, beyond)


def pairs_of(query: int, past: int) -> int:
    """Return the causal query-key pairs of a chunk."""
    return query * past + query * (query + 1) // 2


def _read(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    names: tuple[str, ...],
    where: str,
) -> tuple[list[list[int]], Seconds, Flags]:
    """Return nodes, and seconds and flags of all layers."""
    total: Any = 0.0
    outside: Any = False
    axes: list[list[int]] = []
    for window, count in layers.items():
        try:
            table = tables[str(window)]
            axes = [[int(value) for value in table[name]] for name in names]
            seconds = np.array(table["time_s"], dtype=np.float64)
            beyond = np.array(table["beyond"], dtype=np.bool_)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"profile: {where} of window {window} is no table ({error}); fit the "
                "profile again"
            ) from error
        _check(axes, seconds, beyond, where)
        total = total + count * seconds
        outside = outside | (beyond if count else np.zeros_like(beyond))
    return axes, total, outside


def _check(axes: list[list[int]], seconds: Seconds, beyond: Flags, where: str) -> None:
    shape = tuple(map(len, axes))
    if min(shape) < 2 or seconds.shape != shape or beyond.shape != shape:
        raise ConfigError(
            f"profile: {where} must be at least 2 along each axis, one value a node; "
            f"got {seconds.shape}: fit the profile again"
        )
    if any(min(np.diff(axis)) < 1 or axis[0] < 0 for axis in axes):
        raise ConfigError(f"profile: {where}: nodes must be >= 0 and ascend")
    if not (np.isfinite(seconds).all() and (seconds > 0.0).all()):
        raise ConfigError(f"profile: {where} must hold finite seconds > 0")
