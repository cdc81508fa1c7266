"""The profile of a finished calibration: tables and provenance, `kvprofile/1`.

No host names, no paths; the id is a hash of everything else.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from calibrate.harness.plan import UNSTABLE
from calibrate.harness.tables import tables
from calibrate.measurement import canonical, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibrate.harness.device import Device
    from calibrate.harness.outcome import Outcome, Settings

FORMAT = "kvprofile/1"
FEWEST_SENTINELS = 3
"""Blocks below which nothing can be said about stability."""


def profile_of(outcome: Outcome, settings: Settings, device: Device) -> dict[str, Any]:
    """Return the profile as plain data.

    Parameters
    ----------
    outcome, settings
        Of the calibration.
    device
        What was timed.
    """
    facts = device.facts()
    physics = device.physics
    rates = {
        "bandwidth_bytes_per_s": physics.memory_bytes_per_s,
        "flops_per_s": physics.flops_per_s,
        "flops_8bit_per_s": physics.flops_8bit_per_s,
        "host_bytes_per_s": physics.host_bytes_per_s,
        "link_bytes_per_s": physics.link_bytes_per_s,
    }
    geometry = settings.geometry
    provenance = {
        **{name: found for name, found in facts.items() if name != "kind"},
        "device": {**rates, **facts["device"], "clocks": _clocks(outcome.clocks)},
        "tool": f"kvsim {_version()}",
        "date": outcome.started,
        "duration_s": outcome.duration_s,
        "preset": settings.preset,
        "seed": settings.seed,
        "model": {name: getattr(geometry, name) for name in geometry.__slots__},
        "backends": outcome.backends,
        "correctness": {
            key: {"error": check.error, "tolerance": check.tolerance}
            for key, check in outcome.checks.items()
            if not check.reason
        },
        "refused": {
            key: check.reason or f"error {check.error:.3g} above {check.tolerance:.3g}"
            for key, check in outcome.checks.items()
            if not check.passed
        },
        "skipped": outcome.skipped,
        "stability": stability(outcome),
    }
    profile = {
        "format": FORMAT,
        "kind": facts["kind"],
        "units": {"size": "byte", "time": "s"},
        "provenance": provenance,
        "ops": tables(outcome.measurements),
        "interference": {"points": outcome.interference},
        "steps": [],
        "fit": {},
    }
    digest = hashlib.sha256(canonical(profile).encode()).hexdigest()
    return profile | {"id": f"sha256:{digest}"}


def _version() -> str:
    """Return the tool's version; run from a folder of sources, it has none."""
    try:
        return version("kvsim")
    except PackageNotFoundError:
        return "not installed"


def stability(outcome: Outcome) -> dict[str, Any]:
    """Return how far the sentinels wandered: p95 over p5, and the verdict.

    `stable` is None where there were too few blocks to tell.
    """
    ratios = {
        name: quantile(sorted(times), 0.95) / quantile(sorted(times), 0.05)
        for name, times in outcome.sentinels.items()
    }
    counts = [len(times) for times in outcome.sentinels.values()]
    known = bool(counts) and min(counts) >= FEWEST_SENTINELS
    return {
        "ratios": ratios,
        "stable": max(ratios.values()) <= UNSTABLE if known else None,
        "threshold": UNSTABLE,
        "num_blocks": max(counts, default=0),
        "unsettled_points": sum(not found.settled for found in outcome.measurements),
    }


def _clocks(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the range of each reading, and every reason to throttle that was seen."""
    ranges: dict[str, Any] = {}
    for name in sorted({name for reading in readings for name in reading}):
        values = [reading[name] for reading in readings if name in reading]
        if all(isinstance(value, int | float) for value in values):
            ranges[name] = [min(values), max(values)]
        else:
            ranges[name] = sorted({str(value) for value in values})
    return ranges
