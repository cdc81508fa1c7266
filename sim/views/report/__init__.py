"""One self-contained page of a run, several runs, a sweep or a plan."""

from __future__ import annotations

from sim.views.report.build import build_page

__all__ = ["build_page"]
