"""Kinds of acceptance rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workloads._checks import (
    MAX_SPECULATIVE_TOKENS,
    between,
    check_role,
    numbers,
    whole,
)
from workloads.acceptance.base import AcceptanceRates
from workloads.errors import WorkloadError
from workloads.sums import added


def cut(rates: Sequence[float], num_speculative_tokens: int) -> tuple[float, ...]:
    """Return the rates of the first drafts; refuse more drafts than there are."""
    if num_speculative_tokens > len(rates):
        raise WorkloadError(
            f"acceptance must be known of every draft; got rates of {len(rates)} and "
            f"num_speculative_tokens {num_speculative_tokens}; give more rates, or "
            f"draft less"
        )
    return tuple(rates[:num_speculative_tokens])


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """Each draft is accepted with the same probability if those before it were.

    Of `k` drafts a step yields ``(1 - rate^(k+1)) / (1 - rate)`` tokens on average.
    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding,
    ICML 2023, equation 1.

    Parameters
    ----------
    rate
        The probability, 0 to 1.

    Raises
    ------
    WorkloadError
        If it is out of range.
    """

    rate: float

    def __post_init__(self) -> None:
        between("rate", self.rate, 0, 1, "give a probability, such as 0.7")

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        del slo_class
        return tuple(self.rate**i for i in range(1, num_speculative_tokens + 1))


@dataclass(frozen=True, slots=True)
class LengthRates:
    """A constant rate that gives a mean number of tokens a step.

    Parameters
    ----------
    length
        Mean tokens of a step, that of the target model included.
    num_speculative_tokens
        Drafts of a step for which that was measured.

    Raises
    ------
    WorkloadError
        If the length is not between 1 and the drafts and one.
    """

    length: float
    num_speculative_tokens: int

    def __post_init__(self) -> None:
        remedy = "give the drafts of a step, such as 3"
        most = whole(
            "num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_SPECULATIVE_TOKENS,
            remedy,
        )
        remedy = "give the tokens of a step, such as 2.5"
        between("length", self.length, 1, most + 1, remedy)

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        return ConstantRate(self._rate()).rates(num_speculative_tokens, slo_class)

    def _rate(self) -> float:
        low, high = 0.0, 1.0
        while low < (rate := (low + high) / 2) < high:
            length = added(rate**i for i in range(self.num_speculative_tokens + 1))
            low, high = (rate, high) if length < self.length else (low, rate)
        return high


@dataclass(frozen=True, slots=True)
class PositionRates:
    """A rate for each draft of a step.

    Parameters
    ----------
    rates_per_position
        Probabilities that a draft and all before it are accepted: vLLM's
        ``synthetic_acceptance_rates``, and in its log ``Per-position
        acceptance rate``. 0 to 1, never rising. Fewer drafts use the first ones.

    Raises
    ------
    WorkloadError
        If one is out of range, or above the one before.
    """

    rates_per_position: Sequence[float]

    def __post_init__(self) -> None:
        name, remedy = "rates_per_position", "give probabilities, such as [0.8, 0.6]"
        given = numbers(name, self.rates_per_position, remedy)
        if not given:
            raise WorkloadError(f"{name} must hold a rate at least; {remedy}")
        for index, rate in enumerate(given):
            between(f"{name}[{index}]", rate, 0, 1, remedy)
            if index and rate > given[index - 1]:
                raise WorkloadError(
                    f"{name} must never rise, as all drafts before one are accepted "
                    f"too; got {rate:g} behind {given[index - 1]:g}; multiply rates "
                    f"that hold if those before were accepted"
                )

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        del slo_class
        return cut(self.rates_per_position, num_speculative_tokens)


@dataclass(frozen=True, slots=True)
class RecordedRates:
    """Rates from a real engine's counters, under their own names.

    Parameters
    ----------
    num_drafts
        Runs of drafts that were verified: ``vllm:spec_decode_num_drafts``.
    num_accepted_tokens_per_pos
        Of these, how many had their first draft accepted, their second, and so on:
        ``vllm:spec_decode_num_accepted_tokens_per_pos``.

    Raises
    ------
    WorkloadError
        If they are no such counts.
    """

    num_drafts: int
    num_accepted_tokens_per_pos: Sequence[int]

    def __post_init__(self) -> None:
        remedy = "give the engine's counters, or their differences over a while"
        whole("num_drafts", self.num_drafts, 1, 10**18, remedy)
        name, most = "num_accepted_tokens_per_pos", self.num_drafts
        for index, count in enumerate(numbers(name, self._counts, remedy)):
            whole(f"{name}[{index}]", self._counts[index], 0, most, remedy)
            most = int(count)
        if not self._counts:
            raise WorkloadError(f"{name} must hold a count at least; {remedy}")

    @property
    def _counts(self) -> Sequence[int]:
        return self.num_accepted_tokens_per_pos

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        del slo_class
        rates = [count / self.num_drafts for count in self._counts]
        return cut(rates, num_speculative_tokens)


@dataclass(frozen=True, slots=True)
class ClassRates:
    """Rates of each class of requests: code is easier to foretell than prose.

    Parameters
    ----------
    classes
        By `RequestSpec.slo_class`.
    other
        Of requests of any other class; None refuses them.

    Raises
    ------
    WorkloadError
        If there is no class.
    """

    classes: Mapping[str, AcceptanceRates]
    other: AcceptanceRates | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.classes, Mapping) or not self.classes:
            raise WorkloadError(
                f"classes must be a table of classes; got {self.classes!r}; give one "
                f"such as {{chat: {{kind: constant, rate: 0.7}}}}"
            )
        method = "rates(self, num_speculative_tokens, slo_class)"
        for name, each in self.classes.items():
            check_role(f"classes.{name}", each, AcceptanceRates, method)

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        found = self.classes.get(slo_class, self.other)
        if found is None:
            raise WorkloadError(
                f"acceptance must be known of every class; got "
                f"{', '.join(self.classes)} and a request of slo_class {slo_class!r}; "
                f"name that too, or give other"
            )
        return found.rates(num_speculative_tokens, slo_class)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Drafts that a real engine accepted, a number for each verification of a request.

    The counts are `RequestSpec.accepted_drafts`; see `DrawnAcceptance`.

    Parameters
    ----------
    other
        Rates of requests without counts; None refuses them.

    Raises
    ------
    WorkloadError
        If `other` gives no rates.
    """

    other: AcceptanceRates | None = None

    def __post_init__(self) -> None:
        if self.other is not None:
            method = "rates(self, num_speculative_tokens, slo_class)"
            check_role("other", self.other, AcceptanceRates, method)

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        if self.other is None:
            raise WorkloadError(
                "by_request takes accepted_drafts of every request; got one without; "
                "record it in the trace (kind kvsim), or give other"
            )
        return self.other.rates(num_speculative_tokens, slo_class)
