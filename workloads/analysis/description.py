"""A workload described: everything that `kvsim workload describe` says."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads._checks import MAX_TOKENS, whole
from workloads.analysis.session_shape import SessionShape, session_shape
from workloads.analysis.sharing import (
    Sharing,
    own_block_size,
    sharing_by_blocks,
    sharing_by_pieces,
)
from workloads.analysis.statistics import (
    ArrivalStatistics,
    Columns,
    LengthStatistics,
    arrival_statistics,
    columns_of,
    length_statistics,
    rank_correlation,
)
from workloads.columns import RequestColumns
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import RequestSpec

_COUNTED = ("best_of", "beam_width", "priority", "slo_class", "max_tokens")
_SHOWN_VALUES = 20


@dataclass(frozen=True, slots=True)
class Description:
    """What a workload is like."""

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
    """Return what a workload is like.

    Parameters
    ----------
    requests
        In order of arrival.
    block_size
        Tokens of the full blocks by which prefix sharing is counted.

    Raises
    ------
    WorkloadError
        If there is no request, or the block size is out of range.
    """
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
    """Return mean, p50, p90, p99 and max; None of nothing."""
    if not len(values):
        return None
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
    mean, most = float(values.mean()), float(values.max())
    return {"mean": mean, "p50": p50, "p90": p90, "p99": p99, "max": most}
