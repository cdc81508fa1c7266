"""Columns that grow by chunks of arrays: a few bytes a value, not an object.

Long ones lie in files (`workloads.requests.long_arrays`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.results.tables.memory import Coded
from workloads.requests.long_arrays import ArrayFile, parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Array = npt.NDArray[Any]

_FIRST_ROWS = 1024
_INT32 = np.iinfo(np.int32)
SPILLED_BYTES = 1 << 22
"""Of a column in memory; earlier rows go to a file."""


class Columns:
    """Numeric columns that grow; integers take four bytes while all of them fit.

    Parameters
    ----------
    kinds
        Name and type of each column.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._columns = {name: _Column(kind) for name, kind in kinds.items()}

    def add(self, chunk: Mapping[str, Array]) -> None:
        """Take some rows of all columns; the arrays are copied."""
        for name, column in self._columns.items():
            column.add(chunk[name])

    def values(self, name: str) -> Array:
        return self._columns[name].values()

    def pop(self, name: str) -> Array:
        """Give away a column."""
        return self._columns.pop(name).values()


class _Column:
    """One array that is enlarged by half whenever it is full, up to `SPILLED_BYTES`.

    Large arrays go back to the operating system as soon as they are let go; many
    small ones would not.
    """

    def __init__(self, kind: str) -> None:
        self._kind = np.dtype(kind)
        self._values: Array = np.empty(
            _FIRST_ROWS, np.int32 if self._kind == np.int64 else kind
        )
        self._num_rows = 0
        self._file: ArrayFile | None = None
        """Rows before those in memory."""

    def add(self, values: Array) -> None:
        if self._values.dtype != self._kind and not _fit(values):
            self._widen()
        until = self._num_rows + len(values)
        if until > len(self._values) and self._rows.nbytes >= SPILLED_BYTES:
            self._spill()
            until = len(values)
        if until > len(self._values):
            # Rows not written to cost no memory yet, as with np.resize they would.
            room = np.empty(until + until // 2, self._values.dtype)
            room[: self._num_rows] = self._rows
            self._values = room
        self._values[self._num_rows : until] = values
        self._num_rows = until

    @property
    def _rows(self) -> Array:
        """Those in memory."""
        return self._values[: self._num_rows]

    def _widen(self) -> None:
        """Give integers eight bytes."""
        self._values = self._values.astype(self._kind)
        if self._file is not None:
            narrow, self._file = self._file.mapped(), ArrayFile(self._kind)
            for some in parts(narrow):
                self._file.append(some)

    def _spill(self) -> None:
        """Move the rows in memory to the end of the file."""
        if self._file is None:
            self._file = ArrayFile(self._values.dtype)
        self._file.append(self._rows)
        self._num_rows = 0

    def values(self) -> Array:
        if self._file is None:
            return self._rows
        self._spill()
        return self._file.mapped()


def _fit(values: Array) -> bool:
    """Whether integers fit into four bytes."""
    least, most = values.min(initial=0), values.max(initial=0)
    return bool(least >= _INT32.min and most <= _INT32.max)


class Texts:
    """A column of few different texts, as codes."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        """Return the code of a text; an unknown one gets a new code."""
        return self._codes.setdefault(text, len(self._codes))

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the code of each text; unknown ones get a new code."""
        codes = self._codes
        for text in dict.fromkeys(texts):
            codes.setdefault(text, len(codes))
        return np.fromiter(map(codes.__getitem__, texts), np.int64, len(texts))

    def column(self, codes: Array | ArrayFile) -> Coded:
        """Return the column that `codes` stand for."""
        return Coded(codes, tuple(self._codes))
