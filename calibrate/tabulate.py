"""Fits of all operations, tabulated for one model: what a cost model looks up.

The tables go into the `fit` of a profile, one entry for each number of ranks and each
precision of the KV cache; `sim.costs.measured` reads them and needs neither
scikit-learn nor a fit.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from calibrate.estimators.attention import DecodeAttention
from calibrate.graphs import GRAPH_SIZES, graph_rule
from calibrate.importers.geometry import LATENT_SIZES, RANKS, latent_sizes
from calibrate.precisions import DTYPES_OF_BITS, expert_dtypes
from calibrate.tables.attention import AttentionTables
from calibrate.tables.fits import ESTIMATED, fit_operations
from calibrate.tables.states import OPERATIONS as STATES
from calibrate.tables.states import state_tables
from calibrate.tables.steps import fit_steps, steps_of
from calibrate.tables.tokens import TokenTables
from calibrate.tables.transfers import transfer_tables
from calibrate.writing import build_profile, write_profile
from sim.costs.measured import MeasuredCost
from sim.costs.measured.geometry import geometry_of, weight_bits_of
from sim.costs.measured.profile import DRY_RUN, read_profile
from sim.errors import ConfigError, UserError
from sim.hardware.gpus import datasheet_of, load_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrate.side_by_side import ShowFits
    from calibrate.tables.fits import Fits
    from sim.costs.measured.profile import Profile
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

_NO_TIME_S: Final = 1e-9
_KV: Final = {"bfloat16": 2, "fp8": 1}
_LATENT: tuple[str, ...] = ("latent_decode", "latent_prefill")
_ATTENTION: tuple[str, ...] = (
    "decode_attention",
    "prefill_attention",
    "mixed_attention",
)
_DIVIDED: Final = 12.5
"""Half-width in percent of decodes with more KV heads than were measured: nine of ten
of the column of eight heads, predicted from those of one and two, on three GPUs."""
_NEEDED = ("decode_attention", "prefill_attention", "gemm")
"""Without points of these no step can be priced."""


def tabulated(
    profile: Profile,
    model: ModelArchitecture,
    ranks: Sequence[int] | None = None,
    variants: Mapping[str, str] | None = None,
    gpu: GpuSpec | None = None,
    *,
    show: ShowFits | None = None,
) -> dict[str, Any]:
    """Return the `fit` of a profile for `model`.

    Shapes beyond the model's inform the fit. `ranks` are tensor-parallel sizes, by
    default those whose products were measured; `variants` those that are tabulated, by
    default the fastest; `gpu` the datasheet for what was not measured, by default the
    device's; `show` is told of fits that are done.

    Raises
    ------
    UserError
        When the model's latent attention (MLA) is not what was measured, the layers are
        another model's, or there are no products.
    """
    check_model(profile, model)
    gpu = gpu or _gpu_of(profile)
    fits = fit_operations(_of_precisions(profile, model), variants, show)
    entries = [
        _entry(fits, profile, AttentionTables(fits, model, tp, itemsize, gpu))
        for tp in ranks or measured_ranks(profile)
        if model.num_attention_heads % tp == 0
        for itemsize in _KV.values()
    ]
    if not entries:
        raise UserError(f"heads of {model.name} divide over none of the measured ranks")
    intervals = dict(fits.intervals)
    if "gemm" not in intervals and "layer" in intervals:
        intervals["gemm"] = intervals["layer"]
    for whole, part in zip(_LATENT, _ATTENTION, strict=False):
        if whole in intervals:
            intervals[part] = intervals[whole]
    decode = fits.estimators.get("decode_attention")
    if isinstance(decode, DecodeAttention) and any(
        entry["geometry"]["num_kv_heads"] > decode.most_kv_heads_ for entry in entries
    ):
        inside, beyond = intervals[decode.operation]
        intervals[decode.operation] = max(inside, _DIVIDED), max(beyond, _DIVIDED)
    for entry in entries:
        intervals |= dict.fromkeys(entry.get("estimated", ()), ESTIMATED)
    return {
        "models": entries,
        "intervals": intervals,
        "variants": {
            name: list(points.variants) for name, points in fits.points.items()
        },
        **({"gpu": gpu.name} if gpu else {}),
        **transfer_tables(fits, profile),
    }


def check_model(profile: Profile, model: ModelArchitecture) -> None:
    """Refuse a model with attention of sizes that were not measured."""
    sizes = latent_sizes(model)
    if sizes is None:
        same = model.v_head_dim in {0, model.head_dim}
        if model.sliding_heads is not None or not same:
            raise UserError(
                f"{model.name} has heads of several sizes, which these tables do not "
                "measure; use cost: {kind: roofline}"
            )
        return
    there = {
        tuple(table.constants.get(key) for key in LATENT_SIZES)
        for table in profile.tables("latent_decode")
    }
    if sizes not in there:
        raise UserError(
            f"{model.name} attends to a latent (MLA) of sizes that these tables do not "
            "measure; use cost: {kind: roofline}"
        )


def _of_precisions(profile: Profile, model: ModelArchitecture) -> Profile:
    """Return a profile with what `model` needs: its precisions, its kind of attention.

    Other precisions are other kernels: they teach little, and take two thirds of the
    time of a fit.
    """
    dense = DTYPES_OF_BITS[weight_bits_of(model)]
    dtypes = {
        "gemm": _kept(profile, "gemm", dense) | set(DTYPES_OF_BITS[16]),
        "moe": _kept(profile, "moe", expert_dtypes(model)),
    }
    unused = _ATTENTION if model.kv_lora_rank else _LATENT
    if not model.num_state_layers:
        unused += STATES
    ops = tuple(
        table
        for table in profile.ops
        if table.operation not in unused
        and (table.operation not in dtypes or table.dtype in dtypes[table.operation])
    )
    return replace(profile, ops=ops)


def _kept(profile: Profile, operation: str, wanted: Sequence[str]) -> set[str]:
    """Return those of the precisions that were measured, else all that were."""
    there = {table.dtype for table in profile.tables(operation)}
    return there & set(wanted) or there


def measured_ranks(profile: Profile) -> tuple[int, ...]:
    """Return the tensor-parallel sizes that the products of a profile are of."""
    own = profile.provenance.get("model")
    if isinstance(own, dict):
        return (int(own.get("tensor_parallel_size", 1)),)
    layers = {table.variant for table in profile.tables("layer")}
    found = [tp for tp in RANKS if f"tp{tp}" in layers]
    return tuple(found) if found and not profile.tables("gemm") else RANKS


def with_tables(
    kept: Profile,
    whole: Profile,
    model: ModelArchitecture,
    variants: Mapping[str, str] | None = None,
    gpu: GpuSpec | None = None,
    *,
    show: ShowFits | None = None,
) -> Profile:
    """Return the points of `kept` with the tables for `model` that `whole` gives.

    Where whole steps were measured, host time and the correction of the kernels are
    fitted to them.
    """
    fit = dict(kept.fit) | tabulated(whole, model, None, variants, gpu, show=show)
    for key in ("host", "step_correction"):
        fit.pop(key, None)
    found = _rebuilt(kept, fit)
    if not whole.steps:
        return found
    corrected = _step_fit(found, whole, model, gpu or _gpu_of(whole))
    return _rebuilt(kept, fit | corrected) if corrected else found


def _rebuilt(profile: Profile, fit: dict[str, Any]) -> Profile:
    return build_profile(
        profile.kind,
        profile.provenance,
        profile.body["ops"],
        fit,
        steps=list(profile.steps),
        interference=dict(profile.interference),
    )


def _step_fit(
    found: Profile, whole: Profile, model: ModelArchitecture, gpu: GpuSpec | None
) -> dict[str, Any]:
    if gpu is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_profile(found, path)
        steps = steps_of(whole.steps, model.num_hidden_layers)
        has_graphs = any(step.get("graphs") for step in steps if isinstance(step, dict))
        build = functools.partial(
            MeasuredCost,
            str(path),
            model=model,
            gpu=gpu,
            tensor_parallel_size=measured_ranks(whole)[0],
            graph_rule=graph_rule(has_graphs),
            graph_sizes=GRAPH_SIZES if has_graphs else (),
        )
        default = build()
        # a host that takes no time, or as little as a cost model lets it
        kernels = build(step_overhead_s=_NO_TIME_S, request_overhead_s=0.0)
        fitted = fit_steps(
            steps,
            lambda shape: kernels.step(shape).total_s - _NO_TIME_S,
            lambda shape: default.step(shape).total_s,
        )
    return fitted.to_json() if fitted else {}


def _gpu_of(profile: Profile) -> GpuSpec | None:
    """Return the built-in datasheet of the device, by our name or its driver's."""
    name = str(profile.device.get("name"))
    try:
        return load_gpu(name)
    except ConfigError:
        memory = profile.device.get("memory_bytes")
        return datasheet_of(name, int(memory)) if memory else None


def _entry(fits: Fits, profile: Profile, attention: AttentionTables) -> dict[str, Any]:
    model, tp, itemsize = attention.model, attention.ranks, attention.itemsize
    source = profile.provenance.get("source")
    name = str(source.get("name")) if isinstance(source, dict) else "calibrate"
    is_own = _are_layers_of(profile, model)
    if not is_own and "gemm" not in fits.estimators:
        raise UserError(
            f"the layers of this profile are {profile.provenance.get('model')}'s, not "
            f"{model.name}'s; import the tables of {model.name}"
        )
    estimated = attention.estimated()
    tokens = TokenTables(attention, name, is_own=is_own).tables()
    if model.num_experts and "experts" not in tokens:
        estimated.append("gemm")
    states = state_tables(fits, model, tp)
    return {
        "model": model.name,
        "geometry": geometry_of(model, tp, itemsize),
        **({"states": states} if states else {}),
        **attention.tables(),
        **tokens,
        **({"estimated": estimated} if estimated else {}),
    }


def _are_layers_of(profile: Profile, model: ModelArchitecture) -> bool:
    """Return whether layer tables, which hold no shapes, are of this model."""
    own = profile.provenance.get("model")
    if isinstance(own, dict):
        sizes = ("hidden_size", "head_dim")
        same = all(own.get(key) == getattr(model, key) for key in sizes)
        width = model.intermediate_size // int(own.get("tensor_parallel_size", 1))
        return same and own.get("intermediate_size") == width
    return _plain(own) in (None, _plain(model.name))


def _plain(name: Any) -> str | None:
    return str(name).rpartition("/")[2].lower() if name else None


def fit_calibration(out: Path, model: ModelArchitecture, quiet: bool) -> bool:
    """Fit a profile in its place, and return whether it holds tables now.

    The points are on the disk before: whatever goes wrong here costs only the tables,
    and a line says how to make them.
    """
    measured = read_profile(out)
    missing = [name for name in _NEEDED if not measured.tables(name)]
    if missing:
        return _told(
            f"no points of {missing[0]}: no step can be priced; time all --ops"
        )
    try:
        fitted = with_tables(measured, measured, model)
    except UserError as error:
        command = (
            f"kvsim profile fit {out} --model {model.name} --out {out} --overwrite"
        )
        return _told(f"not fitted: {error}; then {command}")
    write_profile(fitted, out)
    if fitted.kind == DRY_RUN:
        return _told("a dry run: the tables are of made-up times, to be looked at only")
    if not quiet:
        host = "measured steps" if "host" in fitted.fit else "the datasheet's default"
        print(f"fitted for {model.name}: cost: {{kind: measured, profile: {out}}}")
        print(f"host time of a step: {host}; errors: kvsim profile fit {out}")
    return True


def _told(reason: str) -> bool:
    print(f"kvsim: {reason}", file=sys.stderr)
    return False
