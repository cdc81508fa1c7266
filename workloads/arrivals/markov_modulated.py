"""Calm and storm: Poisson arrivals whose rate jumps at random."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 - constructors' types are read
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from workloads._checks import between, numbers, positive
from workloads._numpy import np
from workloads.arrivals.base import CHUNK, unit_arrivals
from workloads.errors import WorkloadError
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_RATES_REMEDY = "give requests per second of each state, such as [4.0, 20.0]"
_DWELL_REMEDY = "give the mean seconds of each state, such as [300, 30]"


@dataclass(frozen=True, slots=True)
class MarkovModulatedArrivals:
    """Poisson arrivals at the rate of a state that changes at random (an MMPP).

    A state lasts for an exponential time, then comes one of the others, each equally
    likely: of two, the other. It starts as if it had run for ever. The share of time
    of a state is its dwell time over the sum of all, and `mean_rate` is the mean of
    the rates by these shares.

    Parameters
    ----------
    rates
        Requests per second in each state, two at least; 0 is silence.
    dwell_s
        Mean seconds that each state lasts.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, the lists differ in length, no
        state has arrivals, or states change a thousand times between two arrivals.

    Notes
    -----
    Burstiness of two states: the index of dispersion, variance over mean of the
    arrivals in a window, rises from 1 in windows far below the dwell times to ::

        1 + 2 * (rates[0] - rates[1])**2 * share[0] * share[1] * relax_s / mean_rate

    in windows far above, where ``relax_s = 1 / (1 / dwell_s[0] + 1 / dwell_s[1])`` is
    how fast the state is forgotten. At a window of ``w`` seconds the part above 1 is
    to be multiplied by ``1 - (1 - exp(-w / relax_s)) / (w / relax_s)``.

    Source: Fischer and Meier-Hellstern, The Markov-modulated Poisson process (MMPP)
    cookbook, Performance Evaluation 18, 1993.
    """

    rates: Sequence[float]
    dwell_s: Sequence[float]

    def __post_init__(self) -> None:
        rates = numbers("rates", self.rates, _RATES_REMEDY)
        dwell_s = numbers("dwell_s", self.dwell_s, _DWELL_REMEDY)
        if len(rates) < 2 or len(rates) != len(dwell_s):
            raise WorkloadError(
                "rates and dwell_s must have one length, at least 2; got "
                f"{len(rates)} and {len(dwell_s)}; give both for each state"
            )
        for index, (rate, mean_s) in enumerate(zip(rates, dwell_s, strict=True)):
            if rate != 0:
                between(f"rates[{index}]", rate, 1e-9, 1e9, _RATES_REMEDY)
            positive(f"dwell_s[{index}]", mean_s, _DWELL_REMEDY)
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "dwell_s", dwell_s)
        self._check_pace()

    @property
    def mean_rate(self) -> float:
        areas = (r * mean_s for r, mean_s in zip(self.rates, self.dwell_s, strict=True))
        return added(areas) / added(self.dwell_s)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        pieces = self._pieces(rng)
        path = next(pieces)
        before_s = 0.0
        for areas in unit_arrivals(rng):
            parts = [path]
            while parts[-1].end_area <= areas[-1]:
                parts.append(next(pieces))
            path = parts[-1]
            times_s = _joined(parts).inverse_s(areas)
            # Neighbours may be closer than rounding: times never fall.
            times_s = np.maximum.accumulate(times_s.clip(min=before_s))
            yield from times_s.tolist()
            before_s = float(times_s[-1])

    def _pieces(self, rng: np.random.Generator) -> Iterator[_Path]:
        """Yield the path of the rate, a chunk of states at a time."""
        rates, means_s = np.array(self.rates), np.array(self.dwell_s)
        shares = means_s.cumsum() / means_s.sum()
        state = min(int(shares.searchsorted(rng.random(), "right")), len(rates) - 1)
        time_s = area = 0.0
        while True:
            # The rest of the first state is as long as a whole one: no memory.
            steps = 1 + rng.integers(len(rates) - 1, size=CHUNK)
            states = (state + np.concatenate([[0], steps.cumsum()])) % len(rates)
            state, states = int(states[-1]), states[:-1]
            lengths_s = rng.standard_exponential(CHUNK) * means_s[states]
            ends_s = time_s + lengths_s.cumsum()
            end_areas = area + (lengths_s * rates[states]).cumsum()
            yield _Path(
                ends_s - lengths_s,
                np.concatenate([[area], end_areas[:-1]]),
                rates[states],
                float(end_areas[-1]),
            )
            time_s, area = float(ends_s[-1]), float(end_areas[-1])

    def _check_pace(self) -> None:
        per_state = self.mean_rate * added(self.dwell_s) / len(self.dwell_s)
        if per_state < 1e-3:
            raise WorkloadError(
                "rates and dwell_s must give a state at least 0.001 arrivals in the "
                f"mean; got {per_state:g}; use kind poisson, which this nearly is"
            )


class _Path(NamedTuple):
    """States one after another, each array of shape ``(num_states,)``."""

    starts_s: NDArray[np.float64]
    start_areas: NDArray[np.float64]
    rates: NDArray[np.float64]
    end_area: float

    def inverse_s(self, areas: NDArray[np.float64]) -> NDArray[np.float64]:
        state = self.start_areas.searchsorted(areas, side="right") - 1
        left = areas - self.start_areas[state]
        # Below end_area, hence never in a last state of silence.
        times_s: NDArray[np.float64] = self.starts_s[state] + left / self.rates[state]
        return times_s


def _joined(parts: list[_Path]) -> _Path:
    return _Path(
        np.concatenate([part.starts_s for part in parts]),
        np.concatenate([part.start_areas for part in parts]),
        np.concatenate([part.rates for part in parts]),
        parts[-1].end_area,
    )
