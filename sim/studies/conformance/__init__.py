"""The schedule of a workload, step by step, as `kvsim decisions` writes it."""

from __future__ import annotations

from sim.scheduler.log.files import read_log, write_log
from sim.studies.conformance.diff import Difference, first_difference
from sim.studies.conformance.driver import DecisionDriver
from sim.studies.conformance.pair import PairDriver, driver_of
from sim.studies.conformance.sglang import SglangDriver
from sim.studies.conformance.sizing import SizingCases, load_sizing_cases
from sim.studies.conformance.workload import DecisionWorkload, load_workload

__all__ = [
    "DecisionDriver",
    "DecisionWorkload",
    "Difference",
    "PairDriver",
    "SglangDriver",
    "SizingCases",
    "driver_of",
    "first_difference",
    "load_sizing_cases",
    "load_workload",
    "read_log",
    "write_log",
]
