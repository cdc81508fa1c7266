"""The folder of a sweep: its subject, and whether it can go on."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import yaml

from sim.errors import OutputError
from sim.results.output import ResultFiles, output_directory, write_json, write_text
from sim.results.summary.provenance import versions
from sim.studies.sweeps.supplies import digests, named_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sim.studies.sweeps.job import Job

FORMAT = "kvsim-sweep/1"

RUNS = "runs"
"""Folder of the dataset."""

_IDENTITY, SPEC = "sweep.json", "sweep.yaml"

SWEEP_FILES = ResultFiles(
    "a sweep", _IDENTITY, frozenset({_IDENTITY, SPEC, RUNS, "run.json"})
)


def identity(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the facts that must be equal to go on: runs, files, packages."""
    digest = sha256()
    paths: set[str] = set()
    for job in jobs:
        text = json.dumps([job.index, dict(job.overrides), dict(job.config)])
        digest.update(text.encode())
        paths.update(named_files(job.config))
    return {
        "format": FORMAT,
        "num_runs": len(jobs),
        "runs_sha256": digest.hexdigest(),
        "files_sha256": digests(paths),
        "versions": versions(),
    }


def begin(
    directory: Path,
    given: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Make the folder of a new sweep."""
    with output_directory(directory, overwrite=overwrite, files=SWEEP_FILES) as new:
        write_text(new / SPEC, yaml.safe_dump(dict(given), sort_keys=False))
        write_json(new / _IDENTITY, facts)
        (new / RUNS).mkdir()


def check_same(directory: Path, facts: Mapping[str, Any]) -> None:
    """Refuse to go on with a sweep that is not this one."""
    try:
        found = json.loads((directory / _IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not (directory / RUNS).is_dir():
        raise OutputError(
            f"there is no sweep to resume in '{directory}'; leave out --resume, or "
            f"give its --out"
        )
    if difference := _difference(found, json.loads(json.dumps(facts))):
        raise OutputError(
            f"'{directory}' cannot be resumed: {difference}, or choose another --out"
        )


def _difference(found: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    """Return the fact that has changed and how to mend it, or None."""
    for name, package in facts["versions"].items():
        before = found.get("versions", {}).get(name)
        if before != package:
            return f"it began with {name} {before}, this is {package}; use {before}"
    files = found.get("files_sha256", {})
    for path, digest in facts["files_sha256"].items():
        if files.get(path, digest) != digest:
            return f"'{path}' has changed since it began; put it back"
    if found != facts:
        return (
            f"it holds another sweep, of {found.get('num_runs', 0):,} runs, or this "
            f"one has changed; put it back"
        )
    return None
