"""Fit the terms that a user names on a stated part of a run.

Kernel times come from a profile; what the host adds to a step depends on the engine,
the CPU and the settings, and no kernel table has it. It is the one number that may be
fitted, on the beginning of the run; the rest of the run judges it. What a measurement
says after the split is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.errors import ConfigError
from sim.studies.validation.observed import MeasuredError
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from sim.studies.validation.observed import Observed, ObservedRequests

HOST: Final = "host"
_HOST_KEY: Final = "cost.step_overhead_s"
_HOST_RANGE: Final = (1e-6, 0.02)
"""Seconds a step: from a host that is hardly there to one that takes long."""
LINKS: Final = "links"
_LINKS_KEY: Final = "cost.link_bytes_per_s"
_LINKS_RANGE: Final = (1e9, 1e12)
"""Bytes a second one way: from a slow network to NVLink; searched in octaves."""
FRONT_END: Final = "front_end"
_FRONT_END_KEY: Final = "front_end.client_to_queue_s"
_FRONT_END_RANGE: Final = (0.0, 0.1)
"""Seconds to the queue, beside what the way back is set to."""
_MAX_HOST_S: Final = 5e-3
"""Above this it is no host: published runs ask for 1 to 2 ms a step."""
_MIN_REQUESTS: Final = 10
_MATTERS_PCT: Final = 5.0
_NUM_LOOKS: Final = 6
"""Places at which the loss is looked at first: a host is hidden, and flat, for long."""


@dataclass(frozen=True, slots=True)
class Term:
    """A configuration key to fit, and where to look."""

    key: str
    low: float
    high: float
    in_octaves: bool = False
    """Whether the search takes steps of the logarithm."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the range in which the search moves."""
        if self.in_octaves:
            return float(np.log2(self.low)), float(np.log2(self.high))
        return self.low, self.high

    def value_at(self, place: float) -> float:
        """Return the value at a place of the search, within the range."""
        value = 2.0**place if self.in_octaves else place
        return min(max(value, self.low), self.high)

    def is_at_bound(self, value: float) -> bool:
        place = float(np.log2(value)) if self.in_octaves else value
        low, high = self.bounds
        return min(place - low, high - place) < (high - low) * 1e-3


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted values, the part of the run that they were fitted on, and the errors."""

    values: dict[str, float]
    split_s: float
    num_requests: int
    """Requests that had ended by the split."""
    error_before_pct: float
    """Root mean square of the logarithmic errors before, in percent."""
    error_after_pct: float
    at_bound: tuple[str, ...]
    """Keys whose value lies at an end of its range: probably it should not."""

    @property
    def explains_little(self) -> bool:
        """Whether most of an error that matters is left: another term is off."""
        is_wrong = self.error_after_pct > _MATTERS_PCT
        return is_wrong and self.error_after_pct > 0.9 * self.error_before_pct

    def to_dict(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "split_s": self.split_s,
            "num_requests": self.num_requests,
            "error_before_pct": self.error_before_pct,
            "error_after_pct": self.error_after_pct,
            "at_bound": list(self.at_bound),
            "rule": "requests that had ended by split_s; the rest is judged",
        }


def parse_term(text: str) -> Term:
    """Return the term that a name or ``cost.KEY=LOW:HIGH`` stands for."""
    if text == HOST:
        return Term(_HOST_KEY, *_HOST_RANGE)
    if text == LINKS:
        return Term(_LINKS_KEY, *_LINKS_RANGE, in_octaves=True)
    if text == FRONT_END:
        return Term(_FRONT_END_KEY, *_FRONT_END_RANGE)
    key, equals, span = text.partition("=")
    low, colon, high = span.partition(":")
    try:
        term = Term(key, float(low), float(high))
    except ValueError:
        term = None
    if term is None or not (equals and colon and key.startswith("cost.")):
        raise ConfigError(
            f"--fit takes 'host', 'links', 'front_end' or cost.KEY=LOW:HIGH, got "
            f"'{text}'; such as cost.request_overhead_s=0:1e-4"
        )
    if not -np.inf < term.low < term.high < np.inf:
        raise ConfigError(f"--fit {key}: the range {span} is empty; give LOW < HIGH")
    return term


def is_of_front_end(term: Term) -> bool:
    return term.key == _FRONT_END_KEY


def fit_terms(
    terms: Sequence[Term],
    measured: Observed,
    predict: Callable[[Mapping[str, float]], Observed],
    split_s: float,
) -> Fit:
    """Find the values with which the requests that end by `split_s` fit best.

    The sum of squared logarithmic errors of TPOT and end-to-end latency is made small;
    each counts as much as the other. The front end shows in TTFT, which then counts,
    too.
    """
    latencies = ["tpot_s", "e2el_s"]
    if any(is_of_front_end(term) for term in terms):
        latencies.append("ttft_s")
    requests = measured.requests
    if requests is None:
        raise MeasuredError(
            f"--fit needs the times of single requests; {measured.source} has totals "
            f"only: give requests.csv, or a result of vllm bench serve --save-detailed"
        )
    rows = ended_by(requests, split_s)
    if rows.sum() < _MIN_REQUESTS:
        raise MeasuredError(
            f"--fit needs at least {_MIN_REQUESTS} requests that ended in its part of "
            f"the run (by {split_s:.6g} s); there are {int(rows.sum())}: give a larger "
            "--fit-on"
        )

    def loss(values: Any) -> float:
        named = {
            term.key: term.value_at(float(value))
            for term, value in zip(terms, values, strict=True)
        }
        predicted = predict(named).requests
        assert predicted is not None
        return _squares(predicted, requests, rows, latencies)

    before = _squares_of(predict({}), requests, rows, latencies)
    best = _least(loss, terms)
    values = {
        term.key: float(f"{term.value_at(value):.4g}")
        for term, value in zip(terms, best, strict=True)
    }
    after = _squares_of(predict(values), requests, rows, latencies)
    _refuse_beyond_reason(values)
    return Fit(
        values=values,
        split_s=split_s,
        num_requests=int(rows.sum()),
        error_before_pct=100.0 * before**0.5,
        error_after_pct=100.0 * after**0.5,
        at_bound=tuple(
            term.key for term in terms if term.is_at_bound(values[term.key])
        ),
    )


def _refuse_beyond_reason(values: Mapping[str, float]) -> None:
    """Refuse a host that must stand for something else."""
    host_s = values.get(_HOST_KEY, 0.0)
    if host_s > _MAX_HOST_S:
        raise MeasuredError(
            f"--fit host: the run asks for {1e3 * host_s:.3g} ms a step, and no host "
            f"that was measured takes {1e3 * _MAX_HOST_S:g}; it stands for something "
            "else: a slower link (--fit links, engine.interconnect), eager mode "
            "(engine.enforce_eager), scheduling one step at a time "
            "(engine.async_scheduling), or a warm-up (--warm-up); set that"
        )


def _least(loss: Callable[[Any], float], terms: Sequence[Term]) -> list[float]:
    """Return where `loss` is least within the ranges of `terms`."""
    from scipy.optimize import minimize, minimize_scalar  # noqa: PLC0415  (slow)

    if len(terms) == 1:
        low, high = terms[0].bounds
        places = np.linspace(low, high, _NUM_LOOKS)
        at = int(np.argmin([loss([place]) for place in places]))
        one = minimize_scalar(
            lambda value: loss([value]),
            bounds=(places[max(at - 1, 0)], places[min(at + 1, _NUM_LOOKS - 1)]),
            method="bounded",
            options={"xatol": (high - low) * 1e-4},
        )
        return [float(one.x)]
    # scaled to [0, 1]: a step of the search is as wide in each
    lows = np.array([term.bounds[0] for term in terms])
    spans = np.array([term.bounds[1] for term in terms]) - lows

    def of_shares(shares: NDArray[np.float64]) -> float:
        return loss(lows + spans * shares)

    several = minimize(
        of_shares,
        np.full(len(terms), 0.5),
        method="Powell",  # one term after the other: simplices got stuck at a bound
        bounds=[(0.0, 1.0)] * len(terms),
        options={"xtol": 1e-3, "ftol": 1e-3, "maxfev": 100 * len(terms)},
    )
    found: list[float] = (lows + spans * np.asarray(several.x)).tolist()
    return found


def ended_by(requests: ObservedRequests, split_s: float) -> Any:
    if requests.arrival_s is None:
        raise MeasuredError(
            "--fit needs to know when requests ended, and this measurement has no "
            "arrivals; give a requests.csv"
        )
    ends_s = requests.arrival_s + requests.e2el_s
    return np.nan_to_num(ends_s, nan=np.inf) <= split_s


def _squares_of(
    predicted: Observed,
    requests: ObservedRequests,
    rows: Any,
    latencies: Sequence[str],
) -> float:
    assert predicted.requests is not None
    return _squares(predicted.requests, requests, rows, latencies)


def _squares(
    predicted: ObservedRequests,
    measured: ObservedRequests,
    rows: Any,
    latencies: Sequence[str],
) -> float:
    """Return the mean of squared logarithmic errors of some latencies."""
    found = []
    for name in latencies:
        left, right = getattr(predicted, name)[rows], getattr(measured, name)[rows]
        known = (left > 0.0) & (right > 0.0)
        if known.any():
            found.append(float(np.mean(np.log(left[known] / right[known]) ** 2)))
    return added(found) / max(len(found), 1)
