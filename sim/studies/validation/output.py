"""A validation on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.results.output import ResultFiles, write_json, write_text
from sim.results.schema import OF_REQUESTS

if TYPE_CHECKING:
    from pathlib import Path

    from sim.studies.validation.run import Validation

VALIDATION_FILES: Final = ResultFiles(
    "a validation",
    "validation.json",
    frozenset({"config.yaml", "validation.json", "requests.csv", "figures"}),
)
"""What the report of ``kvsim validate`` holds."""


def write_validation(validation: Validation, directory: Path) -> dict[str, Any]:
    """Write ``validation.json``, ``requests.csv``, ``config.yaml``; return the first.

    ``config.yaml`` is the configuration that was simulated, with what was fitted;
    ``requests.csv`` has both sides of every request, in seconds.
    """
    report = validation.to_dict()
    write_json(directory / "validation.json", report)
    write_text(directory / "config.yaml", validation.results.config.to_yaml())
    ours, theirs = validation.predicted.requests, validation.measured.requests
    if ours is not None and theirs is not None:
        import pandas as pd  # noqa: PLC0415  (slow to import; the command line waits)

        columns: dict[str, Any] = {"index": np.arange(theirs.num_requests)}
        if theirs.arrival_s is not None:
            columns["arrival_s"] = theirs.arrival_s
        columns["prompt_tokens"] = theirs.num_prompt_tokens
        columns["output_tokens"] = theirs.num_output_tokens
        for name in (each.column for each in OF_REQUESTS):
            columns[f"measured_{name}"] = getattr(theirs, name)
            columns[f"predicted_{name}"] = getattr(ours, name)
        if validation.usage is not None:
            columns["kv_cache_usage"] = validation.usage["e2el"]
        if validation.judged is not None:
            columns["judged"] = validation.judged
        text = pd.DataFrame(columns).to_csv(index=False, lineterminator="\n")
        write_text(directory / "requests.csv", text)
    return report
