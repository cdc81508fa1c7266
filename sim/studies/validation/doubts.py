"""What a reader should know of a comparison before he believes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sim.results.run import Results
    from sim.studies.validation.observed import Observed


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
