"""The slowest requests, and how long the preempted among them waited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from sim.scheduler.log.files import read_log
from sim.views.report.sections.waterfall import NUM_SLOWEST, SCHEDULE_FILE, resumed_s
from tests.sim.views.report.pages import page_of

if TYPE_CHECKING:
    from pathlib import Path

Resumed = dict[tuple[int, int], float]


def by_reading_everything(directory: Path) -> Resumed:
    """When each victim is scheduled again, from whole lines of the schedule."""
    lines = list(read_log(directory / SCHEDULE_FILE))
    found: Resumed = {}
    table = pd.read_parquet(directory / "preemptions.parquet")
    for row in table.itertuples():
        for line in lines[row.step + 1 :]:
            if str(row.request_id) in {entry[0] for entry in line["sched"]}:
                found[row.request_id, row.step] = line["start_s"]
                break
    return found


@pytest.mark.parametrize("which", ["crowded_run", "swapping_run"])
def test_resumed_is_the_next_step_that_computes_a_request(
    which: str, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(which)
    table = pd.read_parquet(directory / "preemptions.parquet")
    steps = table.groupby("request_id")["step"].apply(list).to_dict()
    found = resumed_s(directory / SCHEDULE_FILE, steps)
    assert found == by_reading_everything(directory)
    assert len(found) == len(table)  # all were served in the end
    times = {(r.request_id, r.step): r.time_s for r in table.itertuples()}
    assert all(end_s > times[key] for key, end_s in found.items())


def test_phases_of_each_request_fill_its_latency(crowded_run: Path) -> None:
    spec = page_of(crowded_run).figures["slowest-requests"]
    requests = pd.read_parquet(crowded_run / "requests.parquet")
    slowest = requests.sort_values("e2el_s", ascending=False)[:NUM_SLOWEST]
    bars = {t["name"]: t for t in spec["data"] if t["type"] == "bar"}
    phases = [bars[name] for name in ("waiting", "prefill", "decode")]
    total_s = sum(np.array(bar["x"]) for bar in phases)
    np.testing.assert_allclose(total_s, slowest["e2el_s"], rtol=1e-4)
    assert phases[0]["base"] == [0] * NUM_SLOWEST
    ends = np.array(phases[0]["base"]) + np.array(phases[0]["x"])
    np.testing.assert_allclose(ends, phases[1]["base"], rtol=1e-4, atol=1e-6)


def test_preempted_spans_lie_within_their_requests(crowded_run: Path) -> None:
    spec = page_of(crowded_run).figures["slowest-requests"]
    bars = {t["name"]: t for t in spec["data"] if t["type"] == "bar"}
    spans, decode = bars["preempted"], bars["decode"]
    assert len(spans["x"]) > 10
    for begin, length, line in zip(spans["base"], spans["x"], spans["y"], strict=True):
        assert begin >= 0
        assert begin + length <= decode["base"][line] + decode["x"][line] + 1e-3


def test_without_a_schedule_it_is_said_how_to_get_one(plain_run: Path) -> None:
    page = page_of(plain_run)
    names = {trace["name"] for trace in page.figures["slowest-requests"]["data"]}
    assert "preempted here" in names
    assert "preempted" not in names
    assert "--record schedule" in page.visible
    assert "--record blocks" in page.visible
