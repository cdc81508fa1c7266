"""A result table in memory: numbers as arrays, texts as codes.

Numbers pass between numpy and Arrow without a copy, and without pandas, which
`pyarrow.array` of a numpy array and `Array.to_numpy` import if it is installed: that
takes longer than many a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workloads.requests.long_arrays import ArrayFile, mapped, parts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import pandas as pd

Array = npt.NDArray[Any]


def to_arrow(numbers: npt.NDArray[Any] | pa.Array) -> pa.Array:
    """Return integers or floats as an Arrow array that shares their memory.

    An Arrow array comes back as it is.
    """
    if isinstance(numbers, pa.Array):
        return numbers
    data = np.ascontiguousarray(numbers)
    kind = pa.from_numpy_dtype(data.dtype)
    return pa.Array.from_buffers(kind, data.size, [None, pa.py_buffer(data)])


def to_arrow_texts(texts: Sequence[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """Return integers or floats, none of them null, as a read-only numpy array."""
    return np.from_dlpack(array)


def _arrow(
    column: Array | ArrayFile | Coded | pa.Array, first: int, stop: int
) -> pa.Array:
    """Return some rows of a column of a table."""
    if isinstance(column, Coded):
        codes = mapped(column.codes)[first:stop]
        return pa.DictionaryArray.from_arrays(
            to_arrow(codes.astype(np.int32, copy=False)), to_arrow_texts(column.texts)
        )
    if isinstance(column, pa.Array):
        return column.slice(first, stop - first)
    return to_arrow(mapped(column)[first:stop])


def as_recorded(column: pa.Array) -> pa.Array:
    """Return a column of a file as `kvsim run` writes it.

    Others write a number that is not there as a null, and texts large or by code.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return as_recorded(column.dictionary_decode())
    if is_text(kind):
        return column if kind == pa.string() else column.cast(pa.string())
    if column.null_count and pa.types.is_floating(kind):
        return column.fill_null(float("nan"))
    return column


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds texts, however they are kept."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return kind in (pa.string(), pa.large_string(), pa.string_view())


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A column of few different texts: which of `texts` stands in each row."""

    codes: Array | ArrayFile
    texts: Sequence[str]


class ResultTable(Mapping[str, Array]):
    """Columns by name, each an array; texts come as an array of objects.

    A column in a file is mapped anew whenever it is asked for, so that pages read of it
    are given back soon.

    Parameters
    ----------
    columns
        Numbers, and texts with their codes; or Arrow arrays, texts as dictionaries.
    kinds
        Names and types of the columns on disk; integers may be shorter in memory.
    """

    def __init__(
        self,
        columns: Mapping[str, Array | ArrayFile | Coded | pa.Array],
        kinds: Mapping[str, str],
    ) -> None:
        self._columns = {name: columns[name] for name in kinds}
        self.kinds = kinds

    @property
    def num_rows(self) -> int:
        first = next(iter(self._columns.values()))
        return len(first.codes if isinstance(first, Coded) else first)

    @property
    def arrow(self) -> pa.Table:
        """All of it, in one chunk."""
        return pa.table(self.rows(0, self.num_rows))

    def rows(self, first: int, stop: int) -> dict[str, pa.Array]:
        """Return some rows of all columns."""
        return {
            name: _arrow(column, first, stop) for name, column in self._columns.items()
        }

    def __getitem__(self, name: str) -> Array:
        """Return a column; numbers are shared with the table."""
        if self.kinds[name] != "str":
            return to_numpy(_arrow(self._columns[name], 0, self.num_rows))
        codes, texts = self._coded(name)
        return np.array(texts, dtype=np.object_)[codes]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def with_columns(
        self, columns: Mapping[str, Array | ArrayFile | Coded], kinds: Mapping[str, str]
    ) -> ResultTable:
        """Return a table that has these columns behind its own."""
        return ResultTable({**self._columns, **columns}, {**self.kinds, **kinds})

    def taken(self, rows: npt.NDArray[Any]) -> ResultTable:
        """Return a table of some rows, by number or by whether."""
        columns: dict[str, Array | Coded] = {}
        for name, kind in self.kinds.items():
            if kind == "str":
                codes, texts = self._coded(name)
                columns[name] = Coded(codes[rows], texts)
            else:
                columns[name] = self[name][rows]
        return ResultTable(columns, self.kinds)

    def _coded(self, name: str) -> tuple[npt.NDArray[np.int32], Sequence[str]]:
        column = self._columns[name]
        if isinstance(column, Coded):
            return mapped(column.codes), column.texts
        arrow = _arrow(column, 0, self.num_rows)
        return to_numpy(arrow.indices), arrow.dictionary.to_pylist()

    def counts(self, name: str) -> dict[str, int]:
        codes, texts = self._coded(name)
        numbers = np.zeros(len(texts), np.int64)
        for some in parts(codes):
            numbers += np.bincount(some, minlength=len(texts))
        return dict(zip(texts, numbers.tolist(), strict=True))

    def is_one_of(self, name: str, texts: Collection[str]) -> npt.NDArray[np.bool_]:
        codes, known = self._coded(name)
        is_wanted = np.array([each in texts for each in known], dtype=np.bool_)
        return np.take(is_wanted, codes)

    def frame(self) -> pd.DataFrame:
        """Return a frame of its own, with the types of the table on disk."""
        import pandas as pd  # noqa: PLC0415  (slow to import, and a run needs none)

        columns = {
            name: pd.Series(column, dtype="str")
            if kind == "str"
            else column.astype(kind)
            for (name, column), kind in zip(
                self.items(), self.kinds.values(), strict=True
            )
        }
        return pd.DataFrame(columns, copy=False)
