"""Seconds of a step from tables of measured kernels, ``kind: measured``.

``model.py`` adds up a step: `counted.py` has what tokens and requests decide,
`attention.py` chunks and decodes, `rest.py` the other operations. `tables.py` and
`factors.py` look values up; `reading.py`, `reading_factors.py` and `rest_tables.py`
make them from a profile; `geometry.py` says whose they are.
"""

from __future__ import annotations

from sim.costs.measured.model import MeasuredCost

__all__ = ["MeasuredCost"]
