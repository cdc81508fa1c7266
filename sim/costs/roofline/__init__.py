"""Seconds of a step from a datasheet and an architecture, ``kind: roofline``."""

from __future__ import annotations

from sim.costs.roofline.model import RooflineCost

__all__ = ["RooflineCost"]
