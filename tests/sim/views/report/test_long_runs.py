"""A run of a million steps: its page is no larger than that of an hour."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from sim.views.report import build_page
from sim.views.report.plotly_charts import plotly_script
from tests.sim.views.report.pages import Page

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 1_000_000
MAX_BYTES = 8_000_000
MAX_SCRIPT_BYTES = 5_000_000


def repeated(frame: pd.DataFrame, times: int, span_s: float) -> pd.DataFrame:
    """A table over and over, each time as much later."""
    copies = pd.concat([frame] * times, ignore_index=True)
    shift_s = np.repeat(np.arange(times) * span_s, len(frame))
    for name in frame.columns:
        if name.endswith("_s") and name in (
            "start_s", "time_s", "arrival_s", "first_scheduled_s", "first_token_s",
            "finish_s",
        ):  # fmt: skip
            copies[name] += shift_s
    for name in ("step", "request_id", "for_request_id"):
        if name in frame.columns:
            most = int(frame[name].max()) + 1
            copies[name] += np.repeat(np.arange(times) * most, len(frame))
    return copies


@pytest.mark.slow
def test_a_million_steps_give_a_page_below_eight_megabytes(
    crowded_run: Path, tmp_path: Path
) -> None:
    summary = json.loads((crowded_run / "summary.json").read_text())
    times = -(-NUM_STEPS // summary["num_steps"])
    for name in ("steps", "requests", "preemptions"):
        frame = pd.read_parquet(crowded_run / f"{name}.parquet")
        many = repeated(frame, times, summary["duration"])
        many.to_parquet(tmp_path / f"{name}.parquet", row_group_size=65_536)
    summary |= {
        "num_steps": times * summary["num_steps"],
        "duration": times * summary["duration"],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for name in ("config.yaml", "blocks.json"):
        (tmp_path / name).write_bytes((crowded_run / name).read_bytes())
    text = build_page([tmp_path])
    assert len(text.encode()) < MAX_BYTES
    script = plotly_script()
    assert script is None or len(script.encode()) < MAX_SCRIPT_BYTES
    page = Page(text)
    assert dict(page.data())["num_steps"] >= NUM_STEPS
    number = len(pd.read_parquet(tmp_path / "preemptions.parquet"))
    assert f"2,000 of {number:,} preemptions are marked" in page.visible
    assert len(build_page([tmp_path], is_static=True).encode()) < MAX_SCRIPT_BYTES
