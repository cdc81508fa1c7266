"""Decision logs of the `sglang` generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.sglang.windows import WindowedSlots
from sim.scheduler.log.lines import Line, Names, TableChanges, names_of
from sim.scheduler.sglang.decode import DecodeScheduler
from sim.scheduler.sglang.prefill import PrefillScheduler
from sim.scheduler.sglang.requests import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request
    from sim.scheduler.sglang.requests import Entry, SglangOutput
    from sim.scheduler.sglang.scheduler import SglangScheduler


class SglangLog:
    """Lines of the `sglang` generation.

    An entry of a batch with prompts is ``[request, tokens, tokens before, request
    slot]``; the batch of a decode has names. Tables hold slots, or pages.
    """

    def __init__(self, scheduler: SglangScheduler, names: Names) -> None:
        self.scheduler = scheduler
        self.names = names
        self._tables, self._windows = TableChanges(), TableChanges()

    def batch(self, output: SglangOutput) -> Line:
        line: Line = {}
        for key, requests in (
            ("dropped", output.dropped),
            ("reject", output.rejected),
            ("retract", output.retracted),
            ("preempt", output.preempted),
        ):
            if requests:
                line[key] = names_of(requests, self.names)
        line |= self.evictions()
        line["mode"] = "idle" if output.mode is None else output.mode.value
        if output.mode is None:
            return line
        line["batch"] = [
            self._name(entry)
            if output.mode is Mode.DECODE
            else [self._name(entry), num_new, before, entry.slot]
            for entry, before, num_new in self._entries(output)
        ]
        if tables := self._changed_tables(output):
            line["kv"] = tables
        if windows := self._changed_windows(output):
            line["swa"] = windows
        return line

    def evictions(self) -> Line:
        """Return what the tree has lost since its evictions were counted."""
        tree, size = self.scheduler.tree, self.scheduler.settings.page_size
        if tree is None or not tree.evictions:
            return {}
        found: list[list[Any]] = [
            [asked, [[length, first // size] for length, first in removed]]
            for asked, removed in tree.evictions
        ]
        if tree.window is not None:  # the same of layers with a window behind it
            for line, (asked, removed) in zip(
                found, tree.window.evictions, strict=True
            ):
                line.append(asked)
                line.append([[length, first // size] for length, first in removed])
        return {"evict": found}

    def _entries(self, output: SglangOutput) -> list[tuple[Entry, int, int]]:
        """Return the batch, decodes with the tokens before them as the release says.

        It goes by what they have written, which is not what they store where a prompt
        was cut for good: by a request without EOS that was cut in the same call.
        """
        if self.scheduler.settings.makes_plans:  # which says what they store
            return output.entries
        num_prompts = len(output.entries) - output.num_decoding
        is_ahead = self.scheduler.settings.overlap
        decodes = [
            (entry, entry.num_tokens - (not is_ahead), num_new)
            for entry, _, num_new in output.entries[num_prompts:]
        ]
        return output.entries[:num_prompts] + decodes

    def _name(self, entry: Entry) -> str:
        return self.names[entry.request.request_id]

    def _names(self, entries: Iterable[Entry]) -> list[str]:
        return [self._name(entry) for entry in entries]

    def _changed_tables(self, output: SglangOutput) -> dict[str, list[Any]]:
        size = self.scheduler.settings.page_size
        tables = {}
        for entry, _, _ in output.entries:
            ids = (entry.table.slots[::size] // size).tolist()
            name = self._name(entry)
            if change := self._tables.change(name, ids):
                tables[name] = change
        return tables

    def _changed_windows(self, output: SglangOutput) -> dict[str, list[Any]]:
        """Return the tables of layers with a window, 0 where they hold no page."""
        slots = self.scheduler.holdings.allocator
        if not isinstance(slots, WindowedSlots):
            return {}
        size, tables = slots.page_size, {}
        for entry, _, _ in output.entries:
            ids = (slots.peers(entry.table.slots[::size]) // size).tolist()
            name = self._name(entry)
            if change := self._windows.change(name, ids):
                tables[name] = change
        return tables

    def requests(self) -> list[Request]:
        return list(self.scheduler.unfinished)

    def queries(self, output: SglangOutput) -> Line:
        del output
        return {}

    def queues(self) -> Line:
        scheduler = self.scheduler
        line: Line = {}
        if scheduler.chunked is not None:
            line["chunked"] = self._name(scheduler.chunked)
        line["waiting"] = self._names(
            scheduler.arrived
            if isinstance(scheduler, DecodeScheduler)
            else scheduler.queue.entries
        )
        line["running"] = self._names(scheduler.running_batch.entries)
        if scheduler.running_batch.is_full:
            line["full"] = True
        line["ratio"] = scheduler.new_token_ratio
        line["free"] = self.free()
        if scheduler.tree is not None:
            line["nodes"] = scheduler.tree.num_nodes
        return line

    def beside(self) -> dict[str, list[str]]:
        """Return the queues of an engine that only prefills, or only decodes."""
        scheduler = self.scheduler
        if isinstance(scheduler, PrefillScheduler):
            return {
                "bootstrapping": self._names(scheduler.bootstrapping),
                "in_flight": self._names(scheduler.in_flight.values()),
            }
        assert isinstance(scheduler, DecodeScheduler)
        return {
            "preallocating": self._names(scheduler.preallocating),
            "transferring": self._names(scheduler.transferring),
            "retracted": self._names(scheduler.retracted),
        }

    def joined(self, output: SglangOutput) -> Line:
        """Return who joins with a first token, and the rows of the table."""
        return {
            "joined": [[self._name(each), each.slot] for each, _, _ in output.entries]
        }

    def free(self) -> list[int]:
        cache, tree = self.scheduler.cache, self.scheduler.tree
        slots = cache.allocator
        found = [
            slots.num_available_tokens,
            cache.num_evictable_tokens,
            cache.num_protected_tokens,
        ]
        if isinstance(slots, WindowedSlots):
            window = None if tree is None else tree.window
            found += (
                slots.num_available_peers,
                0 if window is None else window.num_evictable_tokens,
                0 if window is None else window.num_protected_tokens,
            )
        return found

    def forget(self, request: Request) -> None:
        for tables in (self._tables, self._windows):
            tables.forget(self.names[request.request_id])
