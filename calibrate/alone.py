"""Parts of mixed steps: those with decodes alone, and those with a chunk alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrate.estimators import DecodeAttention, PrefillAttention
from calibrate.points import Points

if TYPE_CHECKING:
    from collections.abc import Mapping


def with_parts(found: Mapping[str, Points]) -> dict[str, Points]:
    """Return points by name, and the parts of mixed steps not measured otherwise."""
    every = dict(found)
    if (mixed := found.get("mixed_attention")) is not None:
        for alone in (decodes_alone(mixed), chunks_alone(mixed)):
            if alone.name not in found and len(alone.time_s):
                every[alone.name] = alone
    return every


def decodes_alone(mixed: Points) -> Points:
    """Return the steps of a mixed table that have no chunk, as decodes."""
    columns = mixed.columns
    own = mixed.where((columns["query"] == 0) & (columns["num_decodes"] > 0))
    axes = {"batch": "num_decodes", "context": "decode_context"}
    return _renamed(own, DecodeAttention.operation, DecodeAttention.columns, axes)


def chunks_alone(mixed: Points) -> Points:
    """Return the steps of a mixed table that have no decodes, as chunks."""
    columns = mixed.columns
    own = mixed.where((columns["query"] > 0) & (columns["num_decodes"] == 0))
    return _renamed(own, PrefillAttention.operation, PrefillAttention.columns, {})


def _renamed(
    points: Points, operation: str, names: tuple[str, ...], axes: Mapping[str, str]
) -> Points:
    """Return points of a mixed table as those of a plainer operation."""
    missing = {"batch": 1, "window": 0}
    columns = {}
    for name in names:
        source = axes.get(name, name)
        if source in points.columns:
            columns[name] = points.columns[source]
        else:
            like = points.columns["query"]
            columns[name] = like * 0 + missing[name]
    return Points(
        name=operation,
        operation=operation,
        columns=columns,
        time_s=points.time_s,
        codes={},
        launch_s=points.launch_s,
        variants=points.variants,
    )
