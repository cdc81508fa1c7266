"""Values of rows as Arrow columns, without pandas.

`pyarrow.array` of a list imports pandas where it is installed, which takes seconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sim.results.arrow import to_arrow, to_arrow_texts

if TYPE_CHECKING:
    from collections.abc import Sequence


def to_column(values: Sequence[Any]) -> pa.Array:
    """Return numbers, truths or texts, and None for a missing one, as a column.

    Where they are of several kinds, as JSON text.
    """
    is_there = np.array([value is not None for value in values], bool)
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.nulls(len(values))
    if kinds <= {int, float}:
        kind = np.dtype(np.int64 if kinds == {int} else np.float64)
        filled = to_arrow(np.array([value or 0 for value in values], kind))
    elif kinds == {bool}:
        bits = _bits(np.array([bool(value) for value in values], bool))
        filled = pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])
    else:
        filled = to_arrow_texts([_text(value) for value in values])
    if is_there.all():
        return filled
    buffers = [_bits(is_there), *filled.buffers()[1:]]
    return pa.Array.from_buffers(filled.type, len(values), buffers)


def _bits(truths: Any) -> pa.Buffer:
    return pa.py_buffer(np.packbits(truths, bitorder="little"))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
