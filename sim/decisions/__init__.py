"""The schedule of a workload, step by step: what `kvsim decisions` writes."""

from __future__ import annotations

from sim.decisions.diff import Difference, first_difference
from sim.decisions.driver import DecisionDriver
from sim.decisions.log_files import read_log, write_log
from sim.decisions.workload import DecisionWorkload, load_workload

__all__ = [
    "DecisionDriver",
    "DecisionWorkload",
    "Difference",
    "first_difference",
    "load_workload",
    "read_log",
    "write_log",
]
