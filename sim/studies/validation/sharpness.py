"""The sharpness of a validation: errors that wrong block counts would have.

A run that never fills its cache is predicted as well with any number of blocks, and
proves nothing about preemption, swapping or eviction. So the same run is simulated with
more blocks, too: where that changes nothing, the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.studies.validation.compare import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.results.run import Results
    from sim.studies.validation.observed import Observed, ObservedRequests

MORE_BLOCKS_PCT: Final = (5, 30)
"""How many more blocks are tried, in percent."""
_CHANGED: Final = 0.01
"""A latency counts as changed from so much on, relative."""
_FULL: Final = 0.95
"""Measured usage from which on the engine's cache was full."""
SHOWN: Final = (
    *("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"),
    *("output_throughput", "num_preemptions", "prefix_cache_hits"),
)
"""Metrics that are shown for each number of blocks."""


@dataclass(frozen=True, slots=True)
class MoreBlocks:
    """The run with more blocks than it was given."""

    more_pct: int
    num_gpu_blocks: int
    predicted: Observed
    num_changed: int
    """Requests whose TTFT or E2E latency differs by more than 1 %."""


@dataclass(frozen=True, slots=True)
class Sharpness:
    """Whether the number of blocks mattered."""

    peak_usage: float
    """Largest KV usage, between 0 and 1: measured where that was recorded."""
    is_peak_measured: bool
    num_measured_preemptions: float
    more_blocks: tuple[MoreBlocks, ...]

    @property
    def is_sharp(self) -> bool:
        """Whether more blocks would have been predicted otherwise."""
        return any(each.num_changed for each in self.more_blocks)

    @property
    def was_full(self) -> bool:
        """Whether the engine itself was seen with a full cache."""
        full = self.is_peak_measured and self.peak_usage >= _FULL
        return full or self.num_measured_preemptions > 0

    @property
    def has_pressure(self) -> bool:
        return self.is_sharp or self.was_full

    @property
    def verdict(self) -> str:
        if self.is_sharp:
            parts = ", ".join(
                f"{each.more_pct} % more blocks change {each.num_changed:,} requests "
                "by more than 1 %"
                for each in self.more_blocks
            )
            return f"sharp: {parts}"
        side = "measured" if self.is_peak_measured else "simulated"
        text = f"not sharp: usage <= {100.0 * self.peak_usage:.1f} % ({side})"
        text += "; 5 % and 30 % more blocks predict the same"
        if self.was_full:
            text += (
                ", though the engine's cache was full: the number of blocks that was "
                "given is probably too large"
            )
        return text

    def to_dict(self, measured: Observed) -> dict[str, Any]:
        return {
            "is_sharp": self.is_sharp,
            "has_pressure": self.has_pressure,
            "verdict": self.verdict,
            "peak_kv_cache_usage": self.peak_usage,
            "peak_is_measured": self.is_peak_measured,
            "more_blocks": [
                {
                    "more_pct": each.more_pct,
                    "num_gpu_blocks": each.num_gpu_blocks,
                    "num_requests_changed": each.num_changed,
                    "metrics": metrics(each.predicted, measured),
                }
                for each in self.more_blocks
            ],
        }


def sharpness_of(
    results: Results,
    predicted: Observed,
    measured: Observed,
    predict: Callable[[int], Observed],
) -> Sharpness:
    num_gpu_blocks = int(results.summary["num_gpu_blocks"])
    usage = None if measured.series is None else measured.series.kv_cache_usage
    peak = float(results.summary["kv_cache_usage_max"])
    return Sharpness(
        peak_usage=peak if usage is None else float(np.nanmax(usage)),
        is_peak_measured=usage is not None,
        num_measured_preemptions=_preemptions(measured),
        more_blocks=tuple(
            _more_blocks(more_pct, num_gpu_blocks, predicted, predict)
            for more_pct in MORE_BLOCKS_PCT
        ),
    )


def _more_blocks(
    more_pct: int,
    num_gpu_blocks: int,
    predicted: Observed,
    predict: Callable[[int], Observed],
) -> MoreBlocks:
    more = -(-num_gpu_blocks * (100 + more_pct) // 100)  # at least one more
    found = predict(more)
    assert predicted.requests is not None
    assert found.requests is not None
    num_changed = _num_changed(predicted.requests, found.requests)
    return MoreBlocks(more_pct, more, found, num_changed)


def _num_changed(before: ObservedRequests, after: ObservedRequests) -> int:
    changed = np.zeros(before.num_requests, bool)
    for name in ("ttft_s", "e2el_s"):
        left, right = getattr(before, name), getattr(after, name)
        near = np.isclose(left, right, rtol=_CHANGED, atol=0.0, equal_nan=True)
        changed |= ~near
    return int(changed.sum())


def _preemptions(measured: Observed) -> float:
    requests = measured.requests
    if requests is not None and requests.num_preemptions is not None:
        return float(requests.num_preemptions.sum())
    return measured.numbers.get("num_preemptions", 0.0)
