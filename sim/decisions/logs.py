"""Decision logs: one line a step, in the words of each generation."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from cache.sequences import SequenceStatus
from sim.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from sim.request import Request
    from sim.scheduler.group_output import GroupSchedulerOutput
    from sim.scheduler.groups import GroupScheduler
    from sim.scheduler.v1 import V1Scheduler

Line = dict[str, Any]


class StepLog(Protocol):
    """What a generation's line says."""

    def batch(self, output: Any) -> Line:
        """Return the batch, what was preempted and moved, and changed tables."""
        ...

    def queues(self) -> Line:
        """Return queues and free blocks, right after the call."""
        ...

    def free(self) -> list[int]:
        """Return the number of free blocks of each tier."""
        ...


class _Tables:
    """Block tables as last logged, to log changes only."""

    def __init__(self) -> None:
        self._logged: dict[str, list[int]] = {}

    def change(self, key: str, ids: list[int]) -> list[Any] | None:
        """Return ``[keep, ids behind them]``, or None if nothing changed."""
        last = self._logged.get(key, [])
        if ids == last:
            return None
        keep = 0
        for now, before in zip(ids, last, strict=False):
            if now != before:
                break
            keep += 1
        self._logged[key] = ids
        return [keep, ids[keep:]]


class V1Log:
    """Lines of the `v1` generation."""

    def __init__(self, scheduler: V1Scheduler, names: Sequence[str]) -> None:
        self.scheduler = scheduler
        self.names = names
        self._tables = _Tables()

    def batch(self, output: Any) -> Line:
        """See `StepLog.batch`."""
        admitted = {request.request_id for request in output.admitted}
        line: Line = {"sched": [], "nbt": output.num_batched_tokens}
        cached: dict[str, int] = {}
        tables: dict[str, list[Any]] = {}
        for request, num_tokens in zip(
            output.scheduled, output.num_scheduled_tokens, strict=True
        ):
            name = self.names[request.request_id]
            computed = request.num_computed_tokens - num_tokens
            kind = "r"
            if request.request_id in admitted:
                kind = "c" if request.num_preemptions else "n"
                cached[name] = computed
            line["sched"].append([name, num_tokens, kind, computed])
            ids = self.scheduler.kv_cache_manager.get_block_ids(request)
            if change := self._tables.change(name, ids):
                tables[name] = change
        if cached and self.scheduler.kv_cache_manager.enable_caching:
            line["cached"] = cached
        if preempted := preemptions(output, self.names):
            line["preempt"] = preempted
        if tables:
            line["bt"] = tables
        return line

    def queues(self) -> Line:
        """See `StepLog.queues`."""
        scheduler = self.scheduler
        line: Line = {
            "waiting": _names(scheduler.waiting, self.names),
            "running": _names(scheduler.running, self.names),
            "free": self.free(),
        }
        if scheduler.kv_cache_manager.enable_caching:
            line["hashes"] = len(scheduler.kv_cache_manager.block_pool.cached_blocks)
        return line

    def free(self) -> list[int]:
        """See `StepLog.free`."""
        return [self.scheduler.kv_cache_manager.block_pool.num_free_blocks]


class GroupLog:
    """Lines of the generations that schedule sequence groups.

    Parameters
    ----------
    generation
        ``"cacheflow"``, ``"v0_2"`` or ``"v0"``: each has its own batch entries.
    """

    def __init__(
        self, scheduler: GroupScheduler, names: Sequence[str], generation: str
    ) -> None:
        self.scheduler = scheduler
        self.names = names
        self.generation = generation
        self._tables = _Tables()

    def batch(self, output: GroupSchedulerOutput) -> Line:
        """See `StepLog.batch`."""
        line: Line = {}
        if self.generation == "v0_2":
            line["kind"] = "prompt" if output.prompt_run else "decode"
        line["sched"] = self._entries(output)
        line["nbt"] = output.num_budgeted_tokens
        if output.num_hit_tokens:
            line["cached"] = {
                self.names[int(request_id)]: num_tokens
                for request_id, num_tokens in output.num_hit_tokens.items()
            }
        if preempted := preemptions(output, self.names):
            line["preempt"] = preempted
        if output.ignored:
            line["ignored"] = _names(output.ignored, self.names)
        for key, mapping in (
            ("swap_out", output.blocks_to_swap_out),
            ("swap_in", output.blocks_to_swap_in),
            ("copy", output.blocks_to_copy),
        ):
            if mapping:
                line[key] = [list(pair) for pair in mapping]
        if tables := self._changed_tables(output):
            line["bt"] = tables
        return line

    def _entries(self, output: GroupSchedulerOutput) -> list[list[Any]]:
        entries: list[list[Any]] = []
        for scheduled in output.scheduled_seq_groups:
            request = scheduled.seq_group.request
            assert request is not None
            name = self.names[request.request_id]
            num_tokens = scheduled.token_chunk_size
            kind = "p" if scheduled.is_prefill else "d"
            if self.generation == "v0_2":
                entries.append([name, num_tokens])
            elif self.generation == "cacheflow":
                entries.append([name, num_tokens, kind])
            elif scheduled.is_prefill:
                entries.append([name, num_tokens, kind, scheduled.num_computed_tokens])
            else:
                entries.append([name, 1, kind, 0])
        return entries

    def _changed_tables(self, output: GroupSchedulerOutput) -> dict[str, list[Any]]:
        tables: dict[str, list[Any]] = {}
        for scheduled in output.scheduled_seq_groups:
            for seq in scheduled.seq_group.get_seqs(SequenceStatus.RUNNING):
                ids = list(self.scheduler.block_manager.get_block_table(seq))
                if change := self._tables.change(str(seq.seq_id), ids):
                    tables[str(seq.seq_id)] = change
        return tables

    def queues(self) -> Line:
        """See `StepLog.queues`."""
        scheduler = self.scheduler
        return {
            name: [self.names[int(group.request_id)] for group in queue]
            for name, queue in (
                ("waiting", scheduler.waiting),
                ("running", scheduler.running),
                ("swapped", scheduler.swapped),
            )
        } | {"free": self.free()}

    def free(self) -> list[int]:
        """See `StepLog.free`."""
        manager = self.scheduler.block_manager
        return [manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()]


def preemptions(output: Any, names: Sequence[str]) -> list[list[str]]:
    """Return victims and modes, in the order performed."""
    return [
        [names[preemption.request.request_id], preemption.mode.value]
        for preemption in output.preemptions
    ]


def _names(requests: Iterable[Request], names: Sequence[str]) -> list[str]:
    return [names[request.request_id] for request in requests]


def write_log(lines: Iterable[Line], path: Path) -> int:
    """Write a log, whole or not at all; return its number of lines.

    Parameters
    ----------
    lines
        Written as they come.
    path
        Compressed if it ends in ``.gz``; the same lines give the same bytes.

    Raises
    ------
    OutputError
        If the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    num_lines = 0
    try:
        with partial.open("wb") as raw, _text(raw, path) as text:
            for line in lines:
                text.write(json.dumps(line, separators=(",", ":")) + "\n")
                num_lines += 1
        partial.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}; name another --out"
        ) from error
    finally:
        with suppress(OSError):  # no such directory: there is nothing to take away
            partial.unlink(missing_ok=True)
    return num_lines


def _text(raw: Any, path: Path) -> io.TextIOWrapper:
    stream = (
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
        if path.suffix == ".gz"
        else raw
    )
    return io.TextIOWrapper(stream, encoding="utf-8", newline="\n")


def read_log(path: Path) -> Iterator[Line]:
    """Read a log, compressed or not, line by line.

    Raises
    ------
    ConfigError
        With the file, the line and what is wrong.
    """
    number = 1
    try:
        with _opened(path) as text:
            for row in text:
                if not row.isspace():
                    yield _line(row)
                number += 1
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: not a log line: {error}") from error


def _opened(path: Path) -> TextIO:
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    if is_gzip:
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _line(row: str) -> Line:
    line = json.loads(row)
    if not isinstance(line, dict) or not isinstance(line.get("t"), int):
        raise ValueError("it is no object with a step 't'")  # noqa: TRY004  # bad file
    return line
