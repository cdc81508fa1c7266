"""Profiles as files: built from plain data, hashed, written whole or not at all."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.costs.measured.profile import (
    MAJOR,
    NAME,
    UNITS,
    canonical_json,
    parse_profile,
    profile_id,
)
from sim.results import output

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.costs.measured.profile import Profile


def op_table(
    operation: str,
    dtype: str,
    axes: Mapping[str, Iterable[Any]],
    p50_s: Iterable[float],
    *,
    variant: str = "default",
    constants: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return one entry of ``ops``: columns of shapes and median seconds."""
    return {
        "operation": operation,
        "variant": variant,
        "dtype": dtype,
        "constants": dict(constants or {}),
        "axes": {key: [int(value) for value in values] for key, values in axes.items()},
        "quantiles": {"p50_s": [float(f"{value:.9g}") for value in p50_s]},
    }


def build_profile(
    kind: str,
    provenance: Mapping[str, Any],
    ops: Sequence[Mapping[str, Any]],
    fit: Mapping[str, Any] | None = None,
    **parts: Any,
) -> Profile:
    """Return a profile with its id, checked as a reader would.

    `kind` is ``measured`` or ``imported``; `parts` are ``steps``, ``interference`` and
    whatever else is to be kept.
    """
    body: dict[str, Any] = {
        "format": f"{NAME}/{MAJOR}",
        "kind": kind,
        "units": UNITS,
        "provenance": {"tool": f"kvsim {version('kvsim')}"} | dict(provenance),
        "ops": list(ops),
        "interference": {},
        "steps": [],
        "fit": dict(fit or {}),
    } | parts
    body["id"] = profile_id(body)
    return parse_profile(canonical_json(body))


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile in canonical JSON; the file appears whole or stays as it was."""
    write_whole(canonical_json(profile.body), Path(path))


def write_whole(text: str, path: Path) -> None:
    """Write a file at once: no reader, and no kill, sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output.write_whole(path, text.encode())
