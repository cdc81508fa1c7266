"""The reader of ``plan.json``: what it must hold to be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sim.errors import ResultsError
from sim.results.folder import read_json

if TYPE_CHECKING:
    from pathlib import Path

PLAN_FORMAT: Final = "kvplan/1"

_WHOLE: Final[dict[str, type]] = {
    "traffic": dict,
    "objectives": list,
    "prices": dict,
    "search": dict,
    "candidates": list,
    "cheapest": dict,
    "pareto": dict,
    "notes": list,
    "versions": dict,
}
_CANDIDATE: Final = ("name", "model", "gpu", "tensor_parallel_size", "status")


def read_plan(directory: Path) -> dict[str, Any]:
    """Read ``plan.json`` of a plan's folder."""
    path = directory / "plan.json"
    plan = read_json(path)
    if fault := plan_fault(plan):
        raise ResultsError(f"'{path}' {fault}")
    return plan


def plan_fault(plan: object) -> str | None:
    """Return why these contents of ``plan.json`` cannot be drawn, or None.

    Examples
    --------
    >>> plan_fault([])
    'holds no table; plan again'
    >>> plan_fault({"format": "kvplan/1", "candidates": 3, "traffic": {}})
    "is damaged: it has no list 'objectives'; plan again"
    """
    if not isinstance(plan, dict):
        return "holds no table; plan again"
    if plan.get("format") != PLAN_FORMAT:
        return (
            f"is of format {plan.get('format')!r}, this is for '{PLAN_FORMAT}'; plan "
            f"again with this version of kvsim"
        )
    for key, kind in _WHOLE.items():
        if not isinstance(plan.get(key), kind):
            what = "table" if kind is dict else "list"
            return f"is damaged: it has no {what} '{key}'; plan again"
    return _candidates_fault(plan["candidates"])


def _candidates_fault(candidates: list[Any]) -> str | None:
    for number, each in enumerate(candidates):
        for key in _CANDIDATE:
            if not isinstance(each, dict) or key not in each:
                return f"is damaged: candidate {number} has no '{key}'; plan again"
    return None
