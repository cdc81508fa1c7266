"""Numbers between numpy and Arrow without a copy, and without pandas.

`pyarrow.array` of a numpy array and `Array.to_numpy` import pandas if it is installed,
which takes longer than many a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt


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
    """Return texts as an Arrow array."""
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
