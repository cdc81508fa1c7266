"""Files that runs need beside their configuration: traces, and users' own."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.config.trace_shelf import PackedShelf, at_hand, key_of, pack
from sim.simulation.workload import TRACE_KEYS, make_workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sim.studies.sweeps.job import Job
    from workloads.traces import TraceReader


@dataclass(frozen=True, slots=True)
class Supplies:
    """Files that all runs share, read once where the runs are handed out."""

    traces: Mapping[str, bytes] = field(default_factory=dict)
    """Traces that were read, packed; by their table in the configuration."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by absolute path: users' modules, profiles, models, datasheets."""

    def shelf(self) -> PackedShelf:
        return PackedShelf(self.traces)


NOTHING = Supplies()


def gather(jobs: Iterable[Job], at_least: int = 2) -> Supplies:
    """Read the files that runs name, and traces that `at_least` so many of them have.

    A trace that cannot be read is left to the runs, which will say so.
    """
    uses: Counter[str] = Counter()
    first: dict[str, Mapping[str, Any]] = {}
    paths: set[str] = set()
    for job in jobs:
        for table in trace_tables(job.config.get("workload")):
            key = key_of(table)
            uses[key] += 1
            first.setdefault(key, job.config)
        paths.update(named_files(job.config))
    traces: dict[str, bytes] = {}
    for key, number in uses.items():
        if number >= at_least and key not in traces:
            traces |= _packed(first[key])
    names = {json.loads(key).get("path") for key in traces}
    files = {name: Path(name).read_bytes() for name in sorted(paths - names)}
    return Supplies(traces, files)


def trace_tables(value: object) -> Iterator[dict[str, Any]]:
    """Yield the tables of a workload that a trace is read by, at any depth."""
    if isinstance(value, list):
        for each in value:
            yield from trace_tables(each)
    if not isinstance(value, dict):
        return
    for each in value.values():
        yield from trace_tables(each)
    if "kind" in value and isinstance(value.get("path"), str):
        yield {key: each for key, each in value.items() if key not in TRACE_KEYS}


def named_files(value: object) -> Iterator[str]:
    """Yield the files that a configuration names, all of them by absolute path."""
    left = [value]
    while left:  # no call for each value: this is done for every run of a sweep
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
        elif isinstance(each, str) and each.startswith("/"):
            path = Path(each.rpartition(":")[0] if ".py:" in each else each)
            if path.is_dir():
                path /= "config.json"  # of a model
            if path.is_file():
                yield str(path)


def digests(paths: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    found = {}
    for path in sorted(set(paths)):
        with Path(path).open("rb") as file:
            digest = sha256()
            while part := file.read(2**20):
                digest.update(part)
        found[path] = digest.hexdigest()
    return found


class _Readers:
    """A shelf that holds no trace, and notes which readers a workload makes."""

    def __init__(self) -> None:
        self.by_key: dict[str, TraceReader] = {}

    def instead_of(self, table: Mapping[str, Any], reader: TraceReader) -> TraceReader:
        self.by_key[key_of(table)] = reader
        return reader


def _packed(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Read the traces of a configuration, as far as they can be read."""
    readers, packed = _Readers(), {}
    # Whatever goes wrong, users' own readers included, goes wrong in the runs as well.
    with suppress(Exception), at_hand(readers):
        parsed = parse_config(dict(config))
        make_workload(parsed.workload, parsed.seed)
    for key, reader in readers.by_key.items():
        with suppress(Exception):
            packed[key] = pack(reader)
    return packed
