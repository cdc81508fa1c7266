"""Prompt and output lengths that belong together.

Two ways, one role: two distributions coupled by a rank correlation, and pairs drawn as
they stand in a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads._checks import between, check_role
from workloads._numpy import np
from workloads.draws.normal import coupled
from workloads.lengths.base import LengthDistribution, checked_tokens
from workloads.lengths.empirical import positions, trace_lengths
from workloads.traces.base import TraceReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@runtime_checkable
class LengthPairs(Protocol):
    """Lengths of prompts and outputs, drawn together."""

    def pairs(
        self, u: NDArray[np.float64], v: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths of as many requests as there are numbers.

        Parameters
        ----------
        u, v
            Independent uniforms in [0, 1), shape ``(n,)``: the streams
            ``"prompt_tokens"`` and ``"output_tokens"``. A request's lengths depend on
            its own two numbers only, so that a longer run begins with the shorter.

        Returns
        -------
        tuple of numpy.ndarray of int64
            Prompt tokens and output tokens, at least 1, each of shape ``(n,)``.
        """


@dataclass(frozen=True, slots=True)
class CoupledLengths:
    """Two distributions, coupled by a rank correlation: a Gaussian copula.

    Parameters
    ----------
    prompt_tokens, output_tokens
        The two distributions, which stay as they are.
    rank_correlation
        Spearman's rho between the two lengths, from -1 to 1.

    Raises
    ------
    WorkloadError
        If a parameter is out of range. Drawing raises where a distribution breaks its
        contract.
    """

    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    rank_correlation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            distribution = getattr(self, name)
            check_role(name, distribution, LengthDistribution, "quantile(self, u)")
        remedy = "give Spearman's rho, 0 for independent lengths"
        between("rank_correlation", self.rank_correlation, -1, 1, remedy)

    def pairs(
        self, u: NDArray[np.float64], v: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        prompts = _drawn("prompt_tokens", self.prompt_tokens, u)
        v = coupled(u, v, self.rank_correlation)
        return prompts, _drawn("output_tokens", self.output_tokens, v)


@dataclass(frozen=True, slots=True)
class JointTraceLengths:
    """Pairs of a trace, drawn with replacement: whatever couples them is kept.

    Prompt lengths are those that `TraceLength` draws from the same stream. Each comes
    with the output that it has in the trace.

    Parameters
    ----------
    trace
        Where the pairs come from; see `TraceReader`.

    Raises
    ------
    WorkloadError
        If it is no reader. Errors of the reader pass through when pairs are drawn.
    """

    trace: TraceReader

    def __post_init__(self) -> None:
        check_role("trace", self.trace, TraceReader, "read(self)")

    def pairs(
        self, u: NDArray[np.float64], v: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        del v  # a pair is one draw
        prompts, outputs = trace_lengths(self.trace)
        drawn = np.lexsort((outputs, prompts))[positions(u, len(prompts))]
        return prompts[drawn], outputs[drawn]


def _drawn(
    name: str, distribution: LengthDistribution, u: NDArray[np.float64]
) -> NDArray[np.int64]:
    method = f"{type(distribution).__name__}.quantile"
    return checked_tokens(name, distribution.quantile(u), u.shape, method)


LENGTH_PAIRS: Mapping[str, type[LengthPairs]] = MappingProxyType(
    {
        "coupled": CoupledLengths,
        "joint_trace": JointTraceLengths,
    }
)
"""Lengths drawn together, by the ``kind`` of a configuration."""
