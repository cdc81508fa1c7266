"""Errors of every measured run with each term of the clock, and without it.

``python -m tests.truth.ablation`` prints the table of the README, some minutes long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from sim.simulation.simulate import simulate
from sim.studies.validation.readers import read
from sim.studies.validation.run import validate
from tests.shared import shared
from tests.truth.recordings import H200
from tests.truth.runs import (
    RTX,
    STAGE_RUNS,
    ClosedLoopPoint,
    StageRun,
    closed_loop_points,
    rtx_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LATENCIES: Final = ("ttft", "tpot", "e2el")
"""Of the open loops the median of the first, the means of the others."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A clock with all terms, or without one of them."""

    name: str
    is_ahead: bool = True
    has_graphs: bool = True
    has_front_end: bool = True
    has_cascade: bool = True
    cost: dict[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """The table `cost`."""
        return {"kind": "roofline"} | self.cost

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of the engine beside the run's own."""
        graphs = {"cudagraph_capture_sizes": "release"} if self.has_graphs else {}
        return graphs if self.has_cascade else graphs | {"disable_cascade_attn": True}


VARIANTS: Final = (
    Variant("all terms"),
    Variant("efficiencies of all GPUs", cost={"efficiencies": "common"}),
    Variant("without graphs: no filling up", has_graphs=False),
    Variant("without host time a request", cost={"request_overhead_s": 0.0}),
    Variant("without the scheduler's", cost={"schedule_request_s": 0.0}),
    Variant("without host time a step", cost={"step_overhead_s": 1e-9}),
    Variant("host added to every step", is_ahead=False),
    Variant("without the front end", has_front_end=False),
    Variant("12 us a layer to start kernels, not 40", cost={"layer_latency_s": 12e-6}),
    Variant("without a norm of queries and keys", cost={"qk_norm_latency_s": 0.0}),
    Variant("without the experts' start", cost={"moe_layer_latency_s": 0.0}),
    Variant("experts chosen as published", cost={"moe_routing_correlation": 0.02}),
    Variant("without launches", cost={"launch_s": 0.0}),
    Variant("launches of 95 us each, not 26", cost={"launch_s": 95e-6}),
    Variant("each request reads a common prefix", has_cascade=False),
    Variant("products at 0.72 of the peak", cost={"gemm_compute_efficiency": 0.72}),
)


def of_stages(run: StageRun, folder: Path, variant: Variant) -> list[list[float]]:
    """Return the errors of each stage, by latency."""
    config = run.config(
        folder,
        variant.table,
        async_scheduling=variant.is_ahead,
        front_end=variant.has_front_end,
        more=variant.engine,
    )
    errors = run.errors(simulate(config))
    return [errors[name] for name in LATENCIES]


def of_rtx(variant: Variant) -> list[list[float]]:
    """Return the errors of the run on one RTX PRO 6000, by latency."""
    config = rtx_config(
        variant.table, async_scheduling=variant.is_ahead, more=variant.engine
    )
    metrics = validate(config, read(shared(f"{RTX}/requests.csv"))).to_dict()["metrics"]
    keys = [f"{'p50' if name == 'ttft' else 'mean'}_{name}_ms" for name in LATENCIES]
    return [[metrics[key]["error_pct"]] for key in keys]


def of_users(point: ClosedLoopPoint, variant: Variant) -> float:
    """Return the error of TPOT; when prompts come was not published."""
    summary = simulate(point.config(variant.table, variant.engine)).summary
    return float(100.0 * (summary["mean_tpot_ms"] / point.mean_tpot_ms - 1.0))


def of_full_cache(folder: Path, variant: Variant) -> tuple[float, float, int]:
    """Return errors of TPOT and E2E on an H200 with a full cache, and preemptions."""
    more = variant.engine | {"async_scheduling": variant.is_ahead}
    truth = H200.measured_ms()
    summary = H200.run(variant.table, folder, more=more).summary
    tpot, e2el = (
        100.0 * (summary[f"mean_{name}_ms"] / truth[name] - 1.0)
        for name in ("tpot", "e2el")
    )
    return tpot, e2el, summary["num_preemptions"]


def rows(folder: Path) -> Iterator[str]:
    """Yield the lines of the table: median and largest of absolute errors, in %.

    Of the run with a full cache the signed errors of TPOT and E2E, and preemptions.
    """
    yield "| | TTFT | TPOT | E2E | TPOT, closed loop | full cache |"
    yield "|---|---|---|---|---|---|"
    for variant in VARIANTS:
        errors = of_rtx(variant)
        for run in STAGE_RUNS:
            stages = of_stages(run, folder, variant)
            errors = [one + more for one, more in zip(errors, stages, strict=True)]
        errors.append([of_users(point, variant) for point in closed_loop_points()])
        cells = [
            f"{median(map(abs, own)):.1f}, {max(map(abs, own)):.1f}" for own in errors
        ]
        tpot, e2el, num_preemptions = of_full_cache(folder, variant)
        cells.append(f"{tpot:+.1f}, {e2el:+.1f}; {num_preemptions}")
        yield " | ".join(("", variant.name, *cells, "")).strip()


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        for line in rows(Path(name)):
            print(line, flush=True)
