"""Routed experts of all layers by tokens: the share of one rank, all ranks' tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.importers.geometry import expert_shape
from calibrate.measurement import CHOSEN
from calibrate.precisions import expert_dtypes
from calibrate.tables.fits import TOKENS, UNKNOWN, nodes, predicted, rounded
from sim.costs.experts.routed import touched_experts
from sim.costs.measured.geometry import expert_geometry, expert_weight_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from calibrate.points import Points
    from calibrate.tables.fits import Fits
    from sim.hardware.models.architecture import ModelArchitecture

ROUTINGS: Final = (CHOSEN, "power_law_1.01", "power_law_1.2", "balanced")
"""Ways to route the tokens of a table, the one that is taken first.

Tables that name the experts are asked for as many as uniform routing touches. Among the
others a mild power law comes nearest to that; balanced tokens touch all experts early.
"""


def expert_table(
    fits: Fits, model: ModelArchitecture, ranks: int, *, is_own: bool
) -> dict[str, Any] | None:
    """Return seconds of the routed experts over tokens; None where none were timed.

    `is_own` says whether a table of a model's own layers is this model's.
    """
    points = fits.points.get("moe")
    if points is None or not model.num_moe_layers:
        return None
    codes = _codes(points, model)
    if codes is None or (codes["routing_name"] == CHOSEN and not is_own):
        return None
    tokens = np.array(nodes(points.columns["tokens"], TOKENS))
    seconds, beyond = _seconds(fits, model, ranks, tokens, codes)
    if beyond.all():
        return None
    return {
        "geometry": expert_geometry(model, ranks),
        "tokens": tokens.tolist(),
        "time_s": rounded(model.num_moe_layers * seconds),
        "beyond": beyond.astype(int).tolist(),
        "interval": list(fits.intervals.get("moe", UNKNOWN)),
    }


def _seconds(
    fits: Fits,
    model: ModelArchitecture,
    ranks: int,
    tokens: NDArray[np.int64],
    codes: Mapping[str, Any],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return seconds of the experts of one layer, and what was not measured."""
    hidden, width, top_k, num_experts = expert_shape(model)
    columns = {
        "tokens": tokens,
        "activated_experts": 0,
        "hidden_size": hidden,
        "inter_size": -(-width // ranks),
        "num_experts": num_experts,
        "top_k": top_k,
        "num_ranks": 1,
        "routing": codes["routing"],
        "weight_bits": expert_weight_bits(model),
        "dtype": codes["dtype"],
    }

    def at(activated: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        asked = columns | {"activated_experts": activated}
        found = predicted(
            fits.estimators["moe"], asked, len(tokens), points=fits.points["moe"]
        )
        return np.array(found["time_s"]), np.array(found["beyond"], dtype=np.bool_)

    if codes["routing_name"] != CHOSEN:
        return at(0)
    mean = touched_experts(num_experts, top_k, tokens)
    low = np.floor(mean)
    (low_s, beyond), (high_s, _) = at(low), at(np.ceil(mean))
    return low_s + (high_s - low_s) * (mean - low), beyond


def _codes(points: Points, model: ModelArchitecture) -> dict[str, Any] | None:
    """Return the routing and the precision that are taken; None where none fits."""
    routings, dtypes = points.codes["routing"], points.codes["dtype"]
    routing = next((name for name in ROUTINGS if name in routings), None)
    fitting = [dtypes.index(name) for name in expert_dtypes(model) if name in dtypes]
    if routing is None or not fitting:
        return None
    # a precision that was timed for other models only says little of this one
    hidden, _, top_k, num_experts = expert_shape(model)
    columns = points.columns
    own = (columns["hidden_size"] == hidden) & (columns["top_k"] == top_k)
    own &= columns["num_experts"] == num_experts
    timed = set(columns["dtype"][own].tolist())
    return {
        "routing_name": routing,
        "routing": routings.index(routing),
        "dtype": next((code for code in fitting if code in timed), fitting[0]),
    }
