"""Columns of steps, made of what the logs of one or of many engines were told."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sim.costs.base import ReadsPrefixesOnce, StepCost, pricer_of
from sim.results import schema
from sim.results.recording.step_rows import FACTS
from sim.scheduler.base import stored_tokens
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel, StepPricer

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Column = Words | None
"""Values of 8 bytes, or None if all are zero."""

COLUMNS: Final = schema.STEPS | schema.AHEAD_STEPS | {"extrapolated": "float64"}
"""Columns in words of 8 bytes, before they are emitted, and their types."""
INDEX: Final = {name: index for index, name in enumerate(COLUMNS)}

CHUNK_ROWS: Final = 8192
"""Steps that are turned into columns at once, or a batch if that is shorter."""

_AT: Final = {name: index for index, name in enumerate(FACTS)}
_SHAPE: Final = slice(_AT["num_decodes"], _AT["num_physical_blocks"])
_COST_FIELDS: Final = list(schema.STEPS)[2 : 2 + len(StepCost._fields)]
_ADDED_TO: Final = [
    StepCost._fields.index(name) for name in ("total_s", "swap_s", "lo_s", "hi_s")
]
_IN_FACTS: Final = ("num_physical_blocks", "num_logical_blocks", "num_logical_tokens")
"""Columns of `StepLog.facts`."""


class Kind(NamedTuple):
    """Properties of steps whose columns can be made at once.

    See `StepLog.price_by`, `StepLog.describe_pool` and `StepLog.facts`.
    """

    cost_model: CostModel
    pricer: StepPricer | None
    pool: tuple[int, int] | None
    only_stretches: bool
    has_facts: bool

    def is_like(self, other: Kind) -> bool:
        return self.cost_model is other.cost_model and self[2:] == other[2:]


class Section(NamedTuple):
    """The entries of a log for some steps in a row; see `StepLog`.

    `begun_s` are the times at which steps begin that follow another one of a stretch,
    from the step of number `num_before` on.
    """

    packed: bytes
    num_steps: int
    begun_s: Floats
    num_before: int
    new_blocks: Integers
    facts: Integers
    costs: Sequence[StepCost]
    added: Sequence[tuple[int, float]]
    read_once: Sequence[tuple[int, int]]


class TakesColumns(Protocol):
    """A log that hands sections in, `StepLog`."""

    def take(self, columns: list[Column], num_rows: int, *, are_shared: bool) -> None:
        """Take the columns of a section; see `StepLog.take`."""
        ...


class ColumnMaker:
    """Makes columns of what logs were told, in the order in which they hand it in.

    Calls of numpy take as long for a step as for hundreds. Of many engines, whose
    batches are short, the steps of several batches are turned into columns together.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[TakesColumns, Section]] = []
        self._num_steps = 0
        self._kind: Kind | None = None
        self._zeros: Words = np.zeros(0, np.uint64)

    def zeros(self, num_rows: int) -> Words:
        """Return a column of zeros that cannot be written: many share its memory."""
        if num_rows > len(self._zeros):
            self._zeros = np.zeros(num_rows, np.uint64)
            self._zeros.setflags(write=False)
        return self._zeros[:num_rows]

    def put(self, log: TakesColumns, section: Section, kind: Kind) -> None:
        """Take what a log was told; it gets its columns now, or with later ones."""
        if self._kind is None or not kind.is_like(self._kind):
            self.make()
            self._kind = kind
        self._waiting.append((log, section))
        self._num_steps += section.num_steps
        if self._num_steps >= CHUNK_ROWS:
            self.make()

    def make(self) -> None:
        """Give logs the columns of all that was put here."""
        waiting, self._waiting, self._num_steps = self._waiting, [], 0
        if not waiting:
            return
        assert self._kind is not None
        columns = _columns_of([section for _, section in waiting], self._kind)
        begin = 0
        for log, section in waiting:
            end = begin + section.num_steps
            own = cut(columns, begin, end)
            log.take(own, section.num_steps, are_shared=len(waiting) > 1)
            begin = end


def cut(columns: Sequence[Column], begin: int, end: int) -> list[Column]:
    """Return some rows of columns, as views."""
    return [column if column is None else column[begin:end] for column in columns]


def _columns_of(sections: Sequence[Section], kind: Kind) -> list[Column]:
    """Return `COLUMNS`, but for those that logs add, of sections in a row."""
    facts, is_quiet = _facts_of(sections, kind)
    shapes = facts[_SHAPE].view(np.int64)
    costs = _priced(shapes.T, is_quiet, sections, kind)
    first = 0
    for section in sections:
        end = first + section.num_steps
        if section.read_once != [(0, 0)]:
            _price_read_once(costs[first:end], shapes.T[first:end], section, kind)
        for row, seconds in section.added:
            costs[first + row, _ADDED_TO] += seconds
        first = end
    seconds_by_field = np.ascontiguousarray(costs.T)
    latency_s, *bounds_s = (
        seconds_by_field[_COST_FIELDS.index(name)]
        for name in ("latency_s", "latency_lo_s", "latency_hi_s")
    )
    for bound_s in bounds_s:  # that no cost model knew: the latency itself
        np.copyto(bound_s, latency_s, where=np.isnan(bound_s))
    table: list[Column] = [None] * len(COLUMNS)
    for names, columns in ((FACTS, facts), (_COST_FIELDS, seconds_by_field)):
        are_told: npt.NDArray[np.bool_] = np.logical_or.reduce(columns, axis=1)
        for name, column, is_told in zip(names, columns, are_told, strict=True):
            if is_told and name in INDEX:
                table[INDEX[name]] = column.view(np.uint64)
    num_tokens: Integers = shapes[0] + shapes[3]
    table[INDEX["num_batched_tokens"]] = num_tokens.view(np.uint64)
    return table


def _facts_of(
    sections: Sequence[Section], kind: Kind
) -> tuple[Words, npt.NDArray[np.bool_]]:
    """Return `FACTS`, a row each, of all steps, and which are of stretches."""
    packed = np.frombuffer(b"".join([each.packed for each in sections]), np.uint64)
    packed = packed.reshape(-1, len(FACTS)).T
    lengths = packed[_AT["num_quiet_steps"]].view(np.int64)
    num_steps = np.maximum(lengths, 1)
    is_quiet = np.repeat(lengths > 0, num_steps)
    facts = np.repeat(packed, num_steps, axis=1)
    integers, floats = facts.view(np.int64), facts.view(np.float64)
    if is_quiet.any():
        _go_on(integers, floats, num_steps, is_quiet, sections, kind)
    if kind.pool is not None:
        num_usable_blocks, block_size = kind.pool
        of = is_quiet if kind.only_stretches else slice(None)
        num_blocks = integers[_AT["num_physical_blocks"]][of]
        floats[_AT["kv_cache_usage"]][of] = num_blocks / num_usable_blocks
        integers[_AT["num_physical_tokens"]][of] = stored_tokens(
            integers[_AT["num_logical_tokens"]][of],
            num_blocks,
            integers[_AT["num_logical_blocks"]][of],
            block_size,
        )
    return facts, is_quiet


def _go_on(  # noqa: PLR0917 - columns, and what they are made of
    integers: Integers,
    floats: Floats,
    num_steps: Integers,
    is_quiet: npt.NDArray[np.bool_],
    sections: Sequence[Section],
    kind: Kind,
) -> None:
    """Make steps of a stretch, each like its first, follow one another."""
    firsts = np.cumsum(num_steps) - num_steps
    first = np.repeat(firsts, num_steps)
    offset = np.arange(len(first)) - first
    integers[_AT["step"]] += offset
    start_s = floats[_AT["start_s"]]
    first_s = start_s[firsts]
    begin = 0
    for section in sections:
        end = begin + section.num_steps
        later_s = start_s[begin:end][section.num_before :]
        later_s[:] = section.begun_s[: len(later_s)]
        begin = end
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
    if kind.has_facts:
        facts = _chained([each.facts for each in sections]).reshape(-1, len(_IN_FACTS))
        for name, column in zip(_IN_FACTS, facts.T, strict=True):
            integers[_AT[name]][is_quiet] = column
        integers[_AT["num_logical_tokens"]][is_quiet] += num_others
        return
    new_blocks = np.zeros(len(first), np.int64)
    new_blocks[is_quiet] = _chained([each.new_blocks for each in sections])
    taken = np.cumsum(new_blocks)
    taken -= (taken - new_blocks).take(first)
    for name in ("num_physical_blocks", "num_logical_blocks"):
        integers[_AT[name]] += taken


def _chained(arrays: Sequence[Integers]) -> Integers:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _priced(
    shapes: Integers,
    is_quiet: npt.NDArray[np.bool_],
    sections: Sequence[Section],
    kind: Kind,
) -> Floats:
    """Return a `StepCost` a row."""
    if kind.pricer is not None:
        return kind.pricer.columns(shapes)
    costs = np.empty((len(shapes), len(StepCost._fields)))
    told: list[Any] = [*chain.from_iterable(each.costs for each in sections)]
    if told:
        costs[~is_quiet] = told
    if is_quiet.any():
        costs[is_quiet] = [
            kind.cost_model.step(BatchShape(*shape))
            for shape in shapes[is_quiet].tolist()
        ]
    return costs


def _price_read_once(
    costs: Floats, shapes: Integers, section: Section, kind: Kind
) -> None:
    """Put in the prices of steps that read a prefix once for all."""
    model = kind.cost_model
    assert isinstance(model, ReadsPrefixesOnce)
    rows, told = np.array(section.read_once).T
    column = np.repeat(told, np.diff(rows, append=section.num_steps))
    for num_tokens in set(told.tolist()) - {0}:
        own = model.reading_once(num_tokens)
        is_own, pricer = column == num_tokens, pricer_of(own)
        if pricer is not None:
            costs[is_own] = pricer.columns(shapes[is_own])
        elif is_own.any():
            own_shapes = shapes[is_own].tolist()
            costs[is_own] = [own.step(BatchShape(*shape)) for shape in own_shapes]
