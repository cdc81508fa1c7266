"""The log of steps that the engine fills, and the columns that are made of it."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.costs.base import BatchShape, StepCost, pricer_of
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

FACTS = (
    "step",
    "start_s",
    "num_running",
    "num_waiting",
    "num_swapped",
    *BatchShape._fields,
    *CacheUsage._fields,
    "num_preempted",
    "num_recomputed_tokens",
)
"""The words of a packed step: columns of `sim.results.schema.STEPS`, and the counts of
its shape. What is in neither (costs, sums) follows from them."""

_HEAD = (
    "step",
    "num_decodes",
    "num_waiting",
    "num_logical_tokens",
    "num_physical_blocks",
    "num_logical_blocks",
    "num_usable_blocks",
    "block_size",
)
"""What a stretch begins with; its steps follow from it."""

_CODES = {"int64": "q", "float64": "d"}
_KINDS = [schema.STEPS.get(name, "int64") for name in FACTS]

pack_facts = Struct("=" + "".join(_CODES[kind] for kind in _KINDS)).pack
"""From `FACTS` of a step, right after the scheduler call, to its packed row."""

pack_head = Struct(f"={len(_HEAD) + 2}qd").pack
"""From the fields of a stretch to its packed head.

They are the index of its first step, its decodes, waiting requests, the tokens that the
decodes of the first step attend to, physical and logical blocks before it, usable
blocks, the block size, the number of steps, how many rows stand in `StepLog.packed`,
and the start of the first step in seconds.
"""

_HEADS = np.dtype(
    [(name, np.int64) for name in (*_HEAD, "length", "rows_before")]
    + [("start_s", np.float64)]
)
_COST_FIELDS = list(schema.STEPS)[2 : 2 + len(StepCost._fields)]
# Words of 8 bytes, until they are emitted.
_COLUMNS = schema.STEPS | {"extrapolated": "float64"}
_INDEX = {name: index for index, name in enumerate(_COLUMNS)}
_STORED = [(index, _INDEX[name]) for index, name in enumerate(FACTS) if name in _INDEX]
_DECODES, _PREFILL_TOKENS = map(FACTS.index, ("num_decodes", "num_prefill_tokens"))
_SHAPE = slice(_DECODES, _DECODES + len(BatchShape._fields))

CHUNK_ROWS = 8192
"""Steps told one by one, or in stretches, that are turned into columns at once."""
_ROOM_ROWS = BATCH_ROWS + 4 * CHUNK_ROWS


class StepLog:
    """Steps as the engine takes them, until they are a batch of columns.

    ::

        packed              rows of steps taken in full            --.
        heads, ends_s,      stretches of quiet steps, and where     --+--> batches
        new_blocks          they stand among the rows

    The engine appends to these lists itself: a call a step would cost a twentieth of
    a run. A value is a word of 8 bytes, the same for integers and floats; objects kept
    for a while would push what the loop works on out of the processor's caches.

    Parameters
    ----------
    emit
        Takes each batch of `BATCH_ROWS` rows, and the shorter last one: the columns of
        `sim.results.schema.STEPS`. They change once it has returned, unless it says
        that they are kept.

    Attributes
    ----------
    packed
        A row of `pack_facts` for each step taken in full. Call `flush` when there are
        `CHUNK_ROWS`, or as many `ends_s`, before a step is added.
    heads
        A `pack_head` for each stretch: steps in a row in which the same decodes run
        and nothing else happens.
    ends_s, new_blocks
        For each step of the stretches: its end in seconds, and blocks that tables took.
    costs
        For each of `packed` what the cost model said, if it prices step by step.
    finished
        Row in the log, and how many requests the output of that step finished.
    """

    def __init__(self, emit: Callable[[Batch], bool]) -> None:
        self.packed: list[bytes] = []
        self.heads: list[bytes] = []
        self.ends_s = array("d")
        self.new_blocks = array("q")
        self.costs: list[StepCost] = []
        self.finished: list[tuple[int, int]] = []
        self._emit = emit
        self._cost_model: CostModel | None = None
        self._pricer: StepPricer | None = None
        self._columns = _zero_columns(_ROOM_ROWS)
        self._is_fresh = True  # what lies behind the rows is zero
        self._num_rows = 0

    def price_by(self, cost_model: CostModel) -> bool:
        """Let costs be asked of a model when columns are made.

        Returns
        -------
        bool
            Whether it knows all of them by then; otherwise those of steps taken in
            full must be in `costs`.
        """
        self._cost_model, self._pricer = cost_model, pricer_of(cost_model)
        return self._pricer is not None

    def flush(self) -> None:
        """Turn the log into columns; its latest step must have ended."""
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
        if num_rows:
            costs = self._priced(shapes.T, told_rows, quiet_rows)
            for name, values in zip(_COST_FIELDS, costs.T, strict=True):
                _put(table, name, slice(None), values)
        _fill_bounds(table)
        num_finished = table[_INDEX["num_finished"]]
        for row, num_requests in self.finished:
            num_finished[row] = num_requests
        self._forget()
        self._num_rows += num_rows
        self._emit_full()

    def _priced(self, shapes: Integers, told: Rows, quiet: Rows) -> Floats:
        """Return a `StepCost` a row."""
        if self._pricer is not None:
            return self._pricer.columns(shapes)
        model = self._cost_model
        assert model is not None
        costs = np.empty((len(shapes), len(StepCost._fields)))
        if self.costs:
            costs[told] = self.costs
        if self.heads:
            costs[quiet] = [
                model.step(BatchShape(*shape)) for shape in shapes[quiet].tolist()
            ]
        return costs

    def _forget(self) -> None:
        """Let go of what was told."""
        for told in (self.packed, self.heads, self.costs, self.finished):
            told.clear()
        del self.ends_s[:], self.new_blocks[:]

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


class UnkeptLog(StepLog):
    """A log that keeps nothing."""

    def flush(self) -> None:
        self._forget()

    def close(self) -> None:
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
    for source, target in _STORED:
        if packed[source].any():
            table[target][rows] = packed[source]
    batched = table[_INDEX["num_batched_tokens"]]
    batched[rows] = packed[_DECODES] + packed[_PREFILL_TOKENS]


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
