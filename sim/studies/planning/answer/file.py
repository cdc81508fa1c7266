"""The reader of ``plan.json``, and its candidates in few words."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from sim.errors import ResultsError
from sim.results.folder import read_json
from sim.results.summary.compared import differing, short_value

if TYPE_CHECKING:
    from collections.abc import Mapping
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


_SAID = ("model", "gpu", "tensor_parallel_size")


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
            noun = "table" if kind is dict else "list"
            return f"is damaged: it has no {noun} '{key}'; plan again"
    for number, each in enumerate(plan["candidates"]):
        for key in _CANDIDATE:
            if not isinstance(each, dict) or key not in each:
                return f"is damaged: candidate {number} has no '{key}'; plan again"
    return None


def varied_settings(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by a candidate's name the keys that tell it from others, and its values.

    Its model, GPU and tensor-parallel size are not among them.
    """
    candidates = plan["candidates"]
    found = differing([each.get("engine", {}) for each in candidates])
    return {
        each["name"]: {k: v[place] for k, v in found.items() if k not in _SAID}
        for place, each in enumerate(candidates)
    }


def labels(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return a short label for each candidate of ``plan.json``, by its name.

    No two are alike: where they would be, the names stay.

    Examples
    --------
    >>> engine = {"model": "m", "gpu": "h100_sxm", "max_num_seqs": 256}
    >>> one = {"name": "a", **engine, "tensor_parallel_size": 4, "engine": engine}
    >>> other = {**one, "name": "b", "engine": {**engine, "max_num_seqs": 64}}
    >>> labels({"candidates": [one, other]})
    {'a': 'h100_sxm x4, max_num_seqs 256', 'b': 'h100_sxm x4, max_num_seqs 64'}
    """
    candidates = plan["candidates"]
    varied = varied_settings(plan)
    has_models = len({each["model"] for each in candidates}) > 1
    found = {}
    for each in candidates:
        ranks = each["tensor_parallel_size"]
        parts = [PurePath(str(each["model"])).name] if has_models else []
        parts.append(f"{PurePath(str(each['gpu'])).stem}{f' x{ranks}' * (ranks > 1)}")
        told = varied[each["name"]]
        parts += [f"{key} {short_value(value)}" for key, value in told.items()]
        found[each["name"]] = ", ".join(parts)
    if len(set(found.values())) < len(found):
        return {name: name for name in found}
    return found
