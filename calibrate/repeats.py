"""What even a perfect fit is off by: repeats of one shape, and uneven decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from calibrate.points import Points

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.profile import OpTable, Profile

    Floats = NDArray[np.float64]

SKEWED: Final = "decode_attention_skewed"
"""Decodes whose contexts differ: ``batch`` of them, ``total`` keys, ``longest``."""
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
    table = np.stack([values for values in points.columns.values()], axis=1)
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


def skewed_points(profile: Profile, decodes: Points | None) -> Points | None:
    """Return uneven decodes as even ones of their mean context; None without any.

    Parameters
    ----------
    profile
        Tables, with `SKEWED` among them or not.
    decodes
        The even decodes that are fitted: their variant's uneven ones are taken.
    """
    tables = [table for table in profile.tables(SKEWED) if table.num_points]
    if decodes is None or not tables:
        return None
    own = [table for table in tables if table.variant in decodes.variants] or tables
    parts = [_columns(table) for table in own]
    return Points(
        name=SKEWED,
        operation=decodes.operation,
        columns={key: np.concatenate([part[key] for part in parts]) for key in parts[0]},
        time_s=np.concatenate([np.array(table.quantiles["p50_s"]) for table in own]),
        codes={},
        variants=tuple(sorted({table.variant for table in own})),
    )


def _columns(table: OpTable) -> dict[str, NDArray[np.int64]]:
    batch = np.array(table.axes["num_seqs"], dtype=np.int64)
    total = np.array(table.axes["context_tokens"], dtype=np.int64)
    constants = {key: int(table.constants[key]) for key in _HEADS}
    constants["kv_itemsize"] = int(table.constants.get("kv_itemsize", 2))
    constants["window"] = int(table.constants.get("window", 0))
    columns = {key: np.full(len(batch), value) for key, value in constants.items()}
    # the fit knows even batches: of the same sum of contexts
    return columns | {"batch": batch, "context": np.maximum(1, total // batch)}
