"""A result table in memory: numbers as arrays, texts as codes.

Numbers pass between numpy and Arrow without a copy, and without pandas, which
`pyarrow.array` of a numpy array and `Array.to_numpy` import if it is installed: that
takes longer than many a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import pandas as pd


def to_arrow(numbers: npt.NDArray[Any] | pa.Array) -> pa.Array:
    """Return integers or floats as an Arrow array that shares their memory.

    What is one already comes back as it is.
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


def arrow_table(columns: Mapping[str, Any], names: Iterable[str]) -> pa.Table:
    """Return columns in the order of `names`: numpy or Arrow arrays, one chunk each."""
    return pa.table({name: to_arrow(columns[name]) for name in names})


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """Return integers or floats, none of them null, as a read-only numpy array."""
    return np.from_dlpack(array)


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


class ResultTable(Mapping[str, npt.NDArray[Any]]):
    """Columns by name, each an array; texts come as an array of objects.

    `arrow` is in one chunk; its texts are dictionaries, its integers may be shorter
    than `kinds` says they are on disk.
    """

    def __init__(self, arrow: pa.Table, kinds: Mapping[str, str]) -> None:
        self.arrow = arrow
        self.kinds = kinds

    @property
    def num_rows(self) -> int:
        return int(self.arrow.num_rows)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return a column; numbers are shared with the table."""
        if self.kinds[name] != "str":
            return to_numpy(self.arrow[name].chunk(0))
        codes, texts = self._coded(name)
        return np.array(texts, dtype=np.object_)[codes]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrow.column_names)

    def __len__(self) -> int:
        return len(self.arrow.column_names)

    def _coded(self, name: str) -> tuple[npt.NDArray[np.int32], list[str]]:
        column = self.arrow[name].chunk(0)
        return to_numpy(column.indices), column.dictionary.to_pylist()

    def counts(self, name: str) -> dict[str, int]:
        codes, texts = self._coded(name)
        numbers = np.bincount(codes, minlength=len(texts)).tolist()
        return dict(zip(texts, numbers, strict=True))

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
