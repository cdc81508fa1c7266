"""Acceptance of drafts, drawn by request and position."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from workloads._checks import between
from workloads.acceptance.rates import RequestCounts
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.acceptance.base import AcceptanceRates
    from workloads.spec import RequestSpec

_MASK: Final = 2**64 - 1
_STEP: Final = 0x9E3779B97F4A7C15
_UNIT: Final = 2.0**-53
_Known = tuple[int, tuple[float, ...], "Sequence[int]"]
"""Of a request: its key in the stream, its rates, rising; or drafts left, by output."""


class DrawnAcceptance:
    """An `Acceptance` by rates: one number is drawn for each run of drafts.

    ::

        rates        0.8    0.6    0.5      unconditional, never rising
        drawn 0.55   yes    yes    no       2 of 3 are accepted

    With more drafts a step accepts at least as many, whatever the number of them, and
    with higher rates too: runs that differ in either see the same luck.

    Nothing is drawn for requests whose counts were recorded (`RequestCounts`)::

        recorded     3              0    1         one number a verification
        outputs      1   2   3   4  5    6   7     behind that of the prompt
        accepted     3   2   1   0  0    1   0     at most, as the text is known so far

    Behind the last of them they begin anew.

    Parameters
    ----------
    rates
        How likely drafts are accepted.
    specs
        The traffic, by request id.
    num_speculative_tokens
        Drafts of a step.
    proposal_rate
        Share of steps for which drafts are found; a drafter that is a model finds them
        always.
    verifies_none
        Whether a step verifies as many tokens where no drafts are found, in vain:
        scheduled ahead, it does not know yet.
    seed
        Seed of the streams ``acceptance`` and ``proposals``.

    Raises
    ------
    WorkloadError
        If nothing is known of so many drafts, or of a class of requests; if rates
        break their contract; if `proposal_rate` is out of range.
    """

    def __init__(
        self,
        rates: AcceptanceRates,
        specs: Sequence[RequestSpec],
        num_speculative_tokens: int,
        *,
        proposal_rate: float = 1.0,
        verifies_none: bool = False,
        seed: int = 0,
    ) -> None:
        self._source = rates
        self._specs = specs
        self._most = num_speculative_tokens
        remedy = "give a share of steps, such as 0.6"
        self._proposal_rate = between("proposal_rate", proposal_rate, 0, 1, remedy)
        self._verifies_none = verifies_none
        self._by_class: dict[str, tuple[float, ...]] = {}
        streams = Streams(seed)
        self._key, self._proposal_key = (
            int(streams.generator(name).integers(2**63))
            for name in ("acceptance", "proposals")
        )
        self._takes_counts = isinstance(rates, RequestCounts)
        self._known: dict[int, _Known] = {}
        if len(specs):
            self._learn(0)

    def num_proposed(self, request_index: int, position: int, most: int) -> int:
        return most if self._finds(request_index, position) else 0

    def _finds(self, request_index: int, position: int) -> bool:
        if self._proposal_rate >= 1.0:
            return True
        u = _uniform(self._proposal_key, request_index, position)
        return u < self._proposal_rate

    def num_accepted(self, request_index: int, position: int, num_drafts: int) -> int:
        if self._verifies_none and not self._finds(request_index, position):
            return 0
        known = self._known.get(request_index)
        if known is None:
            known = self._known[request_index] = self._learn(request_index)
        key, rising, left = known
        if left:
            return min(left[(position - 1) % len(left)], num_drafts)
        u = (_mixed(key + position) >> 11) * _UNIT
        return min(self._most - bisect_right(rising, u), num_drafts)

    def _learn(self, request_index: int) -> _Known:
        """Return the key of a request, and its rates or its recorded drafts."""
        spec = self._specs[request_index]
        key = _mixed(self._key + request_index)
        if self._takes_counts and spec.accepted_drafts:
            counts = spec.accepted_drafts
            return key, (), [left for n in counts for left in range(n, -1, -1)]
        rates = self._by_class.get(spec.slo_class)
        if rates is None:
            rates = self._source.rates(self._most, spec.slo_class)
            _check(rates, self._most, type(self._source).__name__)
            self._by_class[spec.slo_class] = rates
        return key, rates[::-1], ()


def _check(rates: tuple[float, ...], most: int, owner: str) -> None:
    """Hold rates to their contract: users bring their own."""
    falls = all(a >= b for a, b in zip((1.0, *rates), (*rates, 0.0), strict=True))
    if len(rates) != most or not falls:
        raise WorkloadError(
            f"acceptance rates must be {most} in [0, 1] that never rise; got "
            f"{rates}; mend {owner}.rates"
        )


def _uniform(key: int, request_index: int, position: int) -> float:
    """Return the number in [0, 1) of a request's position in a stream.

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014
    (SplitMix64), once for the request and once for its position.
    """
    return (_mixed(_mixed(key + request_index) + position) >> 11) * _UNIT


def _mixed(number: int) -> int:
    number = number * _STEP & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
