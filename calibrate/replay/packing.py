"""A step as flat arrays, as an engine hands them to the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from calibrate.replay.log import Step

    Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """The arrays of a step."""

    tokens: Ids
    """(num_tokens,), ids; sequences one after the other."""
    positions: Ids
    """(num_tokens,), places in their sequences."""
    slots: Ids
    """(num_tokens,), ``block * block_size + offset`` of each token's keys."""
    tables: NDArray[np.int32]
    """(num_queries, most blocks of one)."""
    last_rows: Ids
    """(num_queries,), the row of each query's last token: those are sampled."""
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_queries(self) -> int:
        return len(self.query_lens)

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_queries


def pack(step: Step, tokens: Sequence[Ids], block_size: int) -> Packed:
    """Return the arrays of a step, which has a query at least."""
    width = max(-(-query.context // block_size) for query in step.queries)
    tables = np.zeros((len(step.queries), width), np.int32)
    positions, slots = [], []
    for row, query in enumerate(step.queries):
        held = np.asarray(query.table[:width], np.int32)
        tables[row, : len(held)] = held
        at = np.arange(query.context - query.num_tokens, query.context)
        positions.append(at)
        slots.append(tables[row, at // block_size].astype(np.int64) * block_size)
        slots[-1] += at % block_size
    query_lens = tuple(query.num_tokens for query in step.queries)
    return Packed(
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(positions).astype(np.int64),
        np.concatenate(slots),
        tables,
        np.cumsum(query_lens) - 1,
        query_lens,
        tuple(query.context for query in step.queries),
    )
