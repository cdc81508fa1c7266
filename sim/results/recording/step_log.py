"""The log of steps that the engine fills, and the columns that are made of it."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.costs.base import pricer_of
from sim.results import schema
from sim.results.recording.step_columns import (
    CHUNK_ROWS,
    COLUMNS,
    ColumnMaker,
    Kind,
    Section,
    cut,
)
from sim.results.tables.steps import BATCH_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.costs.base import CostModel, StepCost, StepPricer
    from sim.results.recording.step_columns import Column, Integers, Words
    from sim.results.tables.steps import Batch

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
        `sim.results.schema.STEPS`. Some cannot be written.
    num_logs
        How many engines keep one at a time: of many, each has shorter batches, so that
        together they do not hold more.
    maker
        Of their columns: one for all of a run.

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
        By turns an index in the log, and how many requests the output of that step
        finished; below 0 for steps before the latest `flush`.
    added
        Index in the log, and seconds of copies that the step takes beyond its price.
    read_once
        Index in the log, and tokens of a prefix that steps from there on read once for
        all of their requests; the first is that of the rows from 0 on.
    num_in_flight
        Of how many of the latest steps the output may be processed yet.
    outputs_s
        Where there may be such: when outputs were processed in seconds, one step after
        another; those in flight follow after the next `flush`.
    tell_outputs
        Called before these are read: adds times that were held back.
    """

    def __init__(
        self,
        emit: Callable[[Batch], None],
        num_logs: int = 1,
        maker: ColumnMaker | None = None,
    ) -> None:
        share = min(BATCH_ROWS, _MOST_ROWS_HELD // num_logs)
        least = min(CHUNK_ROWS, _LEAST_CHUNK_ROWS)
        self._chunk_rows = max(min(share // 2, CHUNK_ROWS), least)
        self._batch_rows = min(BATCH_ROWS, max(share, 2 * self._chunk_rows))
        self.chunk_ends = self._chunk_rows
        self.packed: list[bytes] = []
        room = bytes(8 * min(self._batch_rows, CHUNK_ROWS))
        self.ends_s = array("d", room)
        self.new_blocks = array("q", room)
        for words in (self.ends_s, self.new_blocks):
            _empty(words)
        self.facts = array("q")
        self.costs: list[StepCost] = []
        self.finished = array("q")
        self.added: list[tuple[int, float]] = []
        self.read_once = [(0, 0)]
        self.num_in_flight = 0
        self.outputs_s = array("d")
        self.tell_outputs: Callable[[], object] | None = None
        self._pool: tuple[int, int] | None = None
        self._only_stretches = False
        self._emit = emit
        self._maker = ColumnMaker() if maker is None else maker
        self._cost_model: CostModel | None = None
        self._pricer: StepPricer | None = None
        self._num_told = 0  # steps that were handed in
        self._num_rows = 0  # those of them that are no whole batch
        self._num_awaited = 0  # of the latest of them
        self._outputs_s = array("d")  # of those that were not emitted
        self._finished: list[Integers] = []  # rows of a step and its number
        self._parts: deque[tuple[int, list[Column]]] = deque()
        self._num_emitted = self._num_held = 0

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

    def note_read_once(self, num_tokens: int) -> None:
        """Note how much of a prefix all steps read once from the next row on."""
        if num_tokens != self.read_once[-1][1]:
            self.read_once.append((len(self.ends_s), num_tokens))

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
            self._hand_in()

    def flush(self) -> None:
        """Turn all logs into columns; the latest step of this one must have ended."""
        self._hand_in()
        self._maker.make()

    def _hand_in(self) -> None:
        """Let columns be made of what was told, at once or with those of other logs."""
        if self.tell_outputs is not None:
            self.tell_outputs()
        num_steps = len(self.ends_s)
        begun_s, num_before = self.ends_s, 1
        if self.num_in_flight:
            # with the output of the step before, which ran meanwhile
            begun_s, num_before = self.outputs_s, 2 - self._num_awaited
            self._outputs_s += self.outputs_s
            self._num_awaited += num_steps - len(self.outputs_s)
        finished = np.array(self.finished, np.int64).reshape(-1, 2)
        finished[:, 0] += self._num_told
        self._finished.append(finished)
        if num_steps:
            assert self._cost_model is not None
            section = Section(
                packed=b"".join(self.packed),
                num_steps=num_steps,
                begun_s=np.array(begun_s),
                num_before=num_before,
                new_blocks=np.array(self.new_blocks),
                facts=np.array(self.facts),
                costs=self.costs.copy(),
                added=self.added.copy(),
                read_once=self.read_once,
            )
            kind = Kind(
                *(self._cost_model, self._pricer, self._pool, self._only_stretches),
                has_facts=bool(self.facts),
            )
            self._num_told += num_steps
            self._num_rows += num_steps
            num_batches = (self._num_rows - self.num_in_flight) // self._batch_rows
            self._num_rows -= max(num_batches, 0) * self._batch_rows
            self._forget()
            self._maker.put(self, section, kind)
        self._forget()

    def _forget(self) -> None:
        """Let go of the steps that were told."""
        for told in (self.packed, self.costs, self.added):
            told.clear()
        for words in (self.ends_s, self.new_blocks, self.facts, self.outputs_s):
            _empty(words)
        del self.finished[:]
        self.read_once = [(0, self.read_once[-1][1])]
        self.chunk_ends = self._chunk_rows

    def close(self) -> None:
        """Emit all that is left; nothing is told afterwards."""
        self.flush()
        if self._num_held:
            self._emit(self._batch(self._num_held))

    def take(self, columns: list[Column], num_rows: int, *, are_shared: bool) -> None:
        """Take columns of steps that were handed in, and emit what is complete.

        What others share the memory of is not kept.
        """
        self._parts.append((num_rows, columns))
        self._num_held += num_rows
        while self._batch_rows <= self._num_held - self.num_in_flight:
            self._emit(self._batch(self._batch_rows))
        if are_shared and self._parts:
            num_left, rest = self._parts.pop()
            kept = [each if each is None else each.copy() for each in rest]
            self._parts.append((num_left, kept))

    def _batch(self, num_rows: int) -> Batch:
        """Return the first rows that are held, which are no longer."""
        parts, num_lacking = [], num_rows
        while num_lacking:
            size, columns = self._parts.popleft()
            if size > num_lacking:
                rest = cut(columns, num_lacking, size)
                self._parts.appendleft((size - num_lacking, rest))
                columns, size = cut(columns, 0, num_lacking), num_lacking
            parts.append((size, columns))
            num_lacking -= size
        batch = {
            name: self._joined(parts, index).view(kind)
            for index, (name, kind) in enumerate(COLUMNS.items())
        }
        kind = schema.STEPS["extrapolated"]
        batch["extrapolated"] = batch["extrapolated"].astype(kind)
        batch["num_finished"] = self._counted(num_rows)
        if self.num_in_flight:
            outputs_s = np.full(num_rows, np.nan)
            known_s = self._outputs_s[:num_rows]
            outputs_s[: len(known_s)] = known_s
            del self._outputs_s[:num_rows]
            batch["output_s"] = outputs_s
        else:
            for name in schema.AHEAD_STEPS:
                del batch[name]
        self._num_emitted += num_rows
        self._num_held -= num_rows
        return batch

    def _joined(self, parts: Sequence[tuple[int, list[Column]]], index: int) -> Words:
        """Return a column of several parts."""
        columns = [columns[index] for _, columns in parts]
        sizes = [size for size, _ in parts]
        if all(column is None for column in columns):
            return self._maker.zeros(sum(sizes))
        return np.concatenate(
            [
                self._maker.zeros(size) if column is None else column
                for size, column in zip(sizes, columns, strict=True)
            ]
        )

    def _counted(self, num_rows: int) -> Integers:
        """Return how many requests finished with each of the first rows."""
        finished = np.concatenate(self._finished)
        is_later = finished[:, 0] >= self._num_emitted + num_rows
        self._finished = [finished[is_later]]
        steps, nums = finished[~is_later].T
        num_finished = np.zeros(num_rows, np.int64)
        num_finished[steps - self._num_emitted] = nums
        return num_finished


def _empty(words: array[Any]) -> None:
    """Empty an array that keeps its room, of which it gives back 16 words or more.

    It grows by sixteenths, and moves: of many engines each word was copied ten times.
    """
    while words:
        del words[-15:]


class UnkeptLog(StepLog):
    """A log that keeps nothing."""

    def _hand_in(self) -> None:
        if self.tell_outputs is not None:
            self.tell_outputs()
        self._forget()

    def close(self) -> None:
        self._forget()
