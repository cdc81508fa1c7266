"""Tables of ``aiconfigurator-core`` that time whole layers: experts, MLA, delta nets.

``moe_perf`` times the experts that one rank computes, for all tokens of the ranks that
share them; ``inter_size`` counts all ranks. ``mla_context_module_perf`` and
``mla_generation_module_perf`` time a whole attention layer with its projections;
``num_heads`` is a rank's share. ``gdn_perf`` times the kernels of a gated delta net,
the convolution apart from what reads the state.

Source: github.com/ai-dynamo/aiconfigurator, Apache-2.0, ``collector/vllm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.importers.geometry import LATENT_SIZES
from calibrate.precisions import weight_bits
from calibrate.writing import op_table
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

    from calibrate.importers.geometry import ModelShapes

ITEMSIZE: Final = {"bfloat16": 2, "float16": 2, "half": 2}
"""Bytes an element; every other precision of these tables has 1."""
MS: Final = 1e-3

_LATENT_MODELS: Final[Mapping[str, tuple[int, int, int, int, int, int]]] = {
    "deepseek-ai/DeepSeek-V3": (7168, 1536, 512, 128, 64, 128),
}
"""Sizes of the layer that a table of latent attention was timed with, by the model that
it names: `LATENT_SIZES`."""


_PHASES: Final = {"context": "delta_prefill", "generation": "delta_decode"}


def check_columns(frame: pd.DataFrame, names: Sequence[str], table: str) -> None:
    if missing := [name for name in names if name not in frame]:
        raise UserError(
            f"the {table} table has no column '{missing[0]}'; it has "
            f"{', '.join(map(str, frame.columns))[:200]}"
        )


def moe_ops(
    frame: pd.DataFrame, _: object, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    """Yield the experts, a table for each precision and way to route tokens."""
    names = ["moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk"]
    more = ["num_experts", "moe_tp_size", "moe_ep_size", "distribution"]
    check_columns(frame, [*names, *more], "MoE")
    if shapes is not None:
        own = zip(*(frame[key] for key in (*names[2:], "num_experts")), strict=True)
        frame = frame[np.array([row in shapes.experts for row in own], dtype=bool)]
    for (dtype, routing), rows in frame.groupby(["moe_dtype", "distribution"]):
        axes = {
            "tokens": rows["num_tokens"],
            "hidden_size": rows["hidden_size"],
            "inter_size": rows["inter_size"] // rows["moe_tp_size"],
            "num_experts": rows["num_experts"],
            "top_k": rows["topk"],
            "num_ranks": rows["moe_ep_size"],
        }
        constants = {"weight_bits": weight_bits(str(dtype)), "routing": str(routing)}
        seconds = rows["latency"] * MS
        yield op_table(
            "moe", str(dtype), axes, seconds, variant="vllm", constants=constants
        )


def delta_ops(
    frame: pd.DataFrame, _: object, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    """Yield gated delta nets: convolution and state together, by phase."""
    heads = ["num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv"]
    names = ["phase", "kernel_source", "batch_size", "seq_len"]
    check_columns(frame, [*names, *heads], "linear attention")
    if shapes is not None:
        own = zip(frame["num_k_heads"], frame["num_v_heads"], strict=True)
        frame = frame[np.array([pair in shapes.deltas for pair in own], dtype=bool)]
    # models of several widths share the kernels' shapes
    each = frame.groupby([*names, *heads], sort=True)["latency"].median().reset_index()
    shape = [name for name in (*names, *heads) if name != "kernel_source"]
    whole = each.groupby(shape, sort=True)["latency"].agg(["sum", "count"])
    whole = whole[whole["count"] > 1].reset_index()
    for phase, operation in _PHASES.items():
        for sizes, rows in whole[whole["phase"] == phase].groupby(heads[2:]):
            axes = {
                "num_key_heads": rows["num_k_heads"],
                "num_value_heads": rows["num_v_heads"],
                "batch": rows["batch_size"],
            }
            if phase == "context":
                axes["query"] = rows["seq_len"]
            names_of = ("key_head_dim", "value_head_dim", "conv_kernel")
            widths = [int(str(size)) for size in sizes]
            constants = dict(zip(names_of, widths, strict=True))
            yield op_table(
                operation,
                "bfloat16",
                axes,
                rows["sum"] * MS,
                variant="vllm",
                constants=constants,
            )


def latent_decode_ops(
    frame: pd.DataFrame, _: object, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    check_columns(frame, ["step"], "MLA generation")
    yield from _latent_ops(frame, "latent_decode", shapes)


def latent_prefill_ops(
    frame: pd.DataFrame, _: object, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    yield from _latent_ops(frame, "latent_prefill", shapes)


def _latent_ops(
    frame: pd.DataFrame, operation: str, shapes: ModelShapes | None
) -> Iterator[dict[str, Any]]:
    names = ["model", "kv_cache_dtype", "gemm_type", "num_heads", "batch_size", "isl"]
    check_columns(frame, names, "MLA")
    if shapes is not None:
        heads = {query for query, _ in shapes.heads}
        frame = frame[frame["num_heads"].isin(heads)]
    for (model, kv, dtype), rows in frame.groupby(names[:3], sort=True):
        sizes = _LATENT_MODELS.get(str(model))
        if sizes is None or (shapes is not None and shapes.latent != sizes):
            continue
        axes = {"num_heads": rows["num_heads"], "batch": rows["batch_size"]}
        if operation == "latent_decode":
            axes["context"] = rows["isl"] + rows["step"]
        else:
            axes["query"] = rows["isl"]
        constants = dict(zip(LATENT_SIZES, sizes, strict=True)) | {
            "kv_itemsize": ITEMSIZE.get(str(kv), 1),
            "weight_bits": weight_bits(str(dtype)),
        }
        yield op_table(
            operation,
            str(dtype),
            axes,
            rows["latency"] * MS,
            variant="vllm",
            constants=constants,
        )
