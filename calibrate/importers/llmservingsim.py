"""Layer tables that LLMServingSim measured inside vLLM (``time_us``, one layer).

FOLDER is that of a model, with ``meta.yaml`` and ``tpN/`` below it, or of its GPU.
``attention.csv`` holds the attention of whole mixed steps, ``dense.csv`` layers by
tokens, ``per_sequence.csv`` head and sampler by requests, ``skew.csv`` decodes of two
lengths. The first release wrote other files: see `llmservingsim_v0`.

Source: github.com/casys-kaist/LLMServingSim, MIT.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from calibrate.device import DeviceFacts
from calibrate.fit_report import EVEN, SKEWED
from calibrate.importers.llmservingsim_v0 import folder_of_v0, import_v0
from calibrate.measurement import CHOSEN
from calibrate.writing import build_profile, op_table
from sim.errors import ConfigError, UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from workloads.plain import read_mapping

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sim.costs.measured.profile import Profile
    from sim.hardware.models.architecture import ModelArchitecture

_US: Final = 1e-6
_GPUS: Final = {"RTXPRO6000": "rtx_pro_6000_server"}
"""Upstream's names of hardware that differ from ours."""
_ATTENTION: Final = {
    "query": "prefill_chunk",
    "past": "kv_prefill",
    "num_decodes": "n_decode",
    "decode_context": "kv_decode",
}
_ITEMSIZE: Final = 2


def import_llmservingsim(
    folder: Path,
    model: ModelArchitecture | None = None,
    gpu: str | None = None,
    name: str | None = None,
) -> Profile:
    """Return the tables of a model as a profile, all its ``tpN`` folders.

    Parameters
    ----------
    folder
        Folder with ``meta.yaml``, one of its ``tpN``, or one above it: of a GPU, or of
        several.
    model
        Architecture, where ``meta.yaml`` names one that is not bundled.
    name
        Model whose folder is taken where there are several; the architecture's name
        where it is not given.
    gpu
        Datasheet, where ``meta.yaml`` names a device that is not known.

    Raises
    ------
    UserError
        When files or columns are missing.
    """
    single = folder.name.startswith("tp") and (folder.parent / "meta.yaml").is_file()
    wanted = name or (model.name if model else None)
    if not (single or _has_meta(folder)):
        early = folder_of_v0(folder, wanted)
        if early is not None:
            return import_v0(early, model, gpu)
    root = folder.parent if single else _folder_of(folder, wanted)
    meta_path = root / "meta.yaml"
    meta = read_mapping(meta_path)
    model = model or architecture_of(str(meta.get("model")))
    hardware = str(meta.get("hardware"))
    device = DeviceFacts.of_gpu(load_gpu(gpu or _GPUS.get(hardware, hardware)))
    folders = [folder] if single else sorted(root.glob("tp[0-9]*"))
    ops = [op for place in folders for op in _ops(place, model)]
    if not ops:
        raise UserError(f"'{folder}' has no tpN/attention.csv; give --path of a model")
    provenance = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": device.to_json(),
        "source": {
            "name": "llmservingsim",
            "vllm": str(meta.get("vllm_version")),
            "cuda": str(meta.get("cuda_version")),
            "gpu": str(meta.get("gpu")),
            "profiled_at": str(meta.get("profiled_at")),
        },
        "model": model.name,
        "extrapolated": ["swap", "copy", "allreduce"],
    }
    return build_profile("imported", provenance, ops)


def _has_meta(folder: Path) -> bool:
    depths = ("", "*/", "*/*/", "*/*/*/")
    return any(any(folder.glob(f"{depth}meta.yaml")) for depth in depths)


def _folder_of(folder: Path, name: str | None) -> Path:
    """Return the folder of a model, which may be `folder` or lie below it."""
    if (folder / "meta.yaml").is_file():
        return folder
    there = [
        path.parent
        for pattern in ("*/meta.yaml", "*/*/meta.yaml", "*/*/*/meta.yaml")
        for path in sorted(folder.glob(pattern))
    ]
    if not there:
        raise UserError(
            f"'{folder}' has no meta.yaml; give --path of a model's folder, such as "
            "RTXPRO6000/Llama-3.1-8B, or of its GPU's with --model"
        )
    plain = (name or "").rpartition("/")[2].lower()
    own = [path for path in there if path.name.lower() == plain] if name else there
    # a later tuning of a model has its shape
    own = own or [path for path in there if path.name.lower().startswith(f"{plain}-")]
    if len(own) == 1:
        return own[0]
    names = ", ".join(str(path.relative_to(folder)) for path in own or there)
    if own:
        raise UserError(f"--path or --model must choose one of {names}")
    raise UserError(f"no tables of '{name}' in '{folder.name}'; there are: {names}")


def architecture_of(name: str) -> ModelArchitecture:
    """Return a bundled model.

    A later tuning of one (``-Instruct-2507``) has its shape.
    """
    try:
        return load_model(name)
    except ConfigError:
        owner, _, rest = name.partition("/")
        base, dash, _ = rest.rpartition("-")
        if not dash:
            raise
        return architecture_of(f"{owner}/{base}")


def _ops(folder: Path, model: ModelArchitecture) -> Iterator[dict[str, Any]]:
    tp = int(folder.name.removeprefix("tp"))
    if (path := folder / "attention.csv").is_file():
        frame = _read(path, [*_ATTENTION.values()])
        constants = {
            "num_heads": model.num_attention_heads // tp,
            "num_kv_heads": model.kv_heads_per_rank(tp),
            "head_dim": model.head_dim,
            "kv_itemsize": _ITEMSIZE,
        }
        axes = {axis: frame[column] for axis, column in _ATTENTION.items()}
        yield op_table(
            "mixed_attention",
            model.dtype,
            axes,
            frame["time_us"] * _US,
            variant=f"tp{tp}",
            constants=constants,
        )
        if (path := folder / "skew.csv").is_file():
            yield from _skewed(path, model.dtype, f"tp{tp}", constants)
    for name, amount in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
        if (path := folder / name).is_file():
            frame = _read(path, ["layer", amount])
            for layer, rows in frame.groupby("layer", sort=True):
                yield op_table(
                    "layer",
                    model.dtype,
                    {"tokens": rows[amount]},
                    rows["time_us"] * _US,
                    variant=f"tp{tp}",
                    constants={"layer": str(layer), "per": amount},
                )
    if (path := folder / "moe.csv").is_file():
        frame = _read(path, ["tokens", "activated_experts"])
        axes = {key: frame[key] for key in ("tokens", "activated_experts")}
        sizes: dict[str, Any] = {
            "hidden_size": model.hidden_size,
            "inter_size": -(-model.expert_size // tp),
            "num_experts": model.num_experts,
            "top_k": model.num_experts_per_tok,
            "num_ranks": 1,
            "weight_bits": 8 * _ITEMSIZE,
            "routing": CHOSEN,
        }
        yield op_table(
            "moe",
            model.dtype,
            axes,
            frame["time_us"] * _US,
            variant=f"tp{tp}",
            constants=sizes,
        )


def _skewed(
    path: Path, dtype: str, variant: str, constants: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield decodes of two lengths without a chunk, and even ones of the same sum.

    Upstream timed these in another way than ``attention.csv``, some three times longer,
    so that they compare with each other only.
    """
    columns = ["regime", "n", "nb", "kvs", "kv_big", "t_mean_us"]
    frame = _read(path, columns, "t_skew_us")
    frame = frame[frame["regime"] == "pure"]
    short = frame["n"] - frame["nb"]
    axes = {
        "num_seqs": frame["n"],
        "context_tokens": frame["nb"] * frame["kv_big"] + short * frame["kvs"],
        "longest_context_tokens": frame["kv_big"],
    }
    for name, column in ((SKEWED, "t_skew_us"), (EVEN, "t_mean_us")):
        yield op_table(
            name,
            dtype,
            axes,
            frame[column] * _US,
            variant=variant,
            constants=constants,
        )


def _read(path: Path, columns: list[str], time: str = "time_us") -> pd.DataFrame:
    frame = pd.read_csv(path)
    if missing := [name for name in [*columns, time] if name not in frame]:
        raise UserError(f"{path.name} has no column '{missing[0]}'; is it cut off?")
    return frame[frame[time] > 0]
