"""Profiles as a calibration on a GPU leaves them, with the times of the dry run."""

import functools
import tempfile
from pathlib import Path

from calibrate.harness.dry_run import DryRunDevice
from sim.costs.measured.profile import canonical_json, parse_profile
from tests.calibrate.runs import LLAMA, calibrated, settings


class SeemingH200(DryRunDevice):
    """Says that it measured, on an H200 as its driver names it."""

    def facts(self):
        facts = super().facts()
        device = facts["device"] | {
            "name": "NVIDIA H200",
            "memory_bytes": 150_000_000_000,
        }
        return facts | {"kind": "measured", "device": device}


@functools.cache
def calibration(preset="default", model=LLAMA):
    """The profile of a calibration before it is fitted."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        asked = settings(preset, model=model)
        body = calibrated(checkpoint, asked, SeemingH200())
    return parse_profile(canonical_json(body))
