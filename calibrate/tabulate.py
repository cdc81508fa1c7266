"""Fits of all operations, tabulated for one model: what a cost model looks up.

The tables go into the `fit` of a profile, one entry for each number of ranks and each
precision of the KV cache; `sim.costs.measured` reads them and needs neither
scikit-learn nor a fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.device import DeviceFacts
from calibrate.fit_report import operation_report
from calibrate.importers.geometry import RANKS
from calibrate.points import estimator_of, points_of
from calibrate.writing import build_profile
from sim.costs.measured_tables import geometry_of, weight_bits_of
from sim.errors import UserError
from sim.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from calibrate.estimators import KernelEstimator
    from calibrate.points import Points
    from sim.architecture import ModelArchitecture
    from sim.profile import Profile

    Floats = NDArray[np.float64]

_BATCHES: Final = 2 ** np.arange(13)
_CONTEXTS: Final = 2 ** np.arange(21)
_QUERIES: Final = np.unique([1, *(2 ** np.arange(4, 18)), *(3 * 2 ** np.arange(9, 16))])
_TOKENS: Final = 2 ** np.arange(18)
_MAX_NODES: Final = 128
"""Measured values of an axis beyond which only the powers of two are nodes."""
_TABULATED: Final = ("decode_attention", "prefill_attention", "gemm", "allreduce")
_KV: Final = {"bfloat16": 2, "fp8": 1}


@dataclass(slots=True)
class Fits:
    """Fitted estimators by operation, with what their columns mean."""

    estimators: dict[str, KernelEstimator]
    points: dict[str, Points]
    intervals: dict[str, tuple[float, float]]
    """Operation to the half-widths, in percent, inside and beyond."""


def fit_operations(profile: Profile) -> Fits:
    """Fit what the tables of a model are made of, and how uncertain each is."""
    device = DeviceFacts.from_json(profile.device)
    fits = Fits({}, {}, {})
    for points in points_of(profile):
        if points.name not in _TABULATED:
            continue
        estimator = estimator_of(points, device)
        report = operation_report(estimator, points.columns, points.time_s, 1)
        estimator.fit(points.columns, points.time_s)
        fits.estimators[points.name] = estimator
        fits.points[points.name] = points
        fits.intervals[points.name] = (
            report.interval_inside or 0.0,
            report.interval_beyond or report.interval_inside or 0.0,
        )
    return fits


def tabulated(
    profile: Profile, model: ModelArchitecture, ranks: Sequence[int] = RANKS
) -> dict[str, Any]:
    """Return the `fit` of a profile for `model`.

    Parameters
    ----------
    profile
        Points to fit, of more shapes than the model's if there are: they inform it.
    model
        Whose geometry is tabulated.
    ranks
        Tensor-parallel sizes, as far as the heads divide.

    Raises
    ------
    UserError
        When the model's attention is not what was measured (MLA), or a table of
        attention or products is missing.
    """
    if model.kv_lora_rank:
        raise UserError(
            f"{model.name} attends to a latent (MLA), which these tables do not "
            "measure; use cost: {kind: roofline}"
        )
    fits = fit_operations(profile)
    for operation in ("decode_attention", "prefill_attention", "gemm"):
        if operation not in fits.estimators:
            raise UserError(
                f"the profile has no table of {operation}, so no step of {model.name} "
                "can be priced; import one that has, such as aiconfigurator's"
            )
    entries = [
        _entry(fits, model, tp, kv_dtype)
        for tp in ranks
        if model.num_attention_heads % tp == 0
        for kv_dtype in _KV
    ]
    return {"models": entries, "intervals": fits.intervals}


def with_tables(kept: Profile, whole: Profile, model: ModelArchitecture) -> Profile:
    """Return the points of `kept` with the tables for `model` that `whole` gives."""
    body = kept.body
    fit = dict(kept.fit) | tabulated(whole, model)
    return build_profile(
        kept.kind,
        kept.provenance,
        body["ops"],
        fit,
        steps=list(kept.steps),
        interference=dict(kept.interference),
    )


def _entry(
    fits: Fits, model: ModelArchitecture, tp: int, kv_dtype: str
) -> dict[str, Any]:
    windows = [0]
    if model.sliding_window and model.num_sliding_layers:
        windows = [0, model.sliding_window]
    itemsize = _KV[kv_dtype]
    return {
        "model": model.name,
        "geometry": geometry_of(model, tp, itemsize),
        "decode": {str(w): _decode(fits, model, tp, itemsize, w) for w in windows},
        "prefill": {str(w): _prefill(fits, model, tp, itemsize, w) for w in windows},
        "tokens": _tokens(fits, model, tp),
    }


def _nodes(measured: NDArray[np.int64], regular: NDArray[np.int64]) -> list[int]:
    """Return the nodes of an axis: measured values, and powers of two further out."""
    own = np.unique(measured)
    if len(own) > _MAX_NODES:
        own = own[:: len(own) // _MAX_NODES + 1]
    nodes: list[int] = np.union1d(own, regular).tolist()
    return nodes


def _attention_columns(
    model: ModelArchitecture, tp: int, itemsize: int, window: int, **axes: Any
) -> dict[str, NDArray[np.int64]]:
    columns = {
        "num_heads": model.num_attention_heads // tp,
        "num_kv_heads": model.kv_heads_per_rank(tp),
        "head_dim": model.head_dim,
        "kv_itemsize": itemsize,
        "window": window,
    } | axes
    length = max(np.size(value) for value in columns.values())
    return {
        key: np.broadcast_to(np.asarray(value, dtype=np.int64), length)
        for key, value in columns.items()
    }


def _surface(
    estimator: KernelEstimator, columns: dict[str, NDArray[np.int64]], width: int
) -> tuple[list[list[float]], list[list[int]]]:
    seconds = estimator.predict(columns).reshape(-1, width)
    beyond = estimator.extrapolated(columns).reshape(-1, width)
    rounded = [[float(f"{value:.6g}") for value in row] for row in seconds.tolist()]
    return rounded, beyond.astype(int).tolist()


def _decode(
    fits: Fits, model: ModelArchitecture, tp: int, itemsize: int, window: int
) -> dict[str, Any]:
    measured = fits.points["decode_attention"].columns
    batches = _nodes(measured["batch"], _BATCHES)
    contexts = _nodes(measured["context"], _CONTEXTS)
    batch, context = (x.ravel() for x in np.meshgrid(batches, contexts, indexing="ij"))
    columns = _attention_columns(
        model, tp, itemsize, window, batch=batch, context=context
    )
    seconds, beyond = _surface(
        fits.estimators["decode_attention"], columns, len(contexts)
    )
    return {"counts": batches, "amounts": contexts, "time_s": seconds, "beyond": beyond}


def _prefill(
    fits: Fits, model: ModelArchitecture, tp: int, itemsize: int, window: int
) -> dict[str, Any]:
    measured = fits.points["prefill_attention"].columns
    batches = _nodes(measured["batch"], _BATCHES[:9])
    queries = _nodes(measured["query"], _QUERIES)
    batch, query = (x.ravel() for x in np.meshgrid(batches, queries, indexing="ij"))
    columns = _attention_columns(
        model, tp, itemsize, window, batch=batch, query=query, past=0
    )
    seconds, beyond = _surface(
        fits.estimators["prefill_attention"], columns, len(queries)
    )
    return {"counts": batches, "amounts": queries, "time_s": seconds, "beyond": beyond}


def _tokens(fits: Fits, model: ModelArchitecture, tp: int) -> dict[str, Any]:
    """Return products and collectives of all layers by tokens of the step."""
    points = fits.points["gemm"]
    gemm = fits.estimators["gemm"]
    bits = weight_bits_of(model)
    dtypes = points.codes.get("dtype", ("",))
    code = _weight_code(dtypes, bits)
    tokens = np.array(_nodes(points.columns["m"], _TOKENS))
    total, beyond = np.zeros(len(tokens)), np.zeros(len(tokens), dtype=np.bool_)
    for tensor in weight_tensors(model, tp):
        if tensor.role is TensorRole.LINEAR and tensor.columns > 1:
            columns = {
                "m": tokens,
                "n": np.full(len(tokens), tensor.rows),
                "k": np.full(len(tokens), tensor.columns),
                "weight_bits": np.full(len(tokens), bits),
                "dtype": np.full(len(tokens), code),
            }
            total += tensor.count * tensor.num_groups * gemm.predict(columns)
            beyond |= gemm.extrapolated(columns)
    found: dict[str, Any] = {
        "tokens": tokens.tolist(),
        "gemm_s": [float(f"{value:.6g}") for value in total.tolist()],
        "beyond": beyond.astype(int).tolist(),
    }
    reduce_s = _allreduce(fits, model, tp, tokens)
    if reduce_s is not None:
        found["allreduce_s"] = [float(f"{value:.6g}") for value in reduce_s.tolist()]
    return found


def _weight_code(dtypes: Sequence[str], bits: int) -> int:
    """Return the code of the precision that weights of so many bits are read in."""
    wanted = {16: ("bfloat16", "float16"), 8: ("fp8", "fp8_block", "int8_wo")}
    for name in wanted.get(bits, ("int4_wo", "nvfp4")):
        if name in dtypes:
            return dtypes.index(name)
    raise UserError(
        f"the profile has no products of {bits}-bit weights; it has "
        f"{', '.join(dtypes)}: use cost: {{kind: roofline}}"
    )


def _allreduce(
    fits: Fits, model: ModelArchitecture, tp: int, tokens: NDArray[np.int64]
) -> Floats | None:
    if tp == 1 or "allreduce" not in fits.estimators:
        return None
    variants = fits.points["allreduce"].codes.get("variant", ("",))
    graph = next((i for i, name in enumerate(variants) if "graph" in name), 0)
    columns = {
        "variant": np.full(len(tokens), graph),
        "num_gpus": np.full(len(tokens), tp),
        "bytes": tokens * model.hidden_size * 2,
    }
    seconds = fits.estimators["allreduce"].predict(columns)
    return 2 * model.num_hidden_layers * seconds
