"""Measurements as plain records: a point of an operation, and its times.

A *point* is one shape of one operation in one variant. The cost model interpolates over
an *axis*; a *constant* is fixed for the whole curve. Times are seconds, sizes are bytes
and tokens, all shapes are integers.

Operations and their axes
-------------------------
decode_attention
    num_seqs, context_tokens (the sum), longest_context_tokens: one layer.
prefill_attention
    query_tokens, past_tokens: one sequence, one layer, causal.
mixed_attention
    query_tokens, past_tokens of one chunk; num_decodes, context_tokens (their sum).
swap
    num_pages, page_bytes: descriptors between host and device; constants `direction`
    (h2d, d2h, both) and `memory` (pinned, pageable).
copy_blocks
    num_blocks: pairs, all layers; constants num_layers, page_bytes.
gemm
    num_tokens: (num_tokens, k) times (k, n); constant `layer` names the matrix.
norm, rope, activation, cache_write
    num_tokens: one layer.
router
    num_tokens: logits of one layer's experts, the best of them, their softmax.
routed_experts
    num_tokens, num_touched (different experts that they are sent to): one layer, from
    the choice of experts to the sum. The dtype is that of the weights, by the names of
    published tables (bfloat16, fp8, fp8_block, w4a16_mxfp4).
sampler
    num_seqs.
launch
    num_launches: kernels that do nothing, one after the other.

Metrics
-------
device
    Seconds a call takes on the device, in a replayed graph of calls that rotates over
    several pools; transfers, which no graph holds, between two events on their stream.
eager
    Seconds of a single call between two events, after the L2 cache was flushed.
host
    Seconds until the enqueuing call returns.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AXES: dict[str, tuple[str, ...]] = {
    "decode_attention": ("num_seqs", "context_tokens", "longest_context_tokens"),
    "prefill_attention": ("query_tokens", "past_tokens"),
    "mixed_attention": (
        *("query_tokens", "past_tokens", "num_decodes", "context_tokens"),
    ),
    "swap": ("num_pages", "page_bytes"),
    "copy_blocks": ("num_blocks",),
    "gemm": ("num_tokens",),
    "norm": ("num_tokens",),
    "rope": ("num_tokens",),
    "activation": ("num_tokens",),
    "cache_write": ("num_tokens",),
    "router": ("num_tokens",),
    "routed_experts": ("num_tokens", "num_touched"),
    "sampler": ("num_seqs",),
    "launch": ("num_launches",),
}
"""Axes of each operation, in order."""

CHOSEN = "chosen"
"""Routing of tables that name how many experts the tokens were sent to."""

OPERATIONS = tuple(AXES)
"""Every operation that calibration times."""

METRICS = ("device", "eager", "host")
"""Times of a point, in the order of a profile."""


@dataclass(frozen=True, slots=True)
class Curve:
    """All points that differ in their axes only."""

    operation: str
    variant: str
    """How it is done, such as "split_kv" or "loop"; see `calibrate.backends`."""
    dtype: str
    constants: tuple[tuple[str, int | str], ...]
    """Names and values, sorted by name."""

    @property
    def key(self) -> str:
        """The curve as one line of text, for seeds and messages."""
        facts = ",".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.operation}/{self.variant}/{self.dtype}({facts})"

    def constant(self, name: str) -> int:
        value = dict(self.constants)[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} of {self.key} is no integer")
        return value

    def text(self, name: str) -> str:
        return str(dict(self.constants)[name])


def curve(
    operation: str, variant: str, dtype: str, constants: Mapping[str, int | str]
) -> Curve:
    """Return a curve with its constants in order."""
    return Curve(operation, variant, dtype, tuple(sorted(constants.items())))


@dataclass(frozen=True, slots=True)
class Point:
    """One shape of one curve."""

    curve: Curve
    values: tuple[int, ...]
    """One a name of ``AXES[curve.operation]``."""

    @property
    def axes(self) -> dict[str, int]:
        return dict(zip(AXES[self.curve.operation], self.values, strict=True))

    @property
    def key(self) -> str:
        """The point as one line of text: its name in a checkpoint."""
        return f"{self.curve.key}@{','.join(map(str, self.values))}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "operation": self.curve.operation,
            "variant": self.curve.variant,
            "dtype": self.curve.dtype,
            "constants": dict(self.curve.constants),
            "axes": self.axes,
        }


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The distribution of a metric's samples, in seconds."""

    p10_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    mean_s: float
    n: int
    """Samples."""

    def to_dict(self) -> dict[str, float | int]:
        return {
            "p10_s": self.p10_s,
            "p50_s": self.p50_s,
            "p90_s": self.p90_s,
            "p99_s": self.p99_s,
            "mean_s": self.mean_s,
            "n": self.n,
        }


@dataclass(frozen=True, slots=True)
class Measurement:
    """A point and its times."""

    point: Point
    metrics: Mapping[str, Quantiles]
    """By name, see `METRICS`; not every operation has all."""
    settled: bool = True
    """Whether the warm-up ended by itself in every round."""

    @property
    def median_s(self) -> float:
        """The median of the leading metric."""
        return self.metrics[leading_metric(self.metrics)].p50_s

    def to_dict(self) -> dict[str, Any]:
        metrics = {name: times.to_dict() for name, times in self.metrics.items()}
        return {**self.point.to_dict(), "metrics": metrics, "settled": self.settled}


def leading_metric(metrics: Mapping[str, object]) -> str:
    """Return the metric that stands for the point: device, else eager, else host."""
    return next(name for name in METRICS if name in metrics)


def quantiles(samples: Sequence[float]) -> Quantiles:
    """Return the distribution of `samples`, in seconds.

    Quantiles are interpolated linearly between order statistics.
    """
    if not samples:
        raise ValueError("quantiles need at least one sample; got none")
    ordered = sorted(samples)
    if not (ordered[0] > 0.0 and math.isfinite(math.fsum(ordered))):
        raise ValueError(
            f"samples must be positive and finite; got {ordered[0]} to {ordered[-1]}"
        )
    p10_s, p50_s, p90_s, p99_s = (
        quantile(ordered, share) for share in (0.1, 0.5, 0.9, 0.99)
    )
    mean_s = math.fsum(ordered) / len(ordered)
    return Quantiles(p10_s, p50_s, p90_s, p99_s, mean_s, len(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of values in ascending order, interpolated linearly."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(samples: Sequence[float]) -> float:
    return quantile(sorted(samples), 0.5)


def canonical(data: object) -> str:
    """Return plain data as JSON with sorted keys and no spaces, NaN refused."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
