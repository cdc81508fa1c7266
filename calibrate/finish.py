"""The end of a calibration: its points fitted, so that a run can use the profile."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from calibrate.tabulate import with_tables
from calibrate.writing import write_profile
from sim.costs.profile import DRY_RUN, read_profile
from sim.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from sim.hardware.models.architecture import ModelArchitecture

_NEEDED = ("decode_attention", "prefill_attention", "gemm")
"""Without points of these no step can be priced."""


def fit_calibration(out: Path, model: ModelArchitecture, quiet: bool) -> bool:
    """Fit a profile in its place, and return whether it holds tables now.

    The points are on the disk before: whatever goes wrong here costs only the tables,
    and a line says how to make them.

    Parameters
    ----------
    out
        The profile as measured; replaced by one with tables for `model`.
    model
        Whose shapes were timed.
    quiet
        Say nothing where it went well.
    """
    measured = read_profile(out)
    missing = [name for name in _NEEDED if not measured.tables(name)]
    if missing:
        return _told(
            f"no points of {missing[0]}: no step can be priced; time all --ops"
        )
    try:
        fitted = with_tables(measured, measured, model)
    except UserError as error:
        command = (
            f"kvsim profile fit {out} --model {model.name} --out {out} --overwrite"
        )
        return _told(f"not fitted: {error}; then {command}")
    write_profile(fitted, out)
    if fitted.kind == DRY_RUN:
        return _told("a dry run: the tables are of made-up times, to be looked at only")
    if not quiet:
        host = "measured steps" if "host" in fitted.fit else "the datasheet's default"
        print(f"fitted for {model.name}: cost: {{kind: measured, profile: {out}}}")
        print(f"host time of a step: {host}; errors: kvsim profile fit {out}")
    return True


def _told(reason: str) -> bool:
    print(f"kvsim: {reason}", file=sys.stderr)
    return False
