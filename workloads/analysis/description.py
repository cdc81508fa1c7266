"""Statistics of a workload: everything that `kvsim workload describe` says."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads._checks import MAX_TOKENS, whole
from workloads.analysis.sharing import (
    Sharing,
    own_block_size,
    sharing_by_blocks,
    sharing_by_pieces,
)
from workloads.errors import WorkloadError
from workloads.requests.chains import has_chains
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec

PEAK_WINDOW_S = 60.0
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)
MOST_WINDOWS = 10_000_000
"""Windows that are laid side by side; of more, those with arrivals are counted."""
_LEAST_WINDOWS = 10
"""Fewer say nothing of a variance."""
_COUNTED = ("best_of", "beam_width", "priority", "slo_class", "max_tokens")
_SHOWN_VALUES = 20


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the requests, for statistics: float64 and int64, shape ``(n,)``."""

    arrival_s: NDArray[np.float64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ArrivalStatistics:
    """How requests come.

    ``None`` stands where there are too few requests, or too short a span, to say.
    """

    num_requests: int
    span_s: float
    """From the first arrival to the last."""
    mean_rate: float | None
    """Requests per second: gaps over the span."""
    peak_rate: float | None
    """Requests per second of the busiest of the whole 60 s windows from the first
    arrival on; None below two windows."""
    gap_cv: float | None
    """Coefficient of variation of the gaps: 1 for Poisson arrivals, above for
    bursts."""
    dispersion: dict[str, float]
    """Variance over mean of the arrivals in whole windows, by their length in
    seconds: 1 for Poisson arrivals; windows of which there are fewer than ten are
    left out."""


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Lengths in tokens; percentiles are interpolated."""

    total: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: int


def columns_of(requests: Sequence[RequestSpec]) -> Columns:
    if isinstance(requests, RequestColumns):
        return Columns(
            requests.arrival_s, requests.num_prompt_tokens, requests.num_output_tokens
        )
    num = len(requests)
    return Columns(
        np.fromiter((r.arrival_s for r in requests), np.float64, num),
        np.fromiter((r.num_prompt_tokens for r in requests), np.int64, num),
        np.fromiter((r.num_output_tokens for r in requests), np.int64, num),
    )


def arrival_statistics(arrival_s: NDArray[np.float64]) -> ArrivalStatistics:
    """Describe arrival times, which are in seconds and never fall; at least one."""
    span_s = float(arrival_s[-1] - arrival_s[0])
    gaps_s = np.diff(arrival_s)
    num_minutes, per_minute = busy_windows(arrival_s, PEAK_WINDOW_S)
    return ArrivalStatistics(
        num_requests=len(arrival_s),
        span_s=span_s,
        mean_rate=len(gaps_s) / span_s if span_s else None,
        peak_rate=float(per_minute.max()) / PEAK_WINDOW_S if num_minutes > 1 else None,
        gap_cv=float(gaps_s.std() / gaps_s.mean()) if span_s else None,
        dispersion={
            f"{window_s:g}": ratio
            for window_s in DISPERSION_WINDOWS_S
            if (ratio := _dispersion(arrival_s, window_s)) is not None
        },
    )


def window_counts(arrival_s: NDArray[np.float64], window_s: float) -> NDArray[np.int64]:
    """Return the arrivals in each whole window of the span, from the first on."""
    since_s = arrival_s - arrival_s[0]
    num_windows = int(since_s[-1] // window_s)
    index = (since_s // window_s).astype(np.int64)
    return np.bincount(index[index < num_windows], minlength=num_windows)


def busy_windows(
    arrival_s: NDArray[np.float64], window_s: float
) -> tuple[float, NDArray[np.int64]]:
    """Return how many whole windows a span has, and the arrivals in those with any.

    Its memory is that of the arrivals, however long the span is.
    """
    since_s = arrival_s - arrival_s[0]
    index = since_s // window_s
    num_windows = float(index[-1])
    return num_windows, np.unique(index[index < num_windows], return_counts=True)[1]


def _dispersion(arrival_s: NDArray[np.float64], window_s: float) -> float | None:
    """Return variance over mean of the arrivals in whole windows, if they are many."""
    num_windows, counts = busy_windows(arrival_s, window_s)
    if num_windows < _LEAST_WINDOWS:
        return None
    if num_windows <= MOST_WINDOWS:
        counts = window_counts(arrival_s, window_s)
        return float(counts.var() / counts.mean())
    mean = float(counts.sum()) / num_windows
    return float((counts.astype(np.float64) ** 2).sum()) / num_windows / mean - mean


def length_statistics(lengths: NDArray[np.int64]) -> LengthStatistics:
    p50, p90, p95, p99 = np.quantile(lengths, (0.5, 0.9, 0.95, 0.99)).tolist()
    total, mean, most = int(lengths.sum()), float(lengths.mean()), int(lengths.max())
    return LengthStatistics(total, mean, p50, p90, p95, p99, most)


def rank_correlation(
    first: NDArray[np.int64], second: NDArray[np.int64]
) -> float | None:
    """Return Spearman's rho, ties at their mean rank; None where one never varies."""
    ranks = [_ranks(values) for values in (first, second)]
    if any(rank.std() == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: NDArray[np.int64]) -> NDArray[np.float64]:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts - 1) / 2.0
    return means[where]


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Requests that belong together, and the chains in which they wait.

    A session is named by its trace, or else a chain: a request that waits for none
    and all that wait for it, directly or not.
    """

    turns: NDArray[np.int64]
    """Requests of each session, int64 of shape ``(num_sessions,)``."""
    num_chained: int
    """Requests that wait for another."""
    delays_s: NDArray[np.float64]
    """Time from the end of the request before to the sending, of each that waits."""
    growth_tokens: NDArray[np.int64]
    """How much longer its prompt is than that of the request before, of each that
    waits; negative where a session begins its context anew."""
    quoted: int
    """Requests that wait and whose prompt quotes the answer that they waited for."""

    @property
    def num_sessions(self) -> int:
        return len(self.turns)


def session_shape(requests: Sequence[RequestSpec]) -> SessionShape | None:
    """Return the shape of sessions, or None where requests have none."""
    if isinstance(requests, RequestColumns):
        return None
    if not has_chains(requests) and all(r.session_id is None for r in requests):
        return None
    roots: list[int | str] = []
    delays_s, growth, num_quoted = [], [], 0
    for request in requests:
        previous_id = request.previous_id
        if previous_id is None:
            roots.append(request.request_id)
        else:
            before = requests[previous_id]
            roots.append(roots[previous_id])
            delays_s.append(request.delay_s)
            growth.append(request.num_prompt_tokens - before.num_prompt_tokens)
            num_quoted += any(key == before.output_segment for key, _ in request.prompt)
        if request.session_id is not None:
            roots[-1] = f"session {request.session_id}"
    return SessionShape(
        turns=np.array(list(Counter(roots).values()), dtype=np.int64),
        num_chained=len(delays_s),
        delays_s=np.array(delays_s, dtype=np.float64),
        growth_tokens=np.array(growth, dtype=np.int64),
        quoted=num_quoted,
    )


@dataclass(frozen=True, slots=True)
class Description:
    """Statistics of a workload, with the columns that they are of."""

    columns: Columns
    arrivals: ArrivalStatistics
    prompts: LengthStatistics
    outputs: LengthStatistics
    rank_correlation: float | None
    """Spearman's rho between the lengths of prompts and outputs."""
    sharing: tuple[Sharing, ...]
    """By the trace's own pieces, where it has them, and by full blocks; empty where
    no prompt has an identity that others could share."""
    sessions: SessionShape | None
    sampling: dict[str, dict[str, int]]
    """Of sampling parameters that are not at their defaults, how many requests have
    which value, the most frequent values first."""

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, JSON-ready, the arrays left out."""
        return {
            "arrivals": asdict(self.arrivals),
            "prompt_tokens": asdict(self.prompts),
            "output_tokens": asdict(self.outputs),
            "rank_correlation": self.rank_correlation,
            "prefix_sharing": [_sharing_dict(each) for each in self.sharing],
            "sessions": self.sessions and _sessions_dict(self.sessions),
            "sampling": self.sampling,
        }


def describe(requests: Sequence[RequestSpec], block_size: int = 16) -> Description:
    """Return the statistics of a workload; `block_size` counts prefix sharing."""
    whole("block_size", block_size, 1, MAX_TOKENS, "give a block in tokens, such as 16")
    if not len(requests):
        raise WorkloadError("a workload needs a request; got none; check the file")
    columns = columns_of(requests)
    prompts, outputs = columns.num_prompt_tokens, columns.num_output_tokens
    return Description(
        columns=columns,
        arrivals=arrival_statistics(columns.arrival_s),
        prompts=length_statistics(prompts),
        outputs=length_statistics(outputs),
        rank_correlation=rank_correlation(prompts, outputs),
        sharing=_sharing(requests, block_size),
        sessions=session_shape(requests),
        sampling=_sampling(requests),
    )


def _sharing(requests: Sequence[RequestSpec], block_size: int) -> tuple[Sharing, ...]:
    if isinstance(requests, RequestColumns):
        return ()
    own = own_block_size(requests)
    pieces = () if own is None else (sharing_by_pieces(requests, own),)
    return (*pieces, sharing_by_blocks(requests, block_size))


def _sampling(requests: Sequence[RequestSpec]) -> dict[str, dict[str, int]]:
    defaults = {"best_of": 1, "beam_width": 1, "priority": 0, "slo_class": ""}
    found = {}
    for name in _COUNTED:
        counts = _counts(requests, name)
        if set(counts) != {defaults.get(name)}:
            shown = counts.most_common(_SHOWN_VALUES)
            found[name] = {_shown(value): count for value, count in shown}
            if more := len(requests) - sum(count for _, count in shown):
                found[name]["others"] = more
    return found


def _shown(value: Any) -> str:
    return "none" if value in (None, "") else str(value)


def _counts(requests: Sequence[RequestSpec], name: str) -> Counter[Any]:
    if isinstance(requests, RequestColumns):
        column = getattr(requests, name)
        if not isinstance(column, np.ndarray):
            return Counter({column: len(requests)})
        return Counter(column.tolist())
    return Counter(getattr(request, name) for request in requests)


def _sharing_dict(sharing: Sharing) -> dict[str, Any]:
    statistics = sharing.statistics
    return asdict(statistics) | {
        "block_hit_rate": statistics.block_hit_rate,
        "token_hit_rate": statistics.token_hit_rate,
    }


def _sessions_dict(shape: SessionShape) -> dict[str, Any]:
    return {
        "num_sessions": shape.num_sessions,
        "num_chained_requests": shape.num_chained,
        "num_quoting_the_answer": shape.quoted,
        "turns": quantiles(shape.turns),
        "delay_s": quantiles(shape.delays_s),
        "growth_tokens": quantiles(shape.growth_tokens),
    }


def quantiles(values: np.ndarray[Any, Any]) -> dict[str, float] | None:
    """Return mean, p50, p90, p95, p99 and max; None of nothing."""
    if not len(values):
        return None
    percentiles = np.quantile(values, (0.5, 0.9, 0.95, 0.99)).tolist()
    found = dict(zip(("p50", "p90", "p95", "p99"), percentiles, strict=True))
    return {"mean": float(values.mean()), **found, "max": float(values.max())}
