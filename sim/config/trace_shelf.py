"""Traces that were read once, for many runs.

Where a shelf is at hand, `sim.config.plug.build` hands out its trace in place of a
reader that would parse the file again. A run sees the same requests and warnings either
way.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections import OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from workloads.errors import WorkloadError, WorkloadWarning
from workloads.requests.columns import RequestColumns, SpecIterator
from workloads.traces import TraceReader
from workloads.traces.base import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from workloads.spec import RequestSpec

_KEPT = 2
"""Traces that a process keeps unpacked: most sweeps have one."""


class Shelf(Protocol):
    """A source of readers that may stand in for a trace's own."""

    def instead_of(self, table: Mapping[str, Any], reader: TraceReader) -> TraceReader:
        """Return the reader of the trace of `table`: `reader`, or a quicker one."""
        ...


_AT_HAND: ContextVar[Shelf | None] = ContextVar("trace shelf", default=None)


@contextmanager
def at_hand(shelf: Shelf) -> Iterator[None]:
    """Let readers that are made in this context be replaced by `shelf`."""
    token = _AT_HAND.set(shelf)
    try:
        yield
    finally:
        _AT_HAND.reset(token)


def keep_at_hand(shelf: Shelf) -> None:
    """Let `shelf` serve whatever this process makes from now on."""
    _AT_HAND.set(shelf)


def instead_of(table: Mapping[str, Any], made: Any) -> Any:
    """Return `made` or, if it reads a trace, what the shelf at hand has for it."""
    shelf = _AT_HAND.get()
    if shelf is None or not isinstance(made, TraceReader):
        return made
    return shelf.instead_of(table, made)


def key_of(table: Mapping[str, Any]) -> str:
    """Return the key that tells traces apart: kind, path and all other arguments."""
    return json.dumps(table, sort_keys=True)


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A trace in memory, which reads as its file does.

    Parameters
    ----------
    requests
        What the reader gave.
    warnings
        What it warned of.
    """

    requests: RequestColumns | Sequence[RequestSpec]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, reader: TraceReader) -> ReadTrace:
        """Read a trace."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", WorkloadWarning)
            read = reader.read()
            requests: RequestColumns | Sequence[RequestSpec] = (
                read.columns
                if isinstance(read, SpecIterator)
                else [*counted(reader, read)]
            )
        if not len(requests):
            raise WorkloadError("a trace needs at least one request; check the file")
        return cls(requests, tuple(str(warning.message) for warning in caught))

    def read(self) -> Iterator[RequestSpec]:
        for warning in self.warnings:
            warnings.warn(warning, WorkloadWarning, stacklevel=2)
        if isinstance(self.requests, RequestColumns):
            return SpecIterator(self.requests)
        return iter(self.requests)


class PackedShelf:
    """Traces by key, packed; the last few that were asked for stay unpacked."""

    def __init__(self, packed: Mapping[str, bytes]) -> None:
        self._packed = packed
        self._unpacked: OrderedDict[str, ReadTrace] = OrderedDict()

    def instead_of(self, table: Mapping[str, Any], reader: TraceReader) -> TraceReader:
        key = key_of(table)
        if key not in self._packed:
            return reader
        if key not in self._unpacked:
            self._unpacked[key] = pickle.loads(self._packed[key])
            if len(self._unpacked) > _KEPT:
                self._unpacked.popitem(last=False)
        self._unpacked.move_to_end(key)
        return self._unpacked[key]

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Serve the runs of this context."""
        with at_hand(self):
            yield


def pack(reader: TraceReader) -> bytes:
    """Read a trace, and return it in a form that travels between processes."""
    return pickle.dumps(ReadTrace.of(reader), protocol=5)
