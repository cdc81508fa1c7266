"""Which columns of an operation are drawn along which axis, and their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axis import Axis


TIED: Final = {"num_descriptors": "num_blocks"}
"""Columns that grow in proportion to another."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the points of an operation are drawn."""

    along: str
    """The leading axis."""
    by: tuple[tuple[str, ...], ...]
    """Columns of which each value is a curve; the first of these that varies."""
    maps: tuple[tuple[str, str], ...] = ()
    """Pairs of axes for maps of what is covered; none: rows, one a curve."""


LAYOUTS: Final[dict[str, Layout]] = {
    "decode_attention": Layout("context", (("batch",),), (("context", "batch"),)),
    "prefill_attention": Layout(
        "query", (("past",), ("batch",)), (("query", "past"), ("query", "batch"))
    ),
    "mixed_attention": Layout(
        "decode_context",
        (("query",), ("num_decodes",)),
        (("decode_context", "num_decodes"), ("query", "past")),
    ),
    "gemm": Layout("m", (("n", "k"),)),
    "moe": Layout("tokens", (("activated_experts",), ("hidden_size", "inter_size"))),
    "latent_decode": Layout("context", (("batch",),), (("context", "batch"),)),
    "delta_decode": Layout("batch", (("num_value_heads",),)),
    "delta_prefill": Layout("query", (("batch",),), (("query", "batch"),)),
    "latent_prefill": Layout("query", (("batch",),), (("query", "batch"),)),
    "allreduce": Layout("bytes", (("num_gpus",),)),
    "layer": Layout("tokens", (("layer",),)),
    "swap": Layout("num_blocks", (("block_bytes",),), (("num_blocks", "block_bytes"),)),
    "copy": Layout("num_blocks", (("block_bytes",),)),
}
"""Operations that can be drawn."""

_NAMES: Final = {
    "context": "context of each sequence (tokens)",
    "decode_context": "context of each decode (tokens)",
    "batch": "sequences",
    "query": "chunk (tokens)",
    "past": "tokens before the chunk",
    "num_decodes": "decodes beside the chunk",
    "m": "tokens of the step (m)",
    "bytes": "message",
    "num_gpus": "GPUs",
    "tokens": "tokens of the step",
    "num_blocks": "blocks, each of the size that a curve names",
    "block_bytes": "size of a block",
}
_CURVES: Final = {
    "batch": "batch {}",
    "query": "chunk of {}",
    "past": "past {}",
    "num_decodes": "decodes {}",
    "num_gpus": "{} GPUs",
    "activated_experts": "{} experts",
    "hidden_size": "{:d}",
    "inter_size": "x {:d}",
    "num_value_heads": "{} value heads",
    "n": "{:d}",
    "k": "x {:d}",
    "layer": "{}",
    "block_bytes": "{}",
}
_FIXED: Final = {
    "kv_itemsize": "KV of {} B",
    "window": "window {}",
    "weight_bits": "{}-bit weights",
    "batch": "batch {}",
    "past": "past {}",
    "query": "chunk of {}",
    "num_decodes": "decodes {}",
    "decode_context": "contexts of {}",
    "block_bytes": "blocks of {}",
}
_TITLES: Final = {
    "gemm": "GEMM",
    "moe": "Routed experts",
    "delta_decode": "Delta net, decodes",
    "delta_prefill": "Delta net, prompts",
    "latent_decode": "MLA layer, decodes",
    "latent_prefill": "MLA layer, prompts",
    "allreduce": "All-reduce",
    "layer": "Other layers",
    "copy": "Block copy",
}
_HEADS: Final = ("num_heads", "num_kv_heads", "head_dim")
_OFTEN_0: Final = ("window", "past")
_BYTES: Final = ("bytes", "block_bytes")


def axis_label(column: str) -> str:
    """Return the name of an axis, with its unit where the ticks name none."""
    return _NAMES.get(column, column)


def value_text(column: str, value: int) -> str:
    """Return a value of a column: bytes in binary units, the rest as they are."""
    if column not in _BYTES:
        return f"{value:,}"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} B"


def curve_label(values: Mapping[str, int], codes: Mapping[str, tuple[str, ...]]) -> str:
    return " ".join(_said(_CURVES, values, codes))


def fixed_label(values: Mapping[str, int], codes: Mapping[str, tuple[str, ...]]) -> str:
    """Return the values that all curves share; a window or a past of 0 is none."""
    rest = {
        key: value
        for key, value in values.items()
        if key not in (*TIED, *_HEADS) and (value or key not in _OFTEN_0)
    }
    said = _said(_FIXED, rest, codes)
    if all(key in values for key in _HEADS):
        heads, kv_heads, size = (values[key] for key in _HEADS)
        said.insert(0, f"{heads}/{kv_heads} heads of {size}")
    return ", ".join(said)


def title_of(name: str) -> str:
    operation, dot, variant = name.partition(".")
    said = _TITLES.get(operation, operation.replace("_", " ").capitalize())
    return f"{said} ({variant.replace('.', ', ')})" if dot else said


def _said(
    forms: Mapping[str, str],
    values: Mapping[str, int],
    codes: Mapping[str, tuple[str, ...]],
) -> list[str]:
    found = []
    for key, value in values.items():
        form = forms.get(key, "{}" if key in codes else f"{key} {{}}")
        if key in codes:
            found.append(form.format(codes[key][value]))
        elif ":d" in form:
            found.append(form.format(value))
        else:
            found.append(form.format(value_text(key, value)))
    return found


def set_octaves(
    axis: Axis,
    column: str,
    ends: tuple[float, float],
    most: int = 11,
    zero: float = 0.0,
) -> None:
    """Put ticks at powers of two on a logarithmic axis, a tick for 0 at `zero`."""
    first = int(np.ceil(np.log2(max(ends[0], 2.0 * zero))))
    last = int(np.floor(np.log2(ends[1] / 1.2)))  # a label at the edge is cut off
    stride = max(1, -(-(last - first + 1) // most))
    # multiples of the stride, so that 1, 16, 256 come before 2, 32, 512
    start = -(-first // stride) * stride
    ticks = [2.0**power for power in range(start, last + 1, stride)]
    axis.set_major_locator(FixedLocator([zero, *ticks] if zero else ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())

    def text(value: float, _position: int | None = None) -> str:
        return value_text(column, 0 if value == zero else round(value))

    axis.set_major_formatter(FuncFormatter(text))
