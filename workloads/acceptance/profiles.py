"""Published acceptance: mean tokens a step, by model, drafter and number of drafts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING

from workloads._checks import one_of
from workloads.errors import WorkloadError
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """Published acceptance of one model and drafter.

    Parameters
    ----------
    name
        Its name in configurations.
    model, gpu, method
        Of the measurement; the method in vLLM's name.
    measured_on
        Data set and sampling.
    source
        Repository, commit, run and licence.
    lengths
        By mode, ``thinking`` or ``plain``: mean tokens of a step, that of the target
        model included, with one draft, with two, and so on.
    """

    name: str
    model: str
    gpu: str
    method: str
    measured_on: str
    source: str
    lengths: Mapping[str, tuple[float, ...]]


@cache
def acceptance_profiles() -> Mapping[str, AcceptanceProfile]:
    """Return the packaged profiles by name."""
    file = resources.files("workloads.acceptance").joinpath("profiles.json")
    facts = json.loads(file.read_text(encoding="utf-8"))
    source = "{repository}, commit {commit}, {licence}".format(**facts["source"])
    return {
        name: AcceptanceProfile(
            name=name,
            model=one["model"],
            gpu=one["gpu"],
            method=one["method"],
            measured_on=one["measured_on"],
            source=f"{source}, run {one['run']}",
            lengths={mode: tuple(each) for mode, each in one["lengths"].items()},
        )
        for name, one in facts["profiles"].items()
    }


@dataclass(frozen=True, slots=True)
class ProfileRates:
    """Rates of a published profile; their mean tokens a step are those published.

    The difference that a draft makes to the mean is the rate at which it is accepted.
    Where noise lets the differences rise, neighbours get their mean; where more drafts
    made steps shorter, all rates are scaled to the mean published for so many.

    Parameters
    ----------
    name
        Of `acceptance_profiles`.
    thinking
        Whether the model reasons before it answers; None for the mode that is known,
        thinking if both are.

    Raises
    ------
    WorkloadError
        If there is no such profile, or it knows no such mode or number of drafts.
    """

    name: str
    thinking: bool | None = None

    def __post_init__(self) -> None:
        one_of("name", self.name, list(acceptance_profiles()))
        self.lengths()

    def lengths(self) -> tuple[float, ...]:
        """Return the published means of the mode, by number of drafts from 1 on."""
        known = acceptance_profiles()[self.name].lengths
        if self.thinking is None:
            return known.get("thinking") or known["plain"]
        mode = "thinking" if self.thinking else "plain"
        if mode not in known:
            raise WorkloadError(
                f"thinking must be left out or true: {self.name} was not published "
                f"without; got false; choose another profile"
            )
        return known[mode]

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        del slo_class
        lengths = self.lengths()
        if num_speculative_tokens > len(lengths):
            raise WorkloadError(
                f"{self.name} was published of up to {len(lengths)} drafts; got "
                f"num_speculative_tokens {num_speculative_tokens}; draft less, or give "
                f"rates of your own"
            )
        means = (1.0, *lengths[:num_speculative_tokens])
        gains = [after - before for before, after in pairwise(means)]
        rates = [max(rate, 0.0) for rate in _never_rising(gains)]
        scale = min((means[-1] - 1.0) / added(rates), 1.0)
        return tuple(rate * scale for rate in rates)


def _never_rising(values: Sequence[float]) -> list[float]:
    """Return the nearest values that never rise (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before, num_before = pools.pop()
            total, count = total + before, count + num_before
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
