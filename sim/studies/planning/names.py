"""Candidates in few words: by what differs between them."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from sim.results.summary.compared import differing, short_value

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAID = ("model", "gpu", "tensor_parallel_size")


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
    engines = [each.get("engine", {}) for each in candidates]
    varied = {k: v for k, v in differing(engines).items() if k not in _SAID}
    has_models = len({each["model"] for each in candidates}) > 1
    found = {}
    for place, each in enumerate(candidates):
        ranks = each["tensor_parallel_size"]
        parts = [PurePath(str(each["model"])).name] if has_models else []
        parts.append(f"{PurePath(str(each['gpu'])).stem}{f' x{ranks}' * (ranks > 1)}")
        parts += [f"{key} {short_value(told[place])}" for key, told in varied.items()]
        found[each["name"]] = ", ".join(parts)
    if len(set(found.values())) < len(found):
        return {name: name for name in found}
    return found
