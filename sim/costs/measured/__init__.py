"""Seconds of a step from tables of measured kernels, ``kind: measured``."""

from __future__ import annotations

from sim.costs.measured.model import MeasuredCost

__all__ = ["MeasuredCost"]
