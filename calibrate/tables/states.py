"""States of gated delta nets as tables: decodes by their number, prompts by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.tables.fits import UNKNOWN, nodes, predicted, product, rounded
from sim.costs.measured.geometry import state_geometry
from sim.hardware.models.layers import GatedDeltaNetShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibrate.tables.fits import Fits
    from sim.hardware.models.architecture import ModelArchitecture

OPERATIONS = ("delta_decode", "delta_prefill")


def state_tables(
    fits: Fits, model: ModelArchitecture, ranks: int
) -> dict[str, Any] | None:
    """Return seconds of all layers with a state; None where none were timed."""
    shape = model.state_shape
    if not isinstance(shape, GatedDeltaNetShape) or not all(
        name in fits.estimators for name in OPERATIONS
    ):
        return None
    heads = {
        "num_key_heads": max(1, shape.num_key_heads // ranks),
        "num_value_heads": shape.num_value_heads // ranks,
        "key_head_dim": shape.key_head_dim,
        "value_head_dim": shape.value_head_dim,
    }
    decode = _table(fits, model, "delta_decode", heads, ("batch",))
    prefill = _table(fits, model, "delta_prefill", heads, ("batch", "query"))
    if all(decode["beyond"]) or all(map(all, prefill["beyond"])):
        return None
    return {
        "geometry": state_geometry(model, ranks),
        "decode": decode,
        "prefill": prefill,
    }


def _table(
    fits: Fits,
    model: ModelArchitecture,
    operation: str,
    heads: Mapping[str, int],
    names: tuple[str, ...],
) -> dict[str, Any]:
    points = fits.points[operation]
    axes = {name: nodes(points.columns[name]) for name in names}
    shape = tuple(map(len, axes.values()))
    table = predicted(
        fits.estimators[operation],
        {**heads, **product(**axes)},
        *shape,
        points=points,
    )
    layers = model.num_state_layers
    keys = ("counts", "amounts")[: len(names)]
    return {
        **dict(zip(keys, axes.values(), strict=True)),
        "time_s": rounded(layers * np.array(table["time_s"])),
        "beyond": table["beyond"],
        "interval": list(fits.intervals.get(operation, UNKNOWN)),
    }
