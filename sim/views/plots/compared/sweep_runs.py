"""The runs of a sweep, or of a plan, as the figures over load read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from sim.config.plug import did_you_mean
from sim.errors import ResultsError
from sim.results.summary.objectives import parse_objectives
from sim.results.summary.verdict import limits_ms_of
from sim.studies.sweeps.directory import RUNS, SPEC
from sim.studies.sweeps.spec import SweepSpec
from sim.views.plots.compared.runs import in_common
from sim.views.plots.output import NotShownError
from workloads.plain import parse_yaml, read_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LOADS: Final = (
    "rate_scale",
    "arrivals.rate",
    "max_concurrent_users",
    "num_sessions",
    "num_requests",
)
"""Ends of the keys that say how much is asked of an engine, the most telling first."""
SIZES: Final = (
    "engine.num_gpu_blocks_override",
    "engine.gpu_memory_utilization",
    "engine.kv_cache_memory_bytes",
)
"""Keys that say how large the cache is."""
PREEMPTION_RATE: Final = "preemptions_per_100_requests"


@dataclass(frozen=True)
class SweepRuns:
    """Runs that are done."""

    title: str  # of all runs: the parts that they have in common
    # a row for each run: the varied keys, ``seed``, the numbers of its summary, and
    # `PREEMPTION_RATE`
    frame: pd.DataFrame
    keys: tuple[str, ...]  # the keys that have several values, but for seeds
    # runs that are not done: refused, failed, crashed, or still to come
    num_missing: int = 0

    @property
    def load(self) -> str:
        """The key that says how much is asked."""
        for end in LOADS:
            for key in self.keys:
                if key == end or key.endswith(f".{end}"):
                    return key
        raise NotShownError(
            f"a figure over load needs runs at several loads; vary a key such as "
            f"workload.preset.rate_scale, got {', '.join(self.keys) or 'none'}"
        )

    @property
    def size(self) -> str | None:
        """The key that says how large the cache is; None if no such key is varied."""
        return next((key for key in SIZES if key in self.keys), None)

    def column(self, name: str) -> str:
        """Return a column of numbers, or say which there are."""
        found = self.frame.get(name)
        if found is not None and found.dtype.kind in "iufb" and found.notna().any():
            return name
        numbers = self.frame.select_dtypes("number").columns
        hint = did_you_mean(name, numbers)
        raise NotShownError(
            f"'{name}' is no number that these runs have{hint}; take one of "
            f"summary.json, such as mean_ttft_ms"
        )

    def run_with_most(self, name: str) -> pd.Series[Any]:
        """Return the run with the largest value of a column."""
        values = self.frame[name].to_numpy(np.float64)
        return self.frame.iloc[int(np.nanargmax(values))]

    @property
    def seeds(self) -> str:
        """How many seeds there are of each combination; empty if there is one."""
        keys = list(self.keys) or ["run"]
        sizes = self.frame.groupby(keys, dropna=False).size()
        least, most = int(sizes.min()), int(sizes.max())
        if most < 2:
            return ""
        return f"{most} seeds" if least == most else f"up to {most} seeds"

    def about(self, seeds: str) -> str:
        """Return a line for below the title: of the runs, their seeds, missing ones."""
        parts = [self.title]
        if self.seeds:
            parts.append(seeds.format(self.seeds))
        if self.num_missing:
            parts.append(f"{self.num_missing} runs are missing")
        return "; ".join(part for part in parts if part)


def read_sweep(directory: Path) -> SweepRuns:
    try:
        data = read_mapping(directory / SPEC)
        spec = SweepSpec.model_validate(data)
        frame = pd.read_parquet(directory / RUNS)
    except (OSError, ValueError) as error:
        raise ResultsError(
            f"'{directory}' holds no sweep that can be read; give the --out of 'kvsim "
            f"sweep'"
        ) from error
    if frame.empty:  # no file, and so no columns
        raise ResultsError(
            f"no run of the sweep in '{directory}' has finished; go on with 'kvsim "
            f"sweep' and --resume"
        )
    done = frame[frame["status"] == "done"].reset_index(drop=True)
    if done.empty:
        raise ResultsError(
            f"'{directory}': none of {len(frame):,} runs is done; look at the column "
            f"error of its dataset"
        )
    done = _with_goodput(done)
    done[PREEMPTION_RATE] = 100.0 * done["num_preemptions"] / done["num_requests"]
    keys = tuple(key for key in spec.keys if _varies(done.get(key)) and key != "seed")
    title = in_common(done["title"].tolist())
    return SweepRuns(title, done, keys, len(frame) - len(done))


def _with_goodput(done: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with the goodput of their objectives, if they tell no other."""
    if "request_goodput" in done or "verdict" not in done:
        return done
    verdicts = [json.loads(text) if text else {} for text in done["verdict"]]
    promised = [_plain(text).get("objectives") for text in done["config"]]
    limits_ms = [limits_ms_of(parse_objectives(o)) if o else {} for o in promised]
    return done.assign(
        request_goodput=[each.get("request_goodput") for each in verdicts],
        goodput=[json.dumps(each) for each in limits_ms],
    )


def _plain(config: str) -> dict[str, Any]:
    """Return the configuration of a run, which is mostly JSON: faster than YAML."""
    try:
        found: dict[str, Any] = json.loads(config)
    except ValueError:
        found = parse_yaml(config, "config")
    return found


def _varies(column: pd.Series[Any] | None) -> bool:
    return column is not None and column.nunique(dropna=False) > 1


def runs_of_plan(plan: Mapping[str, Any]) -> SweepRuns:
    """Return the runs of a plan's curves: shares of each candidate's highest rate."""
    rows = [
        {
            "run": i,
            "candidate": each["name"],
            "num_gpu_blocks": each["num_gpu_blocks"],
            "load": point["load"],
            "request_rate": point["rate"],
            **point["values"],
            PREEMPTION_RATE: _percent(point["values"].get("preemptions_per_request")),
            "request_goodput": _goodput(point),
            "goodput": json.dumps(_limits(plan)),
        }
        for i, each in enumerate(plan["candidates"])
        for point in each.get("curve", ())
        if point["load"] and not point["is_overloaded"]
    ]
    if not rows:
        raise ResultsError("the plan found no rate, so it has no curves to draw")
    frame = pd.DataFrame(rows).rename(columns={"load": "rate_scale"})
    keys = (
        ("rate_scale", "candidate") if frame["candidate"].nunique() > 1 else LOADS[:1]
    )
    return SweepRuns(plan["traffic"]["title"], frame, keys)


def _percent(share: float | None) -> float:
    return np.nan if share is None else 100.0 * share


def _goodput(point: Mapping[str, Any]) -> float:
    share = point["values"].get("goodput")
    return np.nan if share is None else point["rate"] * share


def _limits(plan: Mapping[str, Any]) -> dict[str, float]:
    limits = (each.get("limits_ms") for each in plan["objectives"])
    return next((each for each in limits if each), {})
