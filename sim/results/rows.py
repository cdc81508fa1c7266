"""From what the engine tells of its steps to batches of columns."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.costs.base import BatchShape, pricer_of
from sim.results import schema
from sim.results.step_table import BATCH_ROWS
from sim.scheduler.base import CacheUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.costs.base import CostModel, StepPricer
    from sim.results.step_table import Batch

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Rows = slice | Integers
Heads = npt.NDArray[Any]
"""Stretches, of `_HEADS`."""

_COST_FIELDS = dict.fromkeys(list(schema.STEPS)[2:14], "float64")
# What a scheduler call says; BatchShape and CacheUsage stand in a row as they are.
_FACTS: dict[str, str] = {
    "step": "int64",
    "start_s": "float64",
    "num_running": "int64",
    "num_waiting": "int64",
    "num_swapped": "int64",
    **dict.fromkeys(BatchShape._fields, "int64"),
    **dict.fromkeys(CacheUsage._fields[:4], "int64"),
    **dict.fromkeys(CacheUsage._fields[4:], "float64"),
    "num_preempted": "int64",
    "num_recomputed_tokens": "int64",
}


def _packer(names: dict[str, str]) -> Callable[..., bytes]:
    codes = {"int64": "q", "float64": "d"}
    return Struct("=" + "".join(codes[kind] for kind in names.values())).pack


pack_facts = _packer(_FACTS)
"""From the facts of a step to the 8-byte words of its row; costs follow from them."""

pack_step = _packer(_FACTS | _COST_FIELDS)
"""The same, with the fields of its `StepCost` behind them."""

# Words of 8 bytes, until they are emitted.
_COLUMNS = schema.STEPS | {"extrapolated": "float64"}
_INDEX = {name: index for index, name in enumerate(_COLUMNS)}
# Words of a packed row, and where they go.
_FROM = [i for i, name in enumerate(_FACTS | _COST_FIELDS) if name in _COLUMNS]
_TO = [_INDEX[name] for name in (*_FACTS, *_COST_FIELDS) if name in _COLUMNS]
_SHAPE = slice(
    list(_FACTS).index("num_decodes"), list(_FACTS).index("num_physical_blocks")
)
_DECODES = list(_FACTS).index("num_decodes")
_PREFILL_TOKENS = list(_FACTS).index("num_prefill_tokens")

CHUNK_ROWS = 8192
"""Steps told one by one, or in stretches, that are turned into columns at once."""
_ROOM_ROWS = BATCH_ROWS + 4 * CHUNK_ROWS


class QuietSteps(NamedTuple):
    """Steps in a row in which the same decodes run and nothing else happens."""

    first_step: int
    start_s: float
    """Of the first; each later one starts where the one before ended."""
    end_s: list[float]
    """End of each step; at least one."""
    num_new_blocks: list[int]
    """Blocks that tables took in each step."""
    num_running: int
    """Also the number of decodes of each step."""
    num_waiting: int
    num_context_tokens: int
    """Tokens that the decodes of the first step attend to, which is also the logical
    tokens right after its scheduler call; each later step adds `num_running`."""
    num_physical_blocks: int
    """Before the first step."""
    num_logical_blocks: int
    """Before the first step; both grow by `num_new_blocks`."""
    num_usable_blocks: int
    block_size: int


# What is kept of a stretch besides its lists, and how many rows stand before it.
_HEAD = (
    "first_step",
    "num_running",
    "num_waiting",
    "num_context_tokens",
    "num_physical_blocks",
    "num_logical_blocks",
    "num_usable_blocks",
    "block_size",
)
_HEADS = np.dtype(
    [(name, np.int64) for name in (*_HEAD, "length", "rows_before")]
    + [("start_s", np.float64)]
)
pack_head = Struct(f"={len(_HEAD) + 2}qd").pack


class StepRows:
    """Steps that have been told, until they are a batch.

    ::

        packed      rows of steps told one by one                  --.
        stretches   of quiet steps, and where they stand among them --+--> batches

    A value is a word of 8 bytes, the same for integers and floats.

    Parameters
    ----------
    emit
        Takes each batch of `BATCH_ROWS` rows, and the shorter last one: the columns of
        `sim.results.schema.STEPS`. They change once it has returned, unless it says
        that they are kept.

    Attributes
    ----------
    packed
        Rows of `pack_step` or, once `price_by` was called, of `pack_facts`. Call
        `flush` when there are `CHUNK_ROWS`, before a step is added.
    """

    def __init__(self, emit: Callable[[Batch], bool]) -> None:
        self.packed: list[bytes] = []
        self._emit = emit
        # Of stretches, packed: objects kept for a while would push what the loop
        # works on out of the processor's caches.
        self.heads: list[bytes] = []
        self.ends_s = array("d")
        self.new_blocks = array("q")
        self._cost_model: CostModel | None = None
        self._pricer: StepPricer | None = None
        self.finished_rows: list[tuple[int, int]] = []
        self._columns = _zero_columns(_ROOM_ROWS)
        self._is_fresh = True  # what lies behind the rows is zero
        self._num_rows = 0

    def price_by(self, pricer: StepPricer, cost_model: CostModel) -> None:
        """Expect rows of `pack_facts`, whose costs are asked of `pricer` later on."""
        self._pricer, self._cost_model = pricer, cost_model

    def add(self, steps: QuietSteps, cost_model: CostModel) -> None:
        """Add steps whose rows follow from one another."""
        if cost_model is not self._cost_model or len(self.ends_s) >= CHUNK_ROWS:
            self.flush()
            self._cost_model = cost_model
        step, start_s, end_s, num_new_blocks, *counts = steps
        self.heads.append(
            pack_head(step, *counts, len(end_s), len(self.packed), start_s)
        )
        self.ends_s.extend(end_s)
        self.new_blocks.extend(num_new_blocks)

    def finished(self, num_requests: int) -> None:
        """Note how many requests the latest step finished."""
        row = len(self.packed) + len(self.ends_s) - 1
        self.finished_rows.append((row, num_requests))

    def flush(self) -> None:
        """Turn what was told into columns; the latest step must have ended."""
        num_told, num_rows = len(self.packed), len(self.packed) + len(self.ends_s)
        table = self._room(num_rows)
        heads = np.frombuffer(b"".join(self.heads), _HEADS)
        told_rows, quiet_rows = self._places(heads, num_rows)
        shapes = np.zeros((len(BatchShape._fields), num_rows), np.int64)
        if num_told:
            told = np.frombuffer(b"".join(self.packed), np.uint64)
            told = told.reshape(num_told, -1).T
            _fill(table, told_rows, told)
            shapes[:, told_rows] = told[_SHAPE].view(np.int64)
        if self.heads:
            self._expand(heads, table, quiet_rows, shapes)
        if self._pricer is not None:
            _fill_costs(table, slice(None), self._pricer.columns(shapes.T))
        elif self.heads:
            assert self._cost_model is not None
            costs = _costs(self._cost_model, shapes[:, quiet_rows].T)
            _fill_costs(table, quiet_rows, costs)
        _fill_bounds(table)
        num_finished = table[_INDEX["num_finished"]]
        for row, num_requests in self.finished_rows:
            num_finished[row] = num_requests
        self._forget()
        self._num_rows += num_rows
        self._emit_full()

    def _forget(self) -> None:
        """Let go of what was told."""
        self.packed.clear()
        self.heads.clear()
        del self.ends_s[:], self.new_blocks[:]
        self.finished_rows.clear()

    def close(self) -> None:
        """Emit all that is left; nothing is told afterwards."""
        self.flush()
        if self._num_rows:
            self._emit(_typed(self._columns, slice(self._num_rows)))
        self._columns = _zero_columns(0)
        self._num_rows = 0

    def _room(self, num_rows: int) -> list[Words]:
        """Return room for so many rows behind those there are, all zero."""
        until = self._num_rows + num_rows
        if until > len(self._columns[0]):
            self._columns = self._moved(0, until)
        room = [column[self._num_rows : until] for column in self._columns]
        if not self._is_fresh:
            for column in room:
                column[:] = 0
        return room

    def _places(self, heads: Heads, num_rows: int) -> tuple[Rows, Rows]:
        """Return the rows of the steps told one by one, and those of stretches."""
        if not self.heads:
            return slice(None), slice(0)
        if not self.packed:
            return slice(0), slice(None)
        quiet = np.repeat(heads["rows_before"], heads["length"])
        quiet += np.arange(len(quiet))
        is_told = np.ones(num_rows, dtype=np.bool_)
        is_told[quiet] = False
        return np.flatnonzero(is_told), quiet

    def _expand(
        self, heads: Heads, table: list[Words], rows: Rows, shapes: Integers
    ) -> None:
        """Fill in what follows from the stretches; their shapes, too."""
        new_blocks = np.frombuffer(self.new_blocks, np.int64)
        end_s = np.frombuffer(self.ends_s)
        columns = _expanded(heads, end_s, new_blocks)
        for name, values in columns.items():
            _put(table, name, rows, values)
        shapes[0, rows] = columns["num_decodes"]
        shapes[1, rows] = columns["num_logical_tokens"]

    def _emit_full(self) -> None:
        """Emit the batches that are complete and move the rest to the front."""
        begin, are_kept = 0, False
        while begin + BATCH_ROWS <= self._num_rows:
            batch = _typed(self._columns, slice(begin, begin + BATCH_ROWS))
            are_kept = self._emit(batch) or are_kept
            begin += BATCH_ROWS
        if not begin:
            return
        if are_kept:
            self._columns = self._moved(begin, _ROOM_ROWS)
        else:
            for column in self._columns:
                rest = column[begin : self._num_rows]
                column[: len(rest)] = rest.copy()
            self._is_fresh = False
        self._num_rows -= begin

    def _moved(self, begin: int, most: int) -> list[Words]:
        """Return the rows from `begin` on at the front of new memory."""
        columns = _zero_columns(most)
        for new, column in zip(columns, self._columns, strict=True):
            old = column[begin : self._num_rows]
            if old.any():
                new[: len(old)] = old
        self._is_fresh = True
        return columns


class UnkeptRows(StepRows):
    """Steps that nobody will read: told as others are, and let go."""

    def flush(self) -> None:
        """Let go of what was told."""
        self._forget()

    def close(self) -> None:
        """Emit nothing."""
        self._forget()


def _zero_columns(num_rows: int) -> list[Words]:
    """Return a column for each of `_COLUMNS`.

    What stays zero is never touched, and so takes no memory. An array each: one for all
    would come in huge pages, which take several times as long to be written for the
    first time where a virtual machine has to find them.
    """
    return [np.zeros(num_rows, np.uint64) for _ in _COLUMNS]


def _typed(columns: Sequence[Words], rows: slice) -> Batch:
    """Return words as what they are."""
    kinds = _COLUMNS.items()
    batch: Batch = {
        name: column[rows].view(kind)
        for column, (name, kind) in zip(columns, kinds, strict=True)
    }
    batch["extrapolated"] = batch["extrapolated"].astype(schema.STEPS["extrapolated"])
    return batch


def _put(table: list[Words], name: str, rows: Rows, values: npt.NDArray[Any]) -> None:
    """Put values into a column that is zero."""
    if values.any():
        typed = np.ascontiguousarray(values, dtype=_COLUMNS[name])
        table[_INDEX[name]][rows] = typed.view(np.uint64)


def _fill(table: list[Words], rows: Rows, packed: Words) -> None:
    """Put packed steps, a column each, into `rows` of the table."""
    for source, target in zip(_FROM, _TO, strict=True):
        if source < len(packed) and packed[source].any():
            table[target][rows] = packed[source]
    batched = table[_INDEX["num_batched_tokens"]]
    batched[rows] = packed[_DECODES] + packed[_PREFILL_TOKENS]


def _fill_costs(table: list[Words], rows: Rows, costs: Floats) -> None:
    """Put costs, a `StepCost` a row, into `rows` of the table."""
    for name, values in zip(_COST_FIELDS, costs.T, strict=True):
        _put(table, name, rows, values)


def _fill_bounds(table: list[Words]) -> None:
    """Let bounds that no cost model knew be the latency itself."""
    latency = table[_INDEX["latency_s"]]
    for name in ("latency_lo_s", "latency_hi_s"):
        column = table[_INDEX[name]]
        is_unknown = np.isnan(column.view(np.float64))
        column[is_unknown] = latency[is_unknown]


def _expanded(
    heads: Heads, end_s: Floats, new_blocks: Integers
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of quiet steps that are not zero, but for costs.

    Parameters
    ----------
    heads
        Of the stretches.
    end_s, new_blocks
        Of all their steps, one after the other.
    """
    lengths = heads["length"]
    first = np.cumsum(lengths) - lengths
    step, running, waiting, tokens, physical, logical, usable, block_size = (
        np.repeat(heads[name], lengths) for name in _HEAD
    )
    num_steps = len(step)
    offset = np.arange(num_steps) - np.repeat(first, lengths)
    tokens += offset * running
    taken = np.cumsum(new_blocks)
    taken -= np.repeat((taken - new_blocks)[first], lengths)
    physical += taken
    logical += taken
    start_s = np.empty(num_steps)
    start_s[1:] = end_s[:-1]
    start_s[first] = heads["start_s"]
    return {
        "step": step + offset,
        "start_s": start_s,
        "num_running": running,
        "num_waiting": waiting,
        "num_batched_tokens": running,
        "num_decodes": running,
        "kv_cache_usage": physical / usable,
        "num_physical_blocks": physical,
        "num_logical_blocks": logical,
        "num_physical_tokens": tokens - (logical - physical) * block_size,
        "num_logical_tokens": tokens,
    }


def _costs(model: CostModel, shapes: Integers) -> Floats:
    """Return `CostModel.step` of each row, (n, 12)."""
    pricer = pricer_of(model)
    if pricer is not None:
        return pricer.columns(shapes)
    costs = [model.step(BatchShape(*shape)) for shape in shapes.tolist()]
    return np.array(costs, dtype=np.float64)
