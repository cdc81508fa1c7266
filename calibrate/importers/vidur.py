"""Layer and all-reduce tables of Vidur (milliseconds, medians of repeats).

FOLDER holds ``compute/GPU/MODEL/mlp.csv`` and ``network/GPU_dgx/all_reduce.csv``.

Source: github.com/microsoft/vidur, MIT.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from calibrate.device import DeviceFacts
from calibrate.writing import build_profile, op_table
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import bundled_models, load_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sim.costs.measured.profile import Profile
    from sim.hardware.models.architecture import ModelArchitecture

_MS: Final = 1e-3
_ROOTS: Final = ("", "vidur", "profiling", "data/profiling")
"""Where ``compute`` may lie below the folder that is given."""
_START, _END = "time_stats.", ".median"


def import_vidur(
    folder: Path, gpu: str | None = None, model: str | None = None
) -> Profile:
    """Return the layers of a model and the all-reduces of its machines as a profile.

    Parameters
    ----------
    folder
        Folder with ``compute`` and ``network``, one above it or one inside.
    gpu
        Name of a folder below ``compute``; may be left out where there is one.
    model
        Name of a folder below that (``Llama-2-7b-hf``), with or without its owner.

    Raises
    ------
    UserError
        When there is no such folder, or several and none was named.
    """
    folder, gpu, model = _root(folder, gpu, model)
    gpu_folder = _choose(folder / "compute", gpu, "--system")
    name = model.rpartition("/")[2] if model else None
    model_folder = _choose(gpu_folder, name, "--model")
    device = DeviceFacts.of_gpu(load_gpu(gpu_folder.name))
    ops = list(_layers(model_folder / "mlp.csv"))
    network = folder / "network" / f"{gpu_folder.name}_dgx" / "all_reduce.csv"
    if network.is_file():
        ops += _allreduces(network)
    provenance = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": device.to_json(),
        "source": {"name": "vidur", "gpu": gpu_folder.name},
        "model": model_folder.name,
        "extrapolated": ["swap", "copy", "decode_attention", "prefill_attention"],
    }
    return build_profile("imported", provenance, ops)


def model_of(profile: Profile, config: str | None = None) -> ModelArchitecture:
    """Return the architecture of an imported model, of its config.json or bundled."""
    name = str(profile.provenance["model"])
    if config is not None:
        # its tables go by the name of their folder
        return replace(load_model(config), name=name)
    for bundled in bundled_models():
        if bundled.rpartition("/")[2].lower() == name.lower():
            return load_model(bundled)
    raise UserError(
        f"{name} is no bundled model; give --architecture with its config.json, or "
        "--no-tables to keep the points only"
    )


def _root(
    folder: Path, gpu: str | None, model: str | None
) -> tuple[Path, str | None, str | None]:
    """Return the folder of `compute`, and what the path itself says to take."""
    for root in _ROOTS:
        if (folder / root / "compute").is_dir():
            return folder / root, gpu, model
    whole = folder.resolve()
    above = [place.name for place in whole.parents]
    if whole.name == "compute":
        return whole.parent, gpu, model
    if above[:1] == ["compute"]:
        return whole.parents[1], gpu or whole.name, model
    if above[1:2] == ["compute"]:
        return whole.parents[2], gpu or above[0], model or whole.name
    raise UserError(f"'{folder}' has no folder compute; give --path of Vidur's data")


def _choose(parent: Path, name: str | None, option: str) -> Path:
    there = sorted(path.name for path in parent.iterdir() if path.is_dir())
    if name is None and len(there) == 1:
        name = there[0]
    # our names of systems carry the form of the board: a100_sxm
    for candidate in (name, (name or "").partition("_")[0]):
        if candidate in there:
            return parent / str(candidate)
    raise UserError(f"{option} must name one of {', '.join(there)}; got {name!r}")


def _layers(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"there is no {path.name} in '{path.parent.name}'")
    frame = pd.read_csv(path)
    for column in ("num_tokens", "num_tensor_parallel_workers"):
        if column not in frame:
            raise UserError(f"{path.name} has no column '{column}'; is it cut off?")
    layers = [
        column.removeprefix(_START).removesuffix(_END)
        for column in map(str, frame.columns)
        if column.startswith(_START) and column.endswith(_END)
    ]
    for tp, ranked in frame.groupby("num_tensor_parallel_workers", sort=True):
        for layer in sorted(layers):
            rows = ranked[ranked[f"{_START}{layer}{_END}"] > 0]
            if len(rows):
                yield op_table(
                    "layer",
                    "float16",
                    {"tokens": rows["num_tokens"]},
                    rows[f"{_START}{layer}{_END}"] * _MS,
                    variant=f"tp{tp}",
                    constants={"layer": layer, "per": "tokens"},
                )


def _allreduces(path: Path) -> Iterator[dict[str, Any]]:
    frame = pd.read_csv(path)
    column = f"{_START}all_reduce{_END}"
    for name in (column, "size", "num_workers"):
        if name not in frame:
            raise UserError(f"{path.name} has no column '{name}'; is it cut off?")
    if "devices_per_node" in frame:
        # one machine, all ranks of it side by side
        frame = frame[frame["num_workers"] <= frame["max_devices_per_node"]]
        frame = frame[frame["devices_per_node"] == frame["num_workers"]]
    frame = frame[frame[column] > 0]
    if len(frame):
        axes = {"num_gpus": frame["num_workers"], "bytes": frame["size"]}
        yield op_table(
            "allreduce", "float16", axes, frame[column] * _MS, variant="nccl"
        )
