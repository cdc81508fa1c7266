"""A measurement as the workload of a simulation, and where the two differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sim.studies.validation.observed import MeasuredError
from workloads.requests.chains import has_chains

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sim.results.run import Results
    from sim.studies.validation.observed import Observed, ObservedRequests
    from workloads.spec import RequestSpec


OVERTAKES_S: Final = 0.1
"""Requests that are sent closer together may come in another order."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Requests to simulate, and which line of the measurement each one is."""

    specs: tuple[RequestSpec, ...]
    lines: NDArray[np.int64]
    """(requests,) place in the measurement of each request of `specs`."""
    notes: tuple[str, ...]
    """The source of the arrivals, and differences, a sentence each."""


def inputs_of(specs: Sequence[RequestSpec], observed: ObservedRequests) -> Inputs:
    """Return the workload with the arrivals and output lengths that were measured.

    Prompt identity is the workload's. A request that was not served keeps the output
    length that the workload gives it.
    """
    specs, num_overtaken = _as_sent(specs, observed)
    _check_same(specs, observed)
    lines = np.arange(len(specs))
    notes = ["arrivals are the workload's: the measurement has none"]
    found = list(specs)
    if observed.arrival_s is not None:
        if has_chains(specs):
            raise MeasuredError(
                "the workload's requests wait for each other's answers, so their "
                "arrivals cannot be given; leave sessions out, or the arrivals"
            )
        lines = np.argsort(observed.arrival_s, kind="stable")
        notes = ["arrivals are those that were measured"]
    served = ~np.isnan(observed.e2el_s)
    changed = 0
    for place, line in enumerate(lines.tolist()):
        spec = specs[line]
        arrival_s = spec.arrival_s
        if observed.arrival_s is not None:
            arrival_s = float(observed.arrival_s[line])
        num_tokens = spec.num_output_tokens
        if served[line]:
            num_tokens = int(observed.num_output_tokens[line])
            changed += num_tokens != spec.num_output_tokens
        found[place] = spec._replace(
            request_id=place, arrival_s=arrival_s, num_output_tokens=num_tokens
        )
    if num_overtaken:
        notes.append(
            f"{num_overtaken:,} requests came to the engine before one that was sent "
            f"less than {OVERTAKES_S:g} s earlier: they are matched by their prompts"
        )
    if changed:
        notes.append(
            f"{changed:,} requests got the output length that was measured, which is "
            "not the workload's"
        )
    return Inputs(tuple(found), lines, tuple(notes))


def _as_sent(
    specs: Sequence[RequestSpec], observed: ObservedRequests
) -> tuple[Sequence[RequestSpec], int]:
    """Return requests in the order of the measurement, and how many others overtook.

    A workload that a server has recorded has them in the order in which they came.
    """
    if observed.arrival_s is None or len(specs) != observed.num_requests:
        return specs, 0
    left, found, num_overtaken = list(reversed(specs)), [], 0
    for num_tokens in observed.num_prompt_tokens.tolist():
        most_s = left[-1].arrival_s + OVERTAKES_S
        place = len(left) - 1
        while left[place].num_prompt_tokens != num_tokens:
            place -= 1
            if place < 0 or left[place].arrival_s > most_s:
                return specs, 0
        num_overtaken += place < len(left) - 1
        found.append(left.pop(place))
    return found, num_overtaken


def _check_same(specs: Sequence[RequestSpec], observed: ObservedRequests) -> None:
    if len(specs) != observed.num_requests:
        raise MeasuredError(
            f"the workload has {len(specs):,} requests, the measurement "
            f"{observed.num_requests:,}; give both of the same run "
            "(workload.trace.limit cuts a trace)"
        )
    for i, (spec, measured) in enumerate(
        zip(specs, observed.num_prompt_tokens.tolist(), strict=True)
    ):
        num_tokens = spec.num_prompt_tokens
        if num_tokens != measured:
            raise MeasuredError(
                f"request {i + 1} has a prompt of {num_tokens:,} tokens in the "
                f"workload and of {measured:,} in the measurement; give both of the "
                "same run, in the same order"
            )
        if spec.best_of > 1 or spec.beam_width > 1:
            raise MeasuredError(
                f"request {i + 1} asks for several sequences; such runs cannot be "
                "compared yet"
            )


def notes_of(
    results: Results, predicted: Observed, measured: Observed
) -> tuple[str, ...]:
    """Return where the two sides do not speak of the same, a sentence each."""
    notes = []
    if measured.itl_s is None and not any("itl" in key for key in measured.numbers):
        notes.append(
            "ITL was not measured: the source has no gaps between tokens (the mean gap "
            "of a request is its TPOT)"
        )
    series = measured.series
    if series is not None and series.kv_cache_usage is None:
        notes.append(
            "KV usage was not recorded (kv_cache_pct is missing, or 0 throughout): "
            "where it matters it is the simulation's"
        )
    ours, theirs = predicted.requests, measured.requests
    if results.summary["stalled"]:
        notes.append("the simulation stalled: what it did not serve is left out")
    if ours is None or theirs is None:
        return tuple(notes)
    failed = np.isnan(theirs.e2el_s)
    if failed.any():
        notes.append(
            f"{int(failed.sum()):,} requests were not served by the engine: they are "
            "simulated with the workload's output length, and judged on neither side"
        )
    refused = np.isnan(ours.e2el_s) & ~failed
    if refused.any():
        notes.append(
            f"{int(refused.sum()):,} requests that the engine served are not served in "
            "the simulation, and judged on neither side: is the number of blocks, or "
            "max_model_len, the engine's?"
        )
    shorter = (ours.num_output_tokens < theirs.num_output_tokens) & ~failed & ~refused
    if shorter.any():
        notes.append(
            f"{int(shorter.sum()):,} requests got fewer tokens in the simulation than "
            "the engine gave: max_model_len "
            f"{results.summary['max_model_len']:,} cut them"
        )
    return tuple(notes)
