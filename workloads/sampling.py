"""How requests sample: parallel samples, beams and priorities, drawn per request.

Traces and length distributions say when requests come and how long they are; this says
what else a request asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from workloads._checks import MAX_TOKENS, between, whole
from workloads.errors import WorkloadError
from workloads.streams import Streams

if TYPE_CHECKING:
    from workloads.spec import RequestSpec
    from workloads.workload import Workload

Shares = int | Mapping[int, float]
"""One value for all requests, or from a value to the share of requests that have it."""

MAX_WIDTH = 256
"""Most samples or beams of a prompt."""
_MAX_PRIORITY = 10**9


@dataclass(frozen=True, slots=True)
class SampledWorkload:
    """A workload whose requests ask for samples, beams or priorities.

    Each of the three has a random stream of its own, so changing one changes nothing
    else.

    Parameters
    ----------
    workload
        Arrivals, lengths and identity.
    best_of
        Samples of a prompt. All have the request's output length.
    beam_width
        Beams, of requests that draw more than 1; those have no parallel samples.
    beam_switch_share
        Share of a beam's steps in which another beam's continuation takes its place:
        0 for beams that never meet again, 1 for a new choice at every step; rounded to
        whole per cent.
    priority
        Smaller is more urgent.
    max_tokens
        Longest output that clients ask for, where the workload's requests state none.
        An engine may count on it, as it may not on the output's true length.
    seed
        Seed of the streams.

    Raises
    ------
    WorkloadError
        If a value is out of range, or shares do not add up to 1.
    """

    workload: Workload
    best_of: Shares = 1
    beam_width: Shares = 1
    beam_switch_share: float = 0.35
    priority: Shares = 0
    max_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_shares("best_of", self.best_of, 1, MAX_WIDTH)
        _check_shares("beam_width", self.beam_width, 1, MAX_WIDTH)
        _check_shares("priority", self.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
        remedy = "give a share of steps, such as 0.35"
        between("beam_switch_share", self.beam_switch_share, 0, 1, remedy)
        if self.max_tokens is not None:
            remedy = "give a number of tokens, or leave it out for no limit"
            whole("max_tokens", self.max_tokens, 1, MAX_TOKENS, remedy)
        Streams(self.seed)

    def requests(self) -> list[RequestSpec]:
        """Return the requests; see `workloads.workload.Workload.requests`."""
        streams = Streams(self.seed)
        requests = self.workload.requests()
        drawn = (
            _draw(shares, streams.generator(name), len(requests))
            for name, shares in (
                ("best_of", self.best_of),
                ("beam_width", self.beam_width),
                ("priority", self.priority),
            )
        )
        return [
            replace(
                request,
                best_of=1 if beam_width > 1 else best_of,
                beam_width=beam_width,
                beam_switch_share=self.beam_switch_share if beam_width > 1 else 0.0,
                priority=priority,
                max_tokens=self.max_tokens
                if request.max_tokens is None
                else request.max_tokens,
            )
            for request, best_of, beam_width, priority in zip(
                requests, *drawn, strict=True
            )
        ]


def _draw(shares: Shares, rng: np.random.Generator, num_requests: int) -> list[int]:
    """Draw a value for each request; a longer workload begins with the shorter."""
    if isinstance(shares, int):
        return [shares] * num_requests
    values = np.array(list(shares), dtype=np.int64)
    ends = np.cumsum(list(shares.values()))
    u = rng.random(num_requests)
    drawn: list[int] = values[
        np.minimum(np.searchsorted(ends, u, side="right"), len(values) - 1)
    ].tolist()
    return drawn


def _check_shares(name: str, shares: Shares, low: int, high: int) -> None:
    remedy = f"give one number, or shares such as {{{max(low, 1)}: 0.9, 4: 0.1}}"
    if not isinstance(shares, Mapping):
        whole(name, shares, low, high, remedy)
        return
    for value, share in shares.items():
        whole(name, value, low, high, remedy)
        between(f"{name}: the share of {value}", share, 0, 1, remedy)
    total = math.fsum(shares.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise WorkloadError(f"{name}: shares must add up to 1, got {total:g}; {remedy}")
