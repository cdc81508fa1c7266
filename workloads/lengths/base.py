"""The role of length distributions, and the parts that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads._checks import MAX_TOKENS, check_order, whole
from workloads._numpy import np
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTH_REMEDY = "give a length in tokens, such as 512"


@runtime_checkable
class LengthDistribution(Protocol):
    """Lengths in tokens, by inverse cumulative distribution."""

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the length at each probability.

        Parameters
        ----------
        u
            Probabilities in [0, 1], any shape.

        Returns
        -------
        numpy.ndarray of int64
            Tokens, at least 1, the shape of ``u``; never falling as ``u`` rises.
        """


def check_range(shortest: int, longest: int | None) -> None:
    whole("min", shortest, 1, MAX_TOKENS, LENGTH_REMEDY)
    if longest is not None:
        whole("max", longest, 1, MAX_TOKENS, LENGTH_REMEDY)
        check_order("min", shortest, "max", longest)


def clipped(
    tokens: NDArray[np.float64], shortest: int, longest: int | None
) -> NDArray[np.int64]:
    """Return lengths as whole tokens, those beyond an end at that end."""
    highest = MAX_TOKENS if longest is None else longest
    return np.rint(np.clip(tokens, shortest, highest)).astype(np.int64)


def checked_tokens(
    name: str, tokens: NDArray[np.int64], shape: tuple[int, ...], method: str
) -> NDArray[np.int64]:
    """Hold drawn lengths to the contract, as users bring their own distributions."""
    if not isinstance(tokens, np.ndarray):
        problem = f"an array of integers; got {type(tokens).__name__}"
    elif tokens.shape == shape and tokens.dtype.kind == "i":
        low, high = int(tokens.min()), int(tokens.max())
        if low >= 1 and high <= MAX_TOKENS:
            return tokens.astype("int64")  # a copy: the array may be the user's
        problem = f"from 1 to {MAX_TOKENS}; got {low} to {high}"
    else:
        problem = f"integers of shape {shape}; got {tokens.dtype} {tokens.shape}"
    raise WorkloadError(f"{name} must be {problem}; mend {method}")
