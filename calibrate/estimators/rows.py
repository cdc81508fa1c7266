"""Rows of whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def unique_rows(table: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Return the distinct rows of (n, c) in order, and which of them each row is.

    As `numpy.unique` along the first axis does, which compares rows as bytes and takes
    five times as long.
    """
    if not table.size:
        rows, places = np.unique(table, axis=0, return_inverse=True)
        return rows, places.astype(np.intp)
    order = np.lexsort(table.T[::-1])
    in_order = table[order]
    is_new = np.append(True, (in_order[1:] != in_order[:-1]).any(axis=1))
    places = np.empty(len(table), dtype=np.intp)
    places[order] = np.cumsum(is_new) - 1
    return in_order[is_new], places
