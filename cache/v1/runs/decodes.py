"""Decodes of requests whose tables are runs of blocks, and windows beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cache.v1.groups.decodes import Decodes, GroupTables

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cache.v1.groups.decodes import DecodeRequest
    from cache.v1.runs.windows import GroupRunTable
    from cache.v1.tables import TableRequest


class Tables(GroupTables, Protocol):
    """`cache.v1.runs.group_tables.GroupRunTables`, as decodes need them."""

    block_size: int

    def give_up(self, table: GroupRunTable, num_computed_tokens: int) -> None: ...

    def open_blocks(self, table: GroupRunTable) -> None: ...

    def register_blocks(self, tables: Collection[GroupRunTable]) -> None: ...

    def register_windows(
        self, request: TableRequest, table: GroupRunTable, first: int, stop: int
    ) -> None: ...


class RunDecodes(Decodes):
    """`Decodes` of `GroupRunTables`."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables, {tables.block_size - 1})
        self._run_tables = tables

    def _go_on(self, requests: Iterable[DecodeRequest], step: int) -> None:
        tables, looks, period = self._run_tables, self._looks, self._period
        num_in_flight = self._num_in_flight
        for request in requests:
            num_computed_tokens = request.base_tokens + step - 1
            givers, openers, registers = looks[num_computed_tokens % period]
            table: GroupRunTable = request.table
            if givers:
                tables.give_up(table, num_computed_tokens - num_in_flight)
            if openers:
                tables.open_blocks(table)
            if registers:
                first = table.num_registered
                tables.register_blocks((table,))
                tables.register_windows(request, table, first, first + 1)
