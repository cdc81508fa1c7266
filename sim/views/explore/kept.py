"""A run as the page keeps it: all that its figures draw, and none of its steps.

A worker process makes one of a simulation and hands it over; the sections of reports
draw it as they draw a folder of results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.costs.base import STEP_PARTS
from sim.results import schema
from sim.results.recording.recorder import Recording
from sim.results.tables.steps import MemorySteps
from sim.studies.planning.answer.configurations import not_said, serve_command
from sim.views.report.reduced import AVERAGED, STATES, Limits, Reduced, reduce_steps
from sim.views.report.source import REQUESTS, Run
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.results.folder import Columns
    from sim.results.run import Results
    from sim.simulation.run import Simulation
    from sim.views.plots.binning import Floats


NUM_COLUMNS: Final = 800
"""Columns of time: about as many as the figures have pixels. A report has more of them;
here, drawing them is what a moved slider waits for."""


@dataclass(frozen=True)
class Kept:
    """A finished run, small enough to keep a few dozen of them.

    Parameters
    ----------
    summary, config
        As of the folder of a run.
    yaml
        The complete configuration, runnable again.
    serve
        How the engine itself is started with these settings.
    not_served
        Settings that the command line of the engine does not carry.
    requests, preemptions
        Columns of these tables.
    steps
        Their reduction, of all engines together.
    num_engines
        Engines, whose cache is drawn as one line in a band.
    """

    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    yaml: str
    serve: str
    not_served: tuple[str, ...]
    requests: Columns
    preemptions: Columns
    steps: Reduced
    num_engines: int = 1

    @classmethod
    def of(cls, simulation: Simulation, results: Results) -> Kept:
        """Keep the needed values of a run that was just simulated."""
        config, summary = results.config, results.summary
        recording = results.recording
        assert isinstance(recording, Recording)
        limits = Limits(summary["max_num_seqs"], summary["max_num_batched_tokens"])
        requests, preemptions = recording.request_table, recording.preemption_table
        parts = [
            reduce_steps(
                each.step_table,
                limits,
                float(summary["duration"]),
                num_fine=NUM_COLUMNS,
            )
            for each in recording.of_rank
        ]
        return cls(
            summary=dict(summary),
            config=config.to_data(),
            yaml=config.to_yaml(),
            serve=serve_command(config.engine, simulation.capacity),
            not_served=tuple(not_said(config.engine)),
            requests={name: np.array(requests[name]) for name in REQUESTS},
            preemptions={
                name: np.array(preemptions[name]) for name in schema.PREEMPTIONS
            },
            steps=parts[0] if len(parts) == 1 else together(parts),
            num_engines=len(parts),
        )

    @cached_property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        columns = (*self.requests.values(), *self.preemptions.values())
        states = 3 * len(STATES) * NUM_COLUMNS * 8
        return sum(each.nbytes for each in columns) + states + 100_000


@dataclass(frozen=True, slots=True)
class States:
    """Lowest, highest and mean value of each column, of several engines."""

    low: Floats
    high: Floats
    mean: Floats


@dataclass(frozen=True, slots=True)
class Means:
    """Mean of each column over the steps of several engines."""

    mean: Floats


_SHARES = ("kv_cache_usage", "cpu_cache_usage")


def together(parts: Sequence[Reduced]) -> Reduced:
    """Return the steps of several engines as those of one.

    Queues add up. Of the caches there is the mean, in a band from the emptiest to the
    fullest.
    """
    found = replace(parts[0], waits=replace(parts[0].waits))
    found.num_steps = sum(each.num_steps for each in parts)
    for other in parts[1:]:
        found.waits.for_seqs_s += other.waits.for_seqs_s
        found.waits.for_tokens_s += other.waits.for_tokens_s
        found.waits.for_blocks_s += other.waits.for_blocks_s
        found.waits.full_s += other.waits.full_s
    found.waits.full_s /= len(parts)  # a share of the time of all
    found.states = {name: _states(name, parts) for name in STATES}
    found.averages = {name: Means(_mean(name, parts)) for name in AVERAGED}
    found.seconds = {
        name: added(each.seconds[name] for each in parts)
        for name in (*STEP_PARTS, "latency_s")
    }
    return found


def _states(name: str, parts: Sequence[Reduced]) -> States:
    lows, highs, means = (
        np.stack([getattr(each.states[name], what) for each in parts])
        for what in ("low", "high", "mean")
    )
    if name in _SHARES:
        return States(lows.min(axis=0), highs.max(axis=0), means.mean(axis=0))
    return States(lows.sum(axis=0), highs.sum(axis=0), means.sum(axis=0))


def _mean(name: str, parts: Sequence[Reduced]) -> Floats:
    """Return the mean over engines, a gap where none has a step."""
    values = np.stack([each.averages[name].mean for each in parts])
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    number = known.sum(axis=0)
    found: Floats = np.full(total.shape, np.nan)
    np.divide(total, number, out=found, where=number > 0)
    return found


class _Held:
    """A run in memory that is read as a folder of results is."""

    directory = Path("RESULTS")
    blocks = None
    transfer_table = None
    tier_table = None
    fleet_table = None
    tree_table = None

    def __init__(self, kept: Kept) -> None:
        self.summary = kept.summary
        self.config = kept.config
        self.step_table = MemorySteps()  # none are kept
        self._columns = {"requests": kept.requests, "preemptions": kept.preemptions}

    def columns(self, table: str, names: Sequence[str]) -> Columns:
        return {name: self._columns[table][name] for name in names}

    def recorded(self, name: str) -> Path | None:
        """Return where a file of results lies: a run in memory has none."""
        return None


@dataclass(frozen=True)
class LiveRun(Run):
    """A run of the page as the sections of a report see it."""

    kept: Kept

    @cached_property
    def steps(self) -> Reduced:
        return self.kept.steps


def live(number: int, label: str, kept: Kept) -> LiveRun:
    """Return a run for the sections; `number` is its colour, `label` its name."""
    return LiveRun(number, label, _Held(kept), kept)
