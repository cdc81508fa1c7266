"""One self-contained page of a run, several runs, a sweep or a plan."""

from __future__ import annotations

from sim.report.build import build_page
from sim.report.source import ReportError

__all__ = ["ReportError", "build_page"]
