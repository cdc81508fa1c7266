"""Arrivals at the engines of a fleet, as one run of the fleet with its router."""

from __future__ import annotations

import heapq
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from sim.results.output import write_text
from sim.serving.text import FIRST_ANSWER
from workloads.traces.kvsim import KvsimTraceWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from sim.config.tables import RunConfig

ARRIVALS: Final = "arrivals.jsonl"
"""The arrivals, as a trace; the configuration beside it simulates it again."""
CONFIG: Final = "config.yaml"


def replayed(config: RunConfig, arrivals: Path) -> RunConfig:
    """Return the configuration of the same engines, offline, for recorded arrivals."""
    trace = {"kind": "kvsim", "path": str(arrivals.resolve())}
    workload = type(config.workload).model_validate({"trace": trace})
    return config.model_copy(update={"workload": workload})


def join(config: RunConfig, directory: Path, folders: Iterable[Path]) -> bool:
    """Write the arrivals at all engines beside their folders; return whether any were.

    The configuration that is written has the fleet's router, so that its choices can
    be held against those of the real router that was there.
    """
    arrivals = directory / ARRIVALS
    number = -1
    with ExitStack() as stack, arrivals.open("w") as file:
        streams = [_entries(stack, folder / ARRIVALS) for folder in folders]
        file.writelines(KvsimTraceWriter().lines([]))
        merged = heapq.merge(*streams, key=lambda entry: entry["arrival_s"])
        for number, entry in enumerate(merged):
            entry["output_segment"] = FIRST_ANSWER + number
            file.write(json.dumps(entry) + "\n")
    if number < 0:
        arrivals.unlink()
        return False
    write_text(directory / CONFIG, replayed(config, arrivals).to_yaml())
    return True


def _entries(stack: ExitStack, path: Path) -> Iterator[dict[str, Any]]:
    file = stack.enter_context(path.open())
    next(file, None)  # the header
    return map(json.loads, file)
