"""Modules that decide, count, price and measure, and all faults they can have."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from tests.mutants.operators import mutants_of
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.mutants.operators import Mutant

_PATTERNS: Final = (
    "cache/**/*.py",
    "sim/scheduler/v0/*.py",
    "sim/scheduler/v1/**/*.py",
    "sim/scheduler/groups/*.py",
    "sim/scheduler/block_space/*.py",
    "sim/scheduler/hf_fifo/*.py",
    "sim/scheduler/sglang/*.py",
    "sim/scheduler/victims/*.py",
    "sim/scheduler/admission/*.py",
    "sim/scheduler/*.py",
    "sim/engine/**/*.py",
    "sim/costs/**/*.py",
    "sim/fleet/**/*.py",
    "sim/hardware/capacity/*.py",
    "sim/results/metrics.py",
    "sim/results/summary/objectives.py",
    "sim/results/recording/totals.py",
    "sim/results/tables/percentiles.py",
    "workloads/**/*.py",
)


def core_files() -> Iterator[Path]:
    for pattern in _PATTERNS:
        yield from sorted(ROOT.glob(pattern))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def core_mutants() -> dict[str, Mutant]:
    """Return all faults of the core by name, in order."""
    found: dict[str, Mutant] = {}
    seen: Counter[str] = Counter()
    for path in core_files():
        for each in mutants_of(path, str(path.relative_to(ROOT))):
            seen[each.name] += 1
            times = seen[each.name]
            found[each.name if times == 1 else f"{each.name} ({times})"] = each
    return found
