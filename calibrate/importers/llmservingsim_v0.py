"""Layer tables of LLMServingSim's first release (``latency(ns)``, one layer).

FOLDER is that of a GPU or of a model, with ``tpN/layers.csv`` and ``attention.csv``
below it, and no ``meta.yaml``. ``layers.csv`` holds layers by tokens, some of them
apart that engines compute together; ``attention.csv`` chunks, each alone over a past.

Its decodes are left out: three of four are faster than the memory, and their times fall
as one over the batch.

Source: github.com/casys-kaist/LLMServingSim, MIT.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from calibrate.device import DeviceFacts
from calibrate.writing import build_profile, op_table
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sim.costs.measured.profile import Profile
    from sim.hardware.models.architecture import ModelArchitecture

_NS: Final = 1e-9
_MS: Final = 1e-3
_GPUS: Final = {"H100": "h100_sxm", "A100": "a100_sxm"}
_TOGETHER: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "layernorm": ("input_layernorm",),
    "rotary_emb": ("rope",),
}
"""Layers of the later format, and what they are made of; others have their name."""
_LEFT_OUT: Final = frozenset({"attn", "post_layernorm"})
"""Attention has a table; the second norm of a layer is as long as the first."""
_CHUNK: Final = "prefill_chunk_size"
_PAST: Final = "kv_cache_size"
_TIME: Final = "time_stats.attn_prefill.median"
_LATENCY: Final = "latency(ns)"


def folder_of_v0(folder: Path, name: str | None) -> Path | None:
    """Return the model's folder, None where there are no tables of this format."""
    places = [folder, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))]
    models = [each for each in places if any(each.glob("tp[0-9]*/layers.csv"))]
    if folder.name.startswith("tp") and (folder / "layers.csv").is_file():
        return folder.parent
    plain = (name or "").rpartition("/")[2].lower()
    own = [each for each in models if each.name.lower() == plain] if name else models
    if len(own) > 1 or (models and not own):
        there = ", ".join(str(each.relative_to(folder)) for each in models)
        raise UserError(f"--path or --model must choose one of {there}")
    return own[0] if own else None


def import_v0(
    folder: Path, model: ModelArchitecture | None = None, gpu: str | None = None
) -> Profile:
    """Return the tables of a model's folder as a profile, all its ``tpN``.

    Raises
    ------
    UserError
        When files or columns are missing.
    """
    model = model or load_model(folder.name)
    hardware = folder.parent.name
    device = DeviceFacts.of_gpu(load_gpu(gpu or _GPUS.get(hardware, hardware)))
    ops = [op for place in sorted(folder.glob("tp[0-9]*")) for op in _ops(place, model)]
    provenance = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": device.to_json(),
        "source": {"name": "llmservingsim", "format": "v0", "gpu": hardware},
        "model": model.name,
        "extrapolated": ["decode_attention", "swap", "copy", "allreduce"],
    }
    return build_profile("imported", provenance, ops)


def _ops(folder: Path, model: ModelArchitecture) -> Iterator[dict[str, Any]]:
    variant = folder.name
    tp = int(variant.removeprefix("tp"))
    times = _layers(folder / "layers.csv")
    for layer, column in times.items():
        rows = column.dropna()
        yield op_table(
            "layer",
            model.dtype,
            {"tokens": rows.index.to_series()},
            rows * _NS,
            variant=variant,
            constants={
                "layer": str(layer),
                "per": "sequences" if layer == "lm_head" else "tokens",
            },
        )
    if not (path := folder / "attention.csv").is_file():
        return
    frame = _read(path, [_CHUNK, _PAST, "batch_size", "is_prefill", _TIME])
    frame = frame[frame["is_prefill"] & (frame[_TIME] > 0)]
    yield op_table(
        "prefill_attention",
        model.dtype,
        {
            "batch": frame["batch_size"],
            "query": frame[_CHUNK],
            "past": frame[_PAST],
        },
        frame[_TIME] * _MS,
        variant=variant,
        constants={
            "num_heads": model.num_attention_heads // tp,
            "num_kv_heads": model.kv_heads_per_rank(tp),
            "head_dim": model.head_dim,
            "kv_itemsize": 2,
        },
    )


def _layers(path: Path) -> dict[str, pd.Series[float]]:
    """Return nanoseconds over tokens of each layer, named as the later format does."""
    frame = _read(path, ["layer_name", "input", _LATENCY])
    table = frame.pivot_table(_LATENCY, "input", "layer_name", aggfunc="median")
    made_of = {part for parts in _TOGETHER.values() for part in parts}
    found = {}
    for layer, parts in _TOGETHER.items():
        if missing := [part for part in parts if part not in table]:
            raise UserError(f"{path.name} has no layer '{missing[0]}'; is it cut off?")
        found[layer] = sum(table[part] for part in parts)
    alone = [name for name in table if name not in made_of | _LEFT_OUT]
    return found | {str(name): table[name] for name in alone}


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    frame = pd.read_csv(path)
    if missing := [name for name in columns if name not in frame]:
        raise UserError(f"{path.name} has no column '{missing[0]}'; is it cut off?")
    return frame
