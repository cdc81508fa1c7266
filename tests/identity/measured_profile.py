"""A profile that has every optional table, for configurations that are printed."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from sim.hardware.models.bundled import load_model
from tests.sim.costs.test_chunks import mixed_table, past_table
from tests.sim.costs.test_measured import entry, write
from tests.sim.costs.test_measured_rest import FIT, PARTS


@cache
def measured_profile(model: str) -> str:
    """Return the path of a made-up profile of a model on an H200.

    The file stays, under a name that says what is in it: a configuration that names it
    can be run again.
    """
    tables = entry(
        load_model(model), **PARTS, prefill_past=past_table(), mixed=mixed_table()
    )
    folder = Path(tempfile.gettempdir())
    handle, name = tempfile.mkstemp(suffix=".json", dir=folder)
    os.close(handle)
    partial = Path(name)
    write(partial, tables, **FIT)
    size = partial.stat().st_size
    path = folder / f"kvsim-identity-{model.rpartition('/')[2]}-{size}.json"
    return str(partial.replace(path))
