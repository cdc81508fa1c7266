"""The log of steps that the engine fills, and the columns that are made of it."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.costs.base import StepCost, pricer_of
from sim.results import schema
from sim.results.tables.steps import BATCH_ROWS
from sim.scheduler.base import CacheUsage, stored_tokens
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from sim.costs.base import CostModel, StepPricer
    from sim.results.tables.steps import Batch

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

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
    "num_quiet_steps",
)
"""The words of a packed row: columns of `sim.results.schema.STEPS`, the counts of its
shape, and how many steps it stands for if it is a stretch, else 0. Costs and sums
follow from them."""

_CODES = {"int64": "q", "float64": "d"}
_AT = {name: index for index, name in enumerate(FACTS)}

_CODES_OF_FACTS = [_CODES[schema.STEPS.get(name, "int64")] for name in FACTS]

pack_facts = Struct("=" + "".join(_CODES_OF_FACTS)).pack
"""From `FACTS` to a packed row of `StepLog.packed`."""

_OF_STRETCH = (
    "step",
    "start_s",
    "num_waiting",
    "num_decodes",
    "num_decode_context_tokens",
    "num_physical_blocks",
    "num_logical_blocks",
    "num_logical_tokens",
    "num_quiet_steps",
)
_OF_FORMED_STEP = (
    "step",
    "start_s",
    "num_running",
    "num_waiting",
    *BatchShape._fields[:6],
    "num_physical_blocks",
    "num_logical_blocks",
    "num_logical_tokens",
    "num_preempted",
    "num_recomputed_tokens",
)


_IN_FACTS = ("num_physical_blocks", "num_logical_blocks", "num_logical_tokens")
"""Columns of `StepLog.facts`."""


def _packer_of(names: Collection[str]) -> Callable[..., bytes]:
    """Return a packer of these of `FACTS`, in their order; the others are 0."""
    pairs = zip(FACTS, _CODES_OF_FACTS, strict=True)
    codes = "".join(code if name in names else "8x" for name, code in pairs)
    return Struct("=" + codes).pack


pack_stretch = _packer_of(_OF_STRETCH)
"""From `_OF_STRETCH` to a packed row: a stretch in which all that run are decodes.

Its logical tokens are those of requests that do not run.
"""

pack_formed = _packer_of(_OF_FORMED_STEP)
"""From `_OF_FORMED_STEP` to the row of a step without an object, which moves no blocks.

Usage and stored tokens follow in both; see `StepLog.describe_pool`.
"""

_COST_FIELDS = list(schema.STEPS)[2 : 2 + len(StepCost._fields)]
# Words of 8 bytes, until they are emitted.
_COLUMNS = schema.STEPS | schema.AHEAD_STEPS | {"extrapolated": "float64"}
_INDEX = {name: index for index, name in enumerate(_COLUMNS)}
_SHAPE = slice(FACTS.index("num_decodes"), FACTS.index("num_physical_blocks"))

_ADDED_TO = [
    StepCost._fields.index(name) for name in ("total_s", "swap_s", "lo_s", "hi_s")
]

CHUNK_ROWS = 8192
"""Steps that are turned into columns at once, or a batch if that is shorter."""
_LEAST_CHUNK_ROWS = 256
_MOST_ROWS_HELD = 4 * BATCH_ROWS
"""That all engines of a run hold together, or each holds two of the shortest chunks."""


class StepLog:
    """Steps as the engine takes them, until they are a batch of columns.

    The engine appends to the lists itself: a call a step would cost a twentieth of a
    run. A value is a word of 8 bytes, the same for integers and floats; objects kept
    for a while would push what the loop works on out of the processor's caches.

    Parameters
    ----------
    emit
        Takes each batch of `BATCH_ROWS` rows, and the shorter last one: the columns of
        `sim.results.schema.STEPS`. They change once it has returned, unless it says
        that they are kept.
    num_logs
        How many engines keep one at a time: of many, each has shorter batches, so that
        together they do not hold more.

    Attributes
    ----------
    chunk_ends
        Call `end_chunk` when there are so many steps, before one is added.
    packed
        A row of `pack_facts` for each step, right after its scheduler call, and one for
        each stretch (steps in a row in which the same decodes run and nothing else
        happens), its blocks as before the first step.
    ends_s
        The end of each step in seconds.
    new_blocks
        For each step of the stretches, blocks that tables took.
    facts
        Instead, for each of them physical and logical blocks and logical tokens, where
        these do not follow from it.
    costs
        The price of each step outside of them, if the cost model prices step by step.
    finished
        Index in the log, and how many requests the output of that step finished; below
        0 for steps before the latest `flush`.
    added
        Index in the log, and seconds of copies that the step takes beyond its price.
    num_in_flight
        Of how many of the latest steps the output may be processed yet.
    outputs_s
        Where there may be such: when outputs were processed in seconds, one step after
        another; those in flight follow after the next `flush`.
    tell_outputs
        Called before these are read: adds times that were held back.
    """

    def __init__(self, emit: Callable[[Batch], bool], num_logs: int = 1) -> None:
        share = min(BATCH_ROWS, _MOST_ROWS_HELD // num_logs)
        least = min(CHUNK_ROWS, _LEAST_CHUNK_ROWS)
        self._chunk_rows = max(min(share // 2, CHUNK_ROWS), least)
        self._batch_rows = min(BATCH_ROWS, max(share, 2 * self._chunk_rows))
        self._room_rows = self._batch_rows + 2 * self._chunk_rows
        self.chunk_ends = self._chunk_rows
        self.packed: list[bytes] = []
        self.ends_s = array("d")
        self.new_blocks = array("q")
        self.facts = array("q")
        self.costs: list[StepCost] = []
        self.finished: list[tuple[int, int]] = []
        self.added: list[tuple[int, float]] = []
        self.num_in_flight = 0
        self.outputs_s = array("d")
        self.tell_outputs: Callable[[], object] | None = None
        self._num_awaited = 0  # of the latest rows
        self._pool: tuple[int, int] | None = None
        self._only_stretches = False
        self._emit = emit
        self._cost_model: CostModel | None = None
        self._pricer: StepPricer | None = None
        self._columns = _zero_columns(self._room_rows)
        self._is_fresh = True  # the room behind the rows is zero
        self._num_rows = 0

    @property
    def is_priced(self) -> bool:
        """Whether costs are asked of a model when columns are made."""
        return self._pricer is not None

    def price_by(self, cost_model: CostModel) -> bool:
        """Let costs be asked of a model when columns are made.

        Returns
        -------
        bool
            Whether it knows all of them by then; otherwise `costs` must be kept.
        """
        self._cost_model, self._pricer = cost_model, pricer_of(cost_model)
        return self._pricer is not None

    def describe_pool(
        self, num_usable_blocks: int, block_size: int, *, stretches: bool = False
    ) -> None:
        """Let usage and stored tokens follow from tokens and blocks that tables hold.

        Without a call of this the rows say them; with `stretches`, those of steps in
        full do.
        """
        self._pool = num_usable_blocks, block_size
        self._only_stretches = stretches

    def end_chunk(self) -> None:
        """Flush, or leave it to a later chunk where that completes no batch.

        Columns of few steps take as many calls of numpy as those of many, so that logs
        with short batches, of many engines, make columns of a batch at once. When a
        batch is complete does not depend on it.
        """
        num_steps = len(self.ends_s)
        num_rows = self._num_rows + num_steps - self.num_in_flight
        if num_steps < CHUNK_ROWS and num_rows < self._batch_rows:
            self.chunk_ends = num_steps + self._chunk_rows
        else:
            self.flush()

    def flush(self) -> None:
        """Turn the log into columns; its latest step must have ended."""
        if self.tell_outputs is not None:
            self.tell_outputs()
        if self.packed:
            table = self._room(len(self.ends_s))
            facts, is_quiet = self._facts()
            _put_some(table, FACTS, facts)
            shapes = facts[_SHAPE].view(np.int64)
            costs = self._priced(shapes.T, is_quiet)
            for row, seconds in self.added:
                costs[row, _ADDED_TO] += seconds
            _put_some(table, _COST_FIELDS, costs.T)
            _put(table, "num_batched_tokens", shapes[0] + shapes[3])
            _fill_bounds(table)
            num_finished = self._columns[_INDEX["num_finished"]]
            for row, num_requests in self.finished:
                num_finished[self._num_rows + row] = num_requests
            self._num_rows += len(self.ends_s)
        if self.num_in_flight:
            self._fill_outputs(len(self.ends_s))
        self._forget()
        self._emit_full()

    def _facts(self) -> tuple[Words, npt.NDArray[np.bool_]]:
        """Return `FACTS`, a row each, of all steps, and which are of stretches."""
        packed = np.frombuffer(b"".join(self.packed), np.uint64)
        packed = packed.reshape(-1, len(FACTS)).T
        lengths = packed[_AT["num_quiet_steps"]].view(np.int64)
        num_steps = np.maximum(lengths, 1)
        is_quiet = np.repeat(lengths > 0, num_steps)
        facts = np.repeat(packed, num_steps, axis=1)
        integers, floats = facts.view(np.int64), facts.view(np.float64)
        if is_quiet.any():
            self._go_on(integers, floats, num_steps, is_quiet)
        if self._pool is not None:
            num_usable_blocks, block_size = self._pool
            of = is_quiet if self._only_stretches else slice(None)
            num_blocks = integers[_AT["num_physical_blocks"]][of]
            floats[_AT["kv_cache_usage"]][of] = num_blocks / num_usable_blocks
            integers[_AT["num_physical_tokens"]][of] = stored_tokens(
                integers[_AT["num_logical_tokens"]][of],
                num_blocks,
                integers[_AT["num_logical_blocks"]][of],
                block_size,
            )
        return facts, is_quiet

    def _go_on(
        self,
        integers: Integers,
        floats: Floats,
        num_steps: Integers,
        is_quiet: npt.NDArray[np.bool_],
    ) -> None:
        """Make steps of a stretch, each like its first, follow one another."""
        firsts = np.cumsum(num_steps) - num_steps
        first = np.repeat(firsts, num_steps)
        offset = np.arange(len(first)) - first
        integers[_AT["step"]] += offset
        begun_s, num_before = self.ends_s, 1
        if self.num_in_flight:
            # with the output of the step before, which ran meanwhile
            begun_s, num_before = self.outputs_s, 2 - self._num_awaited
        start_s = floats[_AT["start_s"]]
        first_s = start_s[firsts]
        num_after = max(len(start_s) - num_before, 0)
        start_s[num_before:] = np.frombuffer(begun_s)[:num_after]
        start_s[firsts] = first_s
        num_decodes = integers[_AT["num_decodes"]] * is_quiet
        context = integers[_AT["num_decode_context_tokens"]]
        context += num_decodes * offset
        # All that run are decodes, and each has computed what it attends to.
        num_others = integers[_AT["num_logical_tokens"]][is_quiet]
        for name, words in (
            ("num_running", num_decodes),
            ("num_logical_tokens", context + integers[_AT["num_logical_tokens"]]),
        ):
            np.copyto(integers[_AT[name]], words, where=is_quiet)
        if self.facts:
            facts = np.frombuffer(self.facts, np.int64).reshape(-1, len(_IN_FACTS))
            for name, column in zip(_IN_FACTS, facts.T, strict=True):
                integers[_AT[name]][is_quiet] = column
            integers[_AT["num_logical_tokens"]][is_quiet] += num_others
            return
        new_blocks = np.zeros(len(first), np.int64)
        new_blocks[is_quiet] = np.frombuffer(self.new_blocks, np.int64)
        taken = np.cumsum(new_blocks)
        taken -= (taken - new_blocks).take(first)
        for name in ("num_physical_blocks", "num_logical_blocks"):
            integers[_AT[name]] += taken

    def _priced(self, shapes: Integers, is_quiet: npt.NDArray[np.bool_]) -> Floats:
        """Return a `StepCost` a row."""
        if self._pricer is not None:
            return self._pricer.columns(shapes)
        model = self._cost_model
        assert model is not None
        costs = np.empty((len(shapes), len(StepCost._fields)))
        if self.costs:
            costs[~is_quiet] = self.costs
        if is_quiet.any():
            costs[is_quiet] = [
                model.step(BatchShape(*shape)) for shape in shapes[is_quiet].tolist()
            ]
        return costs

    def _fill_outputs(self, num_more: int) -> None:
        """Put down when outputs were processed; those of so many more steps follow."""
        column = self._columns[_INDEX["output_s"]].view(np.float64)
        first = self._num_rows - num_more - self._num_awaited
        known = first + len(self.outputs_s)
        column[first:known] = self.outputs_s
        column[known : self._num_rows] = np.nan
        self._num_awaited = self._num_rows - known

    def _forget(self) -> None:
        """Let go of the steps that were told."""
        for told in (self.packed, self.costs, self.finished, self.added):
            told.clear()
        del self.ends_s[:], self.new_blocks[:], self.facts[:], self.outputs_s[:]
        self.chunk_ends = self._chunk_rows

    def close(self) -> None:
        """Emit all that is left; nothing is told afterwards."""
        self.flush()
        if self._num_rows:
            self._emit(self._typed(slice(self._num_rows)))
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

    def _emit_full(self) -> None:
        """Emit the batches that are complete and move the rest to the front."""
        begin, are_kept, size = 0, False, self._batch_rows
        while begin + size <= self._num_rows - self.num_in_flight:
            batch = self._typed(slice(begin, begin + size))
            are_kept = self._emit(batch) or are_kept
            begin += size
        if not begin:
            return
        if are_kept:
            self._columns = self._moved(begin, self._room_rows)
        else:
            for column in self._columns:
                rest = column[begin : self._num_rows]
                column[: len(rest)] = rest.copy()
            self._is_fresh = False
        self._num_rows -= begin

    def _typed(self, rows: slice) -> Batch:
        """Return rows with the types of their columns."""
        kinds = _COLUMNS.items()
        batch: Batch = {
            name: column[rows].view(kind)
            for column, (name, kind) in zip(self._columns, kinds, strict=True)
        }
        kind = schema.STEPS["extrapolated"]
        batch["extrapolated"] = batch["extrapolated"].astype(kind)
        if not self.num_in_flight:
            for name in schema.AHEAD_STEPS:
                del batch[name]
        return batch

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
        if self.tell_outputs is not None:
            self.tell_outputs()
        self._forget()

    def close(self) -> None:
        self._forget()


def _zero_columns(num_rows: int) -> list[Words]:
    """Return a column for each of `_COLUMNS`.

    A column that stays zero is never touched, and so takes no memory. An array each:
    one for all would come in huge pages, which take several times as long to be written
    for the first time where a virtual machine has to find them.
    """
    return [np.zeros(num_rows, np.uint64) for _ in _COLUMNS]


def _put_some(
    table: list[Words], names: Sequence[str], columns: npt.NDArray[Any]
) -> None:
    """Put those of some columns that have a name in the table and are not all zero."""
    are_told: npt.NDArray[np.bool_] = np.logical_or.reduce(columns, axis=1)
    for name, column, is_told in zip(names, columns, are_told, strict=True):
        if is_told and name in _INDEX:
            _put(table, name, column)


def _put(table: list[Words], name: str, values: npt.NDArray[Any]) -> None:
    """Put values, or their words, into a column that is zero."""
    if values.dtype != np.uint64:
        values = np.ascontiguousarray(values, _COLUMNS[name]).view(np.uint64)
    table[_INDEX[name]][:] = values


def _fill_bounds(table: list[Words]) -> None:
    """Let bounds that no cost model knew be the latency itself."""
    latency = table[_INDEX["latency_s"]]
    for name in ("latency_lo_s", "latency_hi_s"):
        column = table[_INDEX[name]]
        is_unknown = np.isnan(column.view(np.float64))
        column[is_unknown] = latency[is_unknown]
