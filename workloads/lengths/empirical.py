"""Lengths as they were found: tables of quantiles, values with counts, traces."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 - constructors' types are read
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from workloads._checks import (
    MAX_TOKENS,
    between,
    check_role,
    numbers,
    one_of,
    whole,
)
from workloads._numpy import np
from workloads.errors import WorkloadError
from workloads.lengths.base import LENGTH_REMEDY
from workloads.requests.columns import SpecIterator
from workloads.traces.base import TraceReader, counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LIST_REMEDY = "give a list of numbers, such as [0, 0.5, 1]"


@dataclass(frozen=True, slots=True)
class QuantileLength:
    """An empirical table of quantiles, linear in between, rounded.

    Parameters
    ----------
    probabilities
        Rising from exactly 0 to exactly 1.
    values
        The length in tokens at each probability; at least 1, never falling.

    Raises
    ------
    WorkloadError
        If the table breaks one of these rules.
    """

    probabilities: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("probabilities", "values"):
            checked = numbers(name, getattr(self, name), _LIST_REMEDY)
            object.__setattr__(self, name, checked)
        _check_table(self.probabilities, self.values)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        tokens = np.interp(u, self.probabilities, self.values)
        return np.rint(tokens).astype(np.int64)


@dataclass(frozen=True, slots=True)
class EmpiricalLength:
    """Exactly the lengths of a list, as often as they stand in it.

    Parameters
    ----------
    values
        Lengths in tokens, in any order.
    counts
        How often each was seen, or its share: at least 0, not all 0. None counts each
        value once.

    Raises
    ------
    WorkloadError
        If the lists break one of these rules, or differ in length.
    """

    values: Sequence[int]
    counts: Sequence[float] | None = None

    def __post_init__(self) -> None:
        listed = numbers("values", self.values, "give a list of lengths in tokens")
        for index, tokens in enumerate(self.values):
            whole(f"values[{index}]", tokens, 1, MAX_TOKENS, LENGTH_REMEDY)
        if not listed:
            raise WorkloadError("values must hold a length; got none; add one")
        if self.counts is None:
            object.__setattr__(self, "values", tuple(sorted(self.values)))
            return
        counts = numbers("counts", self.counts, "give one number a value")
        _check_counts(counts, len(listed))
        pairs = sorted(zip(self.values, counts, strict=True))
        seen = [(value, count) for value, count in pairs if count > 0]
        object.__setattr__(self, "values", tuple(value for value, _ in seen))
        object.__setattr__(self, "counts", tuple(count for _, count in seen))

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        values = np.array(self.values, dtype=np.int64)
        if self.counts is None:
            return values[positions(u, len(values))]
        reached = np.cumsum(self.counts)
        steps = reached.searchsorted(u * reached[-1], side="right")
        tokens: NDArray[np.int64] = values[np.minimum(steps, len(values) - 1)]
        return tokens


@dataclass(frozen=True, slots=True)
class TraceLength:
    """The lengths of a trace's requests, drawn independently of each other.

    Any length drawn is one of the trace's, as often as there. For prompts
    and outputs that belong together take `JointTraceLengths`.

    Parameters
    ----------
    trace
        Where the lengths come from; see `TraceReader`.
    column
        ``"prompt_tokens"`` or ``"output_tokens"``: which of its two lengths.

    Raises
    ------
    WorkloadError
        If a parameter is neither. Errors of the reader pass through when lengths are
        drawn.
    """

    trace: TraceReader
    column: Literal["prompt_tokens", "output_tokens"]

    def __post_init__(self) -> None:
        check_role("trace", self.trace, TraceReader, "read(self)")
        one_of("column", self.column, ("prompt_tokens", "output_tokens"))

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        prompts, outputs = trace_lengths(self.trace)
        tokens = np.sort(prompts if self.column == "prompt_tokens" else outputs)
        return tokens[positions(u, len(tokens))]


def positions(u: NDArray[np.float64], num_values: int) -> NDArray[np.int64]:
    """Return which of sorted values stands at each probability, all equally likely."""
    return np.minimum((u * num_values).astype(np.int64), num_values - 1)


def trace_lengths(
    trace: TraceReader,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lengths of prompts and outputs of a trace, in its order."""
    requests = trace.read()
    if isinstance(requests, SpecIterator):
        columns = requests.columns
        return columns.num_prompt_tokens, columns.num_output_tokens
    read = counted(trace, requests)
    pairs = [(r.num_prompt_tokens, r.num_output_tokens) for r in read]
    if not pairs:
        name = type(trace).__name__
        raise WorkloadError(
            f"a trace needs at least one request; {name} yields none; check the file"
        )
    prompts, outputs = np.array(pairs, dtype=np.int64).T
    return prompts, outputs


def _check_table(probabilities: Sequence[float], values: Sequence[float]) -> None:
    if len(probabilities) != len(values) or len(probabilities) < 2:
        raise WorkloadError(
            "probabilities and values must have one length, at least 2; got "
            f"{len(probabilities)} and {len(values)}; give one value a probability"
        )
    if (probabilities[0], probabilities[-1]) != (0.0, 1.0):
        raise WorkloadError(
            "probabilities must run from 0 to 1; got "
            f"{probabilities[0]!r} to {probabilities[-1]!r}; add the ends"
        )
    for i, (low, high) in enumerate(pairwise(probabilities), start=1):
        if low >= high:
            raise WorkloadError(
                f"probabilities must rise; got {high!r} after {low!r} at index {i}; "
                "sort them and drop repeats"
            )
    for i, (shorter, longer) in enumerate(pairwise(values), start=1):
        if shorter > longer:
            raise WorkloadError(
                f"values must not fall; got {longer!r} after {shorter!r} at index "
                f"{i}; sort them"
            )
    between("values[0]", values[0], 1, MAX_TOKENS, "lengths are at least 1 token")
    between("values[-1]", values[-1], 1, MAX_TOKENS, "lengths are at most 1e9 tokens")


def _check_counts(counts: Sequence[float], num_values: int) -> None:
    if len(counts) != num_values:
        raise WorkloadError(
            f"counts must be one a value; got {len(counts)} for {num_values} values; "
            "give as many"
        )
    for index, count in enumerate(counts):
        between(f"counts[{index}]", count, 0, 1e15, "give how often it was seen")
    if not sum(counts) > 0:
        raise WorkloadError("counts must not all be 0; got none above; give some")
