"""Draws by name and position: how many are drawn elsewhere never shifts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from workloads._checks import MAX_TOKENS, check_role
from workloads._numpy import np
from workloads.draws.counts import MAX_COUNT
from workloads.draws.durations import MAX_SECONDS
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workloads.draws.counts import CountDistribution
    from workloads.draws.durations import DurationDistribution
    from workloads.draws.streams import Streams
    from workloads.lengths import LengthDistribution


class _ByQuantile(Protocol):
    def quantile(self, u: NDArray[np.float64]) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers for a run of positions, the sessions or prompts of one part.

    Position ``i`` of a stream is the same number wherever the part begins and however
    long it is, so a longer workload begins with the shorter.
    """

    streams: Streams
    start: int
    num_draws: int

    def uniforms(self, name: str) -> NDArray[np.float64]:
        """Return uniforms in [0, 1) of the stream `name`, one a position."""
        generator = self.streams.generator(name)
        # One 64-bit number a draw, so positions can be jumped to.
        cast("np.random.PCG64", generator.bit_generator).advance(self.start)
        return generator.random(self.num_draws)

    def lengths(self, name: str, distribution: LengthDistribution) -> NDArray[np.int64]:
        """Return lengths in tokens, held to the contract: users bring their own."""
        return self._drawn(name, distribution, "iu", 1, MAX_TOKENS)

    def counts(self, name: str, distribution: CountDistribution) -> NDArray[np.int64]:
        return self._drawn(name, distribution, "iu", 0, MAX_COUNT)

    def seconds(
        self, name: str, distribution: DurationDistribution
    ) -> NDArray[np.float64]:
        return self._drawn(name, distribution, "f", 0, MAX_SECONDS)

    def _drawn(
        self, name: str, distribution: _ByQuantile, kinds: str, low: int, high: float
    ) -> NDArray[Any]:
        u = self.uniforms(name)
        values = distribution.quantile(u)
        if not isinstance(values, np.ndarray):
            found = f"an array; got {type(values).__name__}"
        elif values.shape != u.shape or values.dtype.kind not in kinds:
            of = "integers" if "i" in kinds else "floats"
            found = f"{of} of shape {u.shape}; got {values.dtype} {values.shape}"
        elif not ((values >= low) & (values <= high)).all():  # False of a NaN, too
            found = f"from {low} to {high:g}; got {values.min()} to {values.max()}"
        else:
            return values
        owner = type(distribution).__name__
        raise WorkloadError(f"{name} must be {found}; mend {owner}.quantile")


def check_quantile(name: str, value: object, role: type) -> None:
    check_role(name, value, role, "quantile(self, u)")
