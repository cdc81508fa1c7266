"""The texts of a recorded run: its workload again, from the configuration beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from calibrate.replay.tokens import MadeUpTexts, Texts, WorkloadTexts
from sim.config.tables import load_config
from sim.simulation.workload import make_workload

if TYPE_CHECKING:
    from pathlib import Path


def texts_beside(place: Path) -> Texts:
    """Return what the requests of a run say.

    Parameters
    ----------
    place
        The results of a run; made-up texts where it is the schedule alone.

    Raises
    ------
    UserError, WorkloadError
        When the workload cannot be made again: a trace that has moved, say.
    """
    config_path, requests_path = place / "config.yaml", place / "requests.parquet"
    if not (config_path.is_file() and requests_path.is_file()):
        return MadeUpTexts()
    config = load_config(config_path)
    specs = {
        spec.request_id: spec
        for spec in make_workload(config.workload, config.seed).requests()
    }
    columns = pd.read_parquet(requests_path, columns=["request_id", "parent_id"])
    pairs = zip(columns["request_id"], columns["parent_id"], strict=True)
    return WorkloadTexts({str(request): specs[parent] for request, parent in pairs})
