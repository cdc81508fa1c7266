"""How many KV blocks there are, and why: as ``kvsim capacity`` explains it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.hardware.capacity import CapacityEstimate, capacity_rows, format_capacity
from sim.hardware.gpus import GIB
from sim.results.folder import lacks
from sim.views.report.charts import Axis, Bars, Chart, Panel
from sim.views.report.html import (
    Markup,
    bullets,
    count,
    datum,
    decimal,
    details,
    element,
    join,
    paragraph,
    table,
)
from sim.views.report.looks import tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.views.report.source import Run

_PARTS: Final = {
    "weights_bytes": ("weights", "part-1"),
    "activation_peak_bytes": ("activation peak", "part-2"),
    "non_torch_bytes": ("non-torch", "part-5"),
    "cuda_graph_bytes": ("CUDA graphs", "part-4"),
    "available_kv_bytes": ("KV cache", "part-3"),
}


def show_capacity(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return the parts of memory, and the sum that leads to the blocks."""
    estimates = [estimate_of(run) for run in runs]
    yield _chart(runs, estimates)
    for place, estimate in enumerate(estimates):
        if estimate in estimates[:place]:
            continue
        same = [run for run, e in zip(runs, estimates, strict=True) if e == estimate]
        yield from _explained(same, estimate, is_alone=len(same) == len(runs))


def estimate_of(run: Run) -> CapacityEstimate:
    told = run.summary.get("capacity")
    known: dict[str, Any] = told if isinstance(told, dict) else {}
    values: dict[str, Any] = {}
    for each in fields(CapacityEstimate):
        if each.name in known:
            values[each.name] = known[each.name]
        elif each.default is MISSING:
            raise lacks(run.path / "summary.json", "number", f"capacity.{each.name}")
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return CapacityEstimate(**values)


def _chart(runs: Sequence[Run], estimates: Sequence[CapacityEstimate]) -> Chart:
    places = np.arange(len(runs), dtype=np.float64)
    begin = np.zeros(len(runs))
    bars = []
    for key, (label, look) in _PARTS.items():
        size = np.array([getattr(each, key) / GIB for each in estimates])
        texts = tuple(
            f"{run.label}\n{label}: {value:,.2f} GiB"
            for run, value in zip(runs, size.tolist(), strict=True)
        )
        end = begin + size
        bars.append(
            Bars(label, look, begin, end, places, is_horizontal=True, texts=texts)
        )
        begin = end
    most = max(each.total_bytes for each in estimates) / GIB
    names = tuple(run.label for run in runs)
    return Chart(
        "gpu-memory",
        "Memory of one GPU: what the engine takes, and what is left for KV blocks.",
        (Panel(Axis("", low=len(runs) - 0.5, high=-0.5, ticks=names), tuple(bars)),),
        x=Axis("GiB", low=0.0, high=most),
        height_px=130 + 36 * len(runs),
    )


def _explained(
    same: Sequence[Run], estimate: CapacityEstimate, *, is_alone: bool
) -> Iterator[Markup]:
    """Yield the explanation of an estimate; `same` are the runs that share it."""
    run = same[0]
    if not is_alone:
        yield element("h3", join(map(tag, same), ", "))
    blocks = datum(run, "num_gpu_blocks", count(estimate.num_gpu_blocks))
    low, high = estimate.num_gpu_blocks_low, estimate.num_gpu_blocks_high
    interval = (
        f" (interval {count(low)} to {count(high)})"
        if estimate.pool_source == "profile"
        else f" (by {estimate.pool_source})"
    )
    yield paragraph(
        blocks,
        f" blocks of {estimate.block_size} tokens{interval}: "
        f"{count(estimate.kv_cache_tokens)} tokens, or "
        f"{decimal(estimate.max_concurrency)} requests of the longest "
        f"({count(estimate.max_model_len)} tokens).",
    )
    rows = [
        (name, f"{size} GiB", remark) for name, size, remark in capacity_rows(estimate)
    ]
    yield table(
        "Memory of one GPU, part by part", ["part", "size", "what"], rows, left=(2,)
    )
    if estimate.extrapolated:
        yield paragraph("Outside of what was measured:", class_="note")
        yield bullets(estimate.extrapolated)
    yield details(
        "As kvsim capacity prints it",
        element("pre", format_capacity(estimate), tabindex="0"),
    )
