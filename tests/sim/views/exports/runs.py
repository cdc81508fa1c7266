"""Small runs to be exported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from sim.cli.main import run as kvsim
from tests.sim.studies.sweeps.files import tiny

if TYPE_CHECKING:
    from pathlib import Path


def run(directory: Path, *options: str, num_requests: int = 40, **engine: Any) -> Path:
    """Simulate requests that preempt each other; return where the results are."""
    config = directory / "config.yaml"
    data = tiny(**engine)
    data["workload"]["synthetic"]["num_requests"] = num_requests
    config.write_text(yaml.safe_dump(data))
    out = directory / "out"
    arguments = ["run", str(config), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim([*arguments, *options]) == 0
    return out


def summary_of(results: Path) -> dict[str, Any]:
    """Return the summary."""
    summary: dict[str, Any] = json.loads((results / "summary.json").read_text())
    return summary
