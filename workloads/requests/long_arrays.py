"""Long arrays, which lie in files that have no name.

Of millions of requests no column stays in memory: pages of a file that is mapped are
given back when others need the room, and when nothing maps them any more.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

from workloads._numpy import np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import DTypeLike, NDArray

    Array = NDArray[Any]

SPILLED_BYTES = 1 << 23
"""Of an array in memory; a longer one goes to a file."""
PART_ROWS = 1 << 18
"""Of long arrays that are looked at part by part."""


class ArrayFile:
    """An array in a file, which goes when nothing refers to it or maps it."""

    def __init__(self, kind: DTypeLike) -> None:
        self.dtype = np.dtype(kind)
        self._num_bytes = 0
        with tempfile.TemporaryFile() as file:
            self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)

    def __len__(self) -> int:
        return self._num_bytes // int(self.dtype.itemsize)

    def __reduce__(self) -> tuple[Any, ...]:
        return _filed, (self.mapped(),)

    def append(self, values: Array) -> None:
        """Put values of the same kind behind the others."""
        left = np.ascontiguousarray(values, self.dtype).view(np.uint8).data
        self._num_bytes += len(left)
        while left:
            left = left[os.write(self._handle, left) :]

    def mapped(self) -> Array:
        """Return the numbers so far as a read-only array."""
        whole = mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(whole, self.dtype)


def _filed(values: Array) -> ArrayFile:
    file = ArrayFile(values.dtype)
    file.append(values)
    return file


class Collector:
    """Arrays of a kind one after another, in a file once they are long."""

    def __init__(self, kind: DTypeLike) -> None:
        self._kind = np.dtype(kind)
        self._held: list[Array] = []
        self._num_bytes = 0
        self._file: ArrayFile | None = None

    def add(self, values: Array) -> None:
        """Take an array that does not change any more."""
        if self._file is not None:
            self._file.append(values)
            return
        self._held.append(np.asarray(values, self._kind))
        self._num_bytes += self._held[-1].nbytes
        if self._num_bytes < SPILLED_BYTES:
            return
        self._file = ArrayFile(self._kind)
        for each in self._held:
            self._file.append(each)
        self._held = []

    def kept(self) -> Array | ArrayFile:
        """Return all of it, not mapped yet if it is in a file."""
        if self._file is not None:
            return self._file
        if len(self._held) != 1:
            self._held = [np.concatenate([np.empty(0, self._kind), *self._held])]
        return self._held[0]

    def mapped(self) -> Array:
        """Return all of it as an array."""
        return mapped(self.kept())


def spilled(values: Array) -> Array:
    """Return an array as it is, or from a file, if it is a long one."""
    if values.nbytes < SPILLED_BYTES:
        return values
    return collected(parts(values), values.dtype)


def collected(some: Iterable[Array], kind: DTypeLike) -> Array:
    """Return arrays of a kind one after another, as one that is `spilled`."""
    collector = Collector(kind)
    for values in some:
        collector.add(values)
    return collector.mapped()


def mapped(values: Array | ArrayFile) -> Array:
    return values.mapped() if isinstance(values, ArrayFile) else values


def parts(values: Array, num_rows: int | None = None) -> Iterator[Array]:
    """Yield an array part by part, `PART_ROWS` or so many rows at a time."""
    step = num_rows or PART_ROWS
    for first in range(0, len(values), step):
        yield values[first : first + step]


def parts_of(
    columns: Mapping[str, Array | ArrayFile], names: Iterable[str]
) -> Iterator[dict[str, Array]]:
    """Yield columns of one length part by part; there is one of no rows.

    Files are mapped anew for each part, so that pages read before are given back.
    """
    wanted = {name: columns[name] for name in names}
    length = len(next(iter(wanted.values())))
    for first in range(0, max(length, 1), PART_ROWS):
        here = slice(first, first + PART_ROWS)
        yield {name: mapped(column)[here] for name, column in wanted.items()}


def taken(values: Array, rows: Array) -> Array | ArrayFile:
    """Return the values at `rows`, in a file if they are many."""
    collector = Collector(values.dtype)
    for some in parts(rows):
        collector.add(values[some])
    return collector.kept()


def chosen(values: Array, is_chosen: Array) -> Array:
    """Return the values for which `is_chosen` is true, `spilled`."""
    pairs = zip(parts(values), parts(is_chosen), strict=True)
    return collected((some[here] for some, here in pairs), values.dtype)
