"""What a run of a sweep does: simulate, and return the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.results.step_table import MemorySteps
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.results.step_table import Batch

_COLUMNS = ("step", "start_s", "latency_s", "num_waiting")
"""Columns of steps that a summary is made of, beside the recorder's totals."""


class SummarySteps(MemorySteps):
    """Steps as far as a summary needs them: 28 bytes each in place of 240."""

    def write(self, batch: Batch) -> bool:
        """See `StepSink.write`."""
        self._batches.append({name: batch[name].copy() for name in _COLUMNS})
        self.num_steps += len(batch["step"])
        return False


def lean(simulation: Simulation) -> Simulation:
    """Let a simulation keep no more of its steps than its summary needs.

    The summary is the same; figures and tables of steps are not to be had.
    """
    simulation.recorder.sink = SummarySteps()
    return simulation


def run_summary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Simulate a complete configuration and return its summary.

    Parameters
    ----------
    config
        Plain data, see `sim.config.tables.parse_config`.

    Raises
    ------
    UserError, WorkloadError
        If it cannot be run.
    """
    return lean(Simulation(parse_config(dict(config)))).run().summary
