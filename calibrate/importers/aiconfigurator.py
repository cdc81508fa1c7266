"""Tables of ``aiconfigurator-core``: kernels and whole layers under vLLM.

Two layouts are read, the package's (``systems/data/SYSTEM/FAMILY/vllm/VERSION/``, with
``systems/SYSTEM.yaml``) and a flat copy (``SYSTEM/FAMILY/vllm-VERSION/``, with
``SYSTEM/system.yaml``). ``latency`` is in milliseconds; ``message_size`` of the custom
all-reduce counts elements of two bytes.

Source: github.com/ai-dynamo/aiconfigurator, Apache-2.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from calibrate.device import DeviceFacts, chip_facts
from calibrate.importers.aiconfigurator_layers import (
    ITEMSIZE,
    MS,
    check_columns,
    delta_ops,
    latent_decode_ops,
    latent_prefill_ops,
    moe_ops,
)
from calibrate.importers.geometry import model_shapes
from calibrate.precisions import weight_bits
from calibrate.writing import build_profile, op_table
from sim.errors import UserError
from workloads.plain import read_mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from calibrate.importers.geometry import ModelShapes
    from sim.costs.measured.profile import Profile
    from sim.hardware.models.architecture import ModelArchitecture

_PACKAGE: Final = "aiconfigurator_core"
_ROOTS: Final = (
    "",
    "data",
    "systems/data",
    f"{_PACKAGE}/systems/data",
    f"aic-core/src/{_PACKAGE}/systems/data",
    f"src/{_PACKAGE}/systems/data",
    "aiconfigurator",
    "aiconfigurator/systems/data",
)
"""Where the folders of systems may lie below the one that is given."""
_ELEMENT_BYTES: Final = 2

_EXTRAPOLATED: Final = ("swap", "copy", "prefill_with_past")
"""Operations that the tables lack; a cost model takes them from the datasheet."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the tables of one system lie."""

    system: str
    folder: Path
    datasheet: Path

    def find(self, family: str, name: str) -> tuple[Path, str] | None:
        """Return the newest version of a table and that version, or None."""
        found = [
            (_version(path.parent.name), path)
            for pattern in (f"vllm-*/{name}", f"vllm/*/{name}")
            for path in (self.folder / family).glob(pattern)
        ]
        if not found:
            return None
        path = max(found)[1]
        return path, path.parent.name.removeprefix("vllm-")


def import_aiconfigurator(
    system: str, folder: Path | None = None, model: ModelArchitecture | None = None
) -> Profile:
    """Return the tables of a system as a profile.

    Parameters
    ----------
    system
        Such as ``h200_sxm``.
    folder
        Folder of tables; None for the installed package.
    model
        Keep the shapes of this model only; None keeps all.

    Raises
    ------
    UserError
        When there is no such folder, system or table, or a table lacks a column.
    """
    tables = find_tables(system, folder)
    device = _device(tables)
    shapes = model_shapes(model) if model else None
    versions: dict[str, str] = {}
    ops: list[dict[str, Any]] = []
    for family, name, convert in (
        ("attention", "generation_attention_perf.parquet", _decode_ops),
        ("attention", "context_attention_perf.parquet", _prefill_ops),
        ("gemm", "gemm_perf.parquet", _gemm_ops),
        ("comm", "custom_allreduce_perf.parquet", _allreduce_ops),
        ("moe", "moe_perf.parquet", moe_ops),
        ("mla", "mla_generation_module_perf.parquet", latent_decode_ops),
        ("mla", "mla_context_module_perf.parquet", latent_prefill_ops),
        ("linear_attention", "gdn_perf.parquet", delta_ops),
    ):
        if (found := tables.find(family, name)) is not None:
            path, versions[name.removesuffix("_perf.parquet")] = found
            ops += convert(_read(path), device, shapes)
    if not ops:
        kept = f" for {model.name}" if model else ""
        raise UserError(
            f"no vLLM tables of {system}{kept} in {tables.folder.name}; give --path of "
            "a folder that has them, or leave --model out"
        )
    provenance = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": device.to_json(),
        "source": {"name": "aiconfigurator", "system": system, "tables": versions},
        "model": model.name if model else None,
        "extrapolated": list(_EXTRAPOLATED),
    }
    return build_profile("imported", provenance, ops)


def find_tables(system: str, folder: Path | None) -> Tables:
    """Return where the tables of `system` lie, in either layout."""
    if folder is None:
        spec = find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                "the package aiconfigurator-core is not installed; install "
                "'kvsim[tables]', or give --path of a folder of its tables"
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
    if not folder.is_dir():
        raise UserError(f"there is no folder '{folder}'; give --path of the tables")
    if folder.name == system and (folder / "attention").is_dir():
        folder = folder.parent
    known: set[str] = set()
    for root in _ROOTS:
        place = folder / root / system
        if place.is_dir():
            sheets = place / "system.yaml", place.parent.parent / f"{system}.yaml"
            for sheet in sheets:
                if sheet.is_file():
                    return Tables(system, place, sheet)
            raise UserError(f"{system} has no {sheets[0].name} nor {sheets[1].name}")
        known |= {path.parent.name for path in (folder / root).glob("*/attention")}
    there = ", ".join(sorted(known)) or "no system"
    raise UserError(
        f"no tables of '{system}' in '{folder.name}'; there are: {there}; give --path "
        "of the folder that holds those of the systems"
    )


def _version(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def _device(tables: Tables) -> DeviceFacts:
    sheet = read_mapping(tables.datasheet)
    num_sms, l2_bytes = chip_facts(tables.system)
    try:
        gpu, node = sheet["gpu"], sheet["node"]
        flops = float(gpu["bfloat16_tc_flops"])
        return DeviceFacts(
            name=tables.system,
            bandwidth_bytes_per_s=float(gpu["mem_bw"]),
            flops_per_s=flops,
            flops_8bit_per_s=float(gpu.get("fp8_tc_flops") or flops),
            host_bytes_per_s=float(node["pcie_bw"]),
            link_bytes_per_s=float(node["intra_node_bw"]),
            num_sms=num_sms,
            l2_bytes=l2_bytes,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{tables.datasheet.name} of {tables.system} must hold gpu.mem_bw, "
            f"gpu.bfloat16_tc_flops, node.pcie_bw and node.intra_node_bw; {error}"
        ) from error


def _read(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path.name} is no readable Parquet file ({str(error)[:80]}); a checkout "
            "without Git LFS holds pointers only: fetch the files"
        ) from error
    if "latency" not in frame:
        raise UserError(f"{path.name} has no column 'latency'; is it a table of times?")
    # failed measurements are written as zero or less
    measured: pd.DataFrame = frame[frame["latency"].between(0, 1e9, "neither")]
    return measured


def _attention(
    frame: pd.DataFrame, table: str, shapes: ModelShapes | None
) -> pd.DataFrame:
    names = ["batch_size", "isl", "step", "num_heads", "num_key_value_heads"]
    check_columns(frame, [*names, "head_dim", "kv_cache_dtype"], table)
    kv_heads = frame["num_key_value_heads"]
    frame = frame.assign(
        # upstream writes 0 where every head has its own keys
        num_key_value_heads=kv_heads.where(kv_heads > 0, frame["num_heads"]),
        window=frame.get("window_size", 0),
    )
    if shapes is not None:
        pairs = list(zip(frame["num_heads"], frame["num_key_value_heads"], strict=True))
        keep = np.fromiter((pair in shapes.heads for pair in pairs), bool, len(pairs))
        keep &= (frame["head_dim"] == shapes.head_dim).to_numpy()
        keep &= frame["window"].isin(shapes.windows).to_numpy()
        frame = frame[keep]
    return frame


def _groups(
    frame: pd.DataFrame,
) -> Iterator[tuple[str, dict[str, Any], pd.DataFrame]]:
    keys = ["kv_cache_dtype", "head_dim", "window"]
    for group, rows in frame.groupby(keys, sort=True):
        dtype, head_dim, window = map(str, group)
        constants: dict[str, Any] = {
            "head_dim": int(head_dim),
            "window": int(window),
            "kv_itemsize": ITEMSIZE.get(dtype, 1),
        }
        yield dtype, constants, rows


def _decode_ops(
    frame: pd.DataFrame, device: DeviceFacts, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    for dtype, constants, rows in _groups(_attention(frame, "generation", shapes)):
        context = rows["isl"] + rows["step"]
        window = constants["window"] or np.iinfo(np.int64).max
        key_bytes = 2 * constants["head_dim"] * constants["kv_itemsize"]
        keys = rows["batch_size"] * np.minimum(context, window)
        # timed by repeating one call: what fits the cache was read from there, and
        # tells only what starting a call costs at least
        constants["launch_s"] = float(f"{rows['latency'].min() * MS:.6g}")
        cold = keys * rows["num_key_value_heads"] * key_bytes > device.l2_bytes
        if cold.any():
            kept = rows[cold]
            axes = {
                "num_heads": kept["num_heads"],
                "num_kv_heads": kept["num_key_value_heads"],
                "batch": kept["batch_size"],
                "context": context[cold],
            }
            yield op_table(
                "decode_attention",
                dtype,
                axes,
                kept["latency"] * MS,
                variant="vllm",
                constants=constants,
            )


def _prefill_ops(
    frame: pd.DataFrame, device: DeviceFacts, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    for dtype, constants, rows in _groups(_attention(frame, "context", shapes)):
        axes = {
            "num_heads": rows["num_heads"],
            "num_kv_heads": rows["num_key_value_heads"],
            "batch": rows["batch_size"],
            "query": rows["isl"],
            "past": rows["step"],
        }
        seconds = rows["latency"] * MS
        yield op_table(
            "prefill_attention",
            dtype,
            axes,
            seconds,
            variant="vllm",
            constants=constants,
        )


def _gemm_ops(
    frame: pd.DataFrame, device: DeviceFacts, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    check_columns(frame, ["gemm_dtype", "m", "n", "k"], "GEMM")
    if shapes is not None:
        pairs = list(zip(frame["n"], frame["k"], strict=True))
        keep = [pair in shapes.weights for pair in pairs]
        frame = frame[np.array(keep, dtype=bool)]
    for dtype, rows in frame.groupby("gemm_dtype", sort=True):
        axes = {"m": rows["m"], "n": rows["n"], "k": rows["k"]}
        constants = {"weight_bits": weight_bits(str(dtype))}
        seconds = rows["latency"] * MS
        yield op_table(
            "gemm", str(dtype), axes, seconds, variant="vllm", constants=constants
        )


def _allreduce_ops(
    frame: pd.DataFrame, device: DeviceFacts, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    check_columns(frame, ["num_gpus", "message_size", "allreduce_dtype"], "all-reduce")
    if "backend" not in frame:
        frame = frame.assign(backend="vllm")
    keys = ["backend", "allreduce_dtype"]
    for group, rows in frame.groupby(keys, sort=True):
        backend, dtype = map(str, group)
        axes = {
            "num_gpus": rows["num_gpus"],
            "bytes": rows["message_size"] * _ELEMENT_BYTES,
        }
        seconds = rows["latency"] * MS
        yield op_table("allreduce", dtype, axes, seconds, variant=backend)
