"""``schedule.jsonl.zst`` as a list of works: queries, block tables, moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sim.errors import UserError
from sim.scheduler.batch import Batch
from sim.scheduler.generations import GENERATIONS
from sim.scheduler.log.files import SCHEDULE_FORMAT, read_header, read_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sim.scheduler.batch import BatchShape

Pairs = tuple[tuple[int, int], ...]

SCHEDULE_FILE: Final = "schedule.jsonl.zst"
KINDS: Final = ("decode", "mixed", "prefill", "swap", "copy")
"""Kinds of steps; a step that moves blocks is of the last two."""


@dataclass(frozen=True, slots=True)
class Query:
    """One sequence in a step: its query tokens, its context and its blocks."""

    request: str
    name: str
    """Of the request (`v1`), or number of the sequence."""
    num_tokens: int
    """Query tokens."""
    context: int
    """Keys that the last of them sees, itself included."""
    table: tuple[int, ...]
    """Ids of the blocks that hold the context."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule."""

    number: int
    start_s: float
    end_s: float
    queries: tuple[Query, ...]
    swap_in: Pairs
    """``(CPU block, GPU block)``."""
    swap_out: Pairs
    """``(GPU block, CPU block)``."""
    copies: Pairs
    """``(from, to)`` on the GPU."""
    left: tuple[str, ...]
    """Names that ended since the step before was scheduled."""

    @property
    def shape(self) -> BatchShape:
        batch = Batch(0)
        for query in self.queries:
            batch.add(query.num_tokens, query.context)
        return batch.shape()._replace(
            num_swapped_in_blocks=len(self.swap_in),
            num_swapped_out_blocks=len(self.swap_out),
            num_copied_blocks=len(self.copies),
        )

    @property
    def kind(self) -> str:
        return kind_of(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do on the GPU."""
        return not (self.queries or self.swap_in or self.swap_out or self.copies)


def kind_of(shape: BatchShape) -> str:
    """Return the kind of a step: one of `KINDS`."""
    if shape.num_swapped_in_blocks or shape.num_swapped_out_blocks:
        return "swap"
    if shape.num_copied_blocks:
        return "copy"
    if not shape.num_prefills:
        return "decode"
    return "mixed" if shape.num_decodes else "prefill"


@dataclass(frozen=True, slots=True)
class Facts:
    """The header of a schedule: the engine, model and pools to execute it with."""

    scheduler: str
    engine_version: str
    model: str
    gpu: str
    tensor_parallel_size: int
    kv_cache_dtype: str
    block_size: int
    num_gpu_blocks: int
    """Ids are below it, the null block 0 of `v1` included."""
    num_cpu_blocks: int
    max_model_len: int


class Schedule:
    """A recorded schedule on disk: the results of a run, or the file itself."""

    def __init__(self, place: Path) -> None:
        path = place / SCHEDULE_FILE if place.is_dir() else place
        if not path.is_file():
            raise UserError(
                f"there is no schedule '{path}'; record one with 'kvsim run CONFIG "
                f"--record schedule'"
            )
        self.path = path
        self.facts = _facts(read_header(path), path)

    def steps(self) -> Iterator[Step]:
        """Yield all steps that have something to do, in order."""
        tables = _Tables(self.facts)
        for line in read_log(self.path):
            try:
                step = tables.step(line)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise UserError(
                    f"'{self.path.name}', step {line.get('t')}: {error!r} is no part "
                    "of a schedule that can be executed; record it again"
                ) from error
            if not step.is_empty:
                yield step


def _check_blocks(blocks: Iterable[int], count: int, where: str) -> None:
    """Refuse ids outside a pool: a GPU would read or write anywhere."""
    for block in blocks:
        if not 0 <= block < count:
            raise ValueError(f"block {block} of a {where} pool of {count}")


def _facts(header: Mapping[str, Any] | None, path: Path) -> Facts:
    if header is None or header.get("format") != SCHEDULE_FORMAT:
        raise UserError(
            f"'{path}' is no recorded schedule (format {SCHEDULE_FORMAT}); give what "
            "'kvsim run --record schedule' wrote"
        )
    try:
        facts = {key: header[key] for key in Facts.__dataclass_fields__}
    except KeyError as error:
        raise UserError(
            f"'{path}' has no {error.args[0]} in its header; record it again"
        ) from error
    facts["engine_version"] = str(facts["engine_version"])
    return Facts(**facts)


class _Tables:
    """Block tables after each line, of all sequences that still hold some."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        generation = GENERATIONS.get(facts.scheduler)
        # tables belong to sequences, or to requests where each is one
        self._groups = generation is None or generation.schedules_groups
        self._tables: dict[str, list[int]] = {}
        self._members: dict[str, set[str]] = {}  # sequences, by request
        self._ends = deque[tuple[float, list[str]]]()  # not seen by a call yet

    def step(self, line: Mapping[str, Any]) -> Step:
        # A request that ends while a step is in flight may have a slot in it.
        left: list[str] = []
        while self._ends and self._ends[0][0] <= line["start_s"]:
            left += self._leave(self._ends.popleft()[1])
        left += self._leave(line.get("abort", ()))
        self._ends.append((line["end_s"], line.get("fin", [])))
        for name, (keep, ids) in line.get("bt", {}).items():
            _check_blocks(ids, self._facts.num_gpu_blocks, "GPU")
            self._tables[name] = self._tables.get(name, [])[:keep] + ids
        queries = tuple(self._of_groups(line) if self._groups else self._of(line))
        return Step(
            number=line["t"],
            start_s=float(line["start_s"]),
            end_s=float(line["end_s"]),
            queries=queries,
            swap_in=self._pairs(line, "swap_in", ("CPU", "GPU")),
            swap_out=self._pairs(line, "swap_out", ("GPU", "CPU")),
            copies=self._pairs(line, "copy", ("GPU", "GPU")),
            left=tuple(left),
        )

    def _of(self, line: Mapping[str, Any]) -> Iterator[Query]:
        for name, num_tokens, _, before in line["sched"]:
            yield self._query(name, name, num_tokens, before + num_tokens)

    def _of_groups(self, line: Mapping[str, Any]) -> Iterator[Query]:
        entries = line.get("seqs", [])
        for (request, *_), queries in zip(line["sched"], entries, strict=True):
            for number, num_tokens, context in queries:
                self._members.setdefault(request, set()).add(str(number))
                yield self._query(request, str(number), num_tokens, context)

    def _query(self, request: str, name: str, num_tokens: int, context: int) -> Query:
        table, facts = self._tables[name], self._facts
        if not 0 < num_tokens <= context <= facts.max_model_len:
            raise ValueError(
                f"{num_tokens} tokens of a context of {context}, where a sequence has "
                f"at most {facts.max_model_len}"
            )
        if len(table) * facts.block_size < context:
            raise ValueError(f"{len(table)} blocks for a context of {context} tokens")
        return Query(request, name, num_tokens, context, tuple(table))

    def _pairs(
        self, line: Mapping[str, Any], key: str, pools: tuple[str, str]
    ) -> Pairs:
        pairs = tuple((int(first), int(second)) for first, second in line.get(key, ()))
        counts = {"GPU": self._facts.num_gpu_blocks, "CPU": self._facts.num_cpu_blocks}
        for side, pool in enumerate(pools):
            _check_blocks((pair[side] for pair in pairs), counts[pool], pool)
        return pairs

    def _leave(self, requests: Iterable[str]) -> list[str]:
        """Forget the tables of requests; return the names of those tables."""
        left: list[str] = []
        for request in requests:
            left += (
                sorted(self._members.pop(request, ())) if self._groups else [request]
            )
        for name in left:
            self._tables.pop(name, None)
        return left
