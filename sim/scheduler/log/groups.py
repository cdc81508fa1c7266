"""Decision logs of the generations that schedule sequence groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from cache.sequences import SequenceStatus
from sim.scheduler.log.lines import Line, Names, TableChanges, names_of, preemptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup
    from sim.scheduler.groups.scheduler import GroupScheduler
    from sim.scheduler.groups.sequence import SequenceGroup
    from sim.scheduler.request import Request


class GroupLog(ABC):
    """Lines of a generation that schedules groups; a subclass writes its entries."""

    def __init__(self, scheduler: GroupScheduler, names: Names) -> None:
        self.scheduler = scheduler
        self.names = names
        self._tables = TableChanges()
        self._keys: dict[int, set[str]] = {}  # of tables logged, by request id

    @abstractmethod
    def _entry(self, scheduled: ScheduledSequenceGroup) -> list[Any]:
        """Return the facts of a group in the batch, behind its name."""

    def batch(self, output: GroupSchedulerOutput) -> Line:
        line: Line = {
            "sched": [
                [self._name(scheduled.seq_group), *self._entry(scheduled)]
                for scheduled in output.scheduled_seq_groups
            ],
            "nbt": output.num_budgeted_tokens,
        }
        if output.num_hit_tokens:
            line["cached"] = {
                self.names[int(request_id)]: num_tokens
                for request_id, num_tokens in output.num_hit_tokens.items()
            }
        if preempted := preemptions(output, self.names):
            line["preempt"] = preempted
        if output.ignored:
            line["ignored"] = names_of(output.ignored, self.names)
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

    def queries(self, output: GroupSchedulerOutput) -> Line:
        if not output.scheduled_seq_groups:
            return {}
        return {
            "seqs": [
                [list(query) for query in entry.queries]
                for entry in output.scheduled_seq_groups
            ]
        }

    def _changed_tables(self, output: GroupSchedulerOutput) -> dict[str, list[Any]]:
        tables: dict[str, list[Any]] = {}
        for scheduled in output.scheduled_seq_groups:
            group = scheduled.seq_group
            for seq in group.get_seqs(SequenceStatus.RUNNING):
                key = str(seq.seq_id)
                ids = list(self.scheduler.block_manager.get_block_table(seq))
                if change := self._tables.change(key, ids):
                    tables[key] = change
                    self._keys.setdefault(int(group.request_id), set()).add(key)
        return tables

    def _name(self, group: SequenceGroup) -> str:
        return self.names[int(group.request_id)]

    def requests(self) -> list[Request]:
        scheduler = self.scheduler
        groups = (*scheduler.waiting, *scheduler.running, *scheduler.swapped)
        return [group.request for group in groups if group.request is not None]

    def queues(self) -> Line:
        scheduler = self.scheduler
        return {
            "waiting": self._names(scheduler.waiting),
            "running": self._names(scheduler.running),
            "swapped": self._names(scheduler.swapped),
            "free": self.free(),
        }

    def _names(self, groups: Iterable[SequenceGroup]) -> list[str]:
        return [self._name(group) for group in groups]

    def free(self) -> list[int]:
        manager = self.scheduler.block_manager
        return [manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()]

    def forget(self, request: Request) -> None:
        for key in self._keys.pop(request.request_id, ()):
            self._tables.forget(key)


class CacheflowLog(GroupLog):
    """An entry of the batch is ``[request, tokens, "p" or "d"]``."""

    def _entry(self, scheduled: ScheduledSequenceGroup) -> list[Any]:
        return [scheduled.token_chunk_size, "p" if scheduled.is_prefill else "d"]


class V02Log(GroupLog):
    """An entry of the batch is ``[request, tokens]``; the line says of what kind."""

    def _entry(self, scheduled: ScheduledSequenceGroup) -> list[Any]:
        return [scheduled.token_chunk_size]

    def batch(self, output: GroupSchedulerOutput) -> Line:
        return {"kind": "prompt" if output.prompt_run else "decode"} | super().batch(
            output
        )


class V0Log(GroupLog):
    """An entry of the batch is ``[request, tokens, "p" or "d", computed tokens]``."""

    def _entry(self, scheduled: ScheduledSequenceGroup) -> list[Any]:
        if not scheduled.is_prefill:
            return [1, "d", 0]
        return [scheduled.token_chunk_size, "p", scheduled.num_computed_tokens]
