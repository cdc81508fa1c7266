"""What even a perfect fit is off by: repeats of one shape, and uneven decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from calibrate.points import Points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sim.costs.profile import OpTable, Profile

    Floats = NDArray[np.float64]

SKEWED: Final = "decode_attention_skewed"
"""Decodes whose contexts differ: ``batch`` of them, ``total`` keys, ``longest``."""
EVEN: Final = f"{SKEWED}.even"
"""Those with the mean context in place of their own, timed beside them."""
_SPREAD: Final = 0.3113
"""Mean distance from the median, over p90 - p10, of a normal distribution."""
_HEADS: Final = ("num_heads", "num_kv_heads", "head_dim")


def floor_percent(points: Points) -> float | None:
    """Return the mean distance of one measurement from the true one, in percent.

    Where a table has shapes several times, it is the distance of those times from
    their median, corrected for the median being made of them. Where it has quantiles,
    that of one call from the median of its calls: less than what a second calibration
    of the same point would show. None where a table has neither.
    """
    table = np.stack(list(points.columns.values()), axis=1)
    _, places, counts = np.unique(
        table, axis=0, return_inverse=True, return_counts=True
    )
    if (counts > 1).any():
        return _of_repeats(points.time_s, places, counts)
    if points.spread is None or not len(points.spread):
        return None
    return float(100.0 * _SPREAD * points.spread.mean())


def _of_repeats(
    time_s: Floats, places: NDArray[np.intp], counts: NDArray[np.intp]
) -> float:
    order = np.argsort(places, kind="stable")
    groups = np.split(time_s[order], np.cumsum(counts)[:-1])
    distances = [
        np.abs(times / np.median(times) - 1.0).mean() * np.sqrt(size / (size - 1))
        for times in groups
        if (size := len(times)) > 1
    ]
    return float(100.0 * np.mean(distances))


class Uneven(NamedTuple):
    """Decodes of uneven contexts."""

    points: Points
    """With the mean of each batch for its context."""
    even_s: Floats | None
    """(n,) seconds of the even batches, where they were timed beside them."""


def uneven_decodes(profile: Profile, decodes: Points | None) -> Uneven | None:
    """Return uneven decodes as even ones of their mean context; None without any.

    Parameters
    ----------
    profile
        Tables, with `SKEWED` among them or not.
    decodes
        The even decodes that are fitted: their variant's uneven ones are taken.
    """
    if decodes is None:
        return None
    own = _of_variant(profile, SKEWED, decodes)
    if not own:
        return None
    parts = [_columns(table) for table in own]
    points = Points(
        name=SKEWED,
        operation=decodes.operation,
        columns={
            key: np.concatenate([part[key] for part in parts]) for key in parts[0]
        },
        time_s=_medians(own),
        codes={},
        variants=tuple(sorted({table.variant for table in own})),
    )
    even = _of_variant(profile, EVEN, decodes)
    same = [t.axes for t in even] == [t.axes for t in own]
    return Uneven(points, _medians(even) if same else None)


def _of_variant(profile: Profile, name: str, decodes: Points) -> list[OpTable]:
    tables = [table for table in profile.tables(name) if table.num_points]
    return [table for table in tables if table.variant in decodes.variants] or tables


def _medians(tables: Sequence[OpTable]) -> Floats:
    return np.concatenate([np.array(table.quantiles["p50_s"]) for table in tables])


def _columns(table: OpTable) -> dict[str, NDArray[np.int64]]:
    batch = np.array(table.axes["num_seqs"], dtype=np.int64)
    total = np.array(table.axes["context_tokens"], dtype=np.int64)
    constants = {key: int(table.constants[key]) for key in _HEADS}
    constants["kv_itemsize"] = int(table.constants.get("kv_itemsize", 2))
    constants["window"] = int(table.constants.get("window", 0))
    columns = {key: np.full(len(batch), value) for key, value in constants.items()}
    # the fit knows even batches: of the same sum of contexts
    return columns | {"batch": batch, "context": np.maximum(1, total // batch)}
