"""What a connector asks of a call of the scheduler."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sim.scheduler.v1.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.exchange import Exchange, GroupBlockIds

_running_order = attrgetter("order")


class AskedScheduler(Scheduler):
    """`Scheduler` that answers to `sim.scheduler.v1.connectors.base.Batch`."""

    connector: Any

    def preempted(self) -> Iterable[Request]:
        return [each.request for each in self.preemptions]

    def num_tokens_after(self, requests: Iterable[Request]) -> dict[Request, int]:
        asked = sorted(requests, key=_running_order)
        if not asked:
            return {}
        chunks = {request: after for request, _, after in self.prompts}
        idle = {*self.passed_over, *self.prefilling}
        return {
            each: chunks[each] if each in chunks else self.num_computed_tokens(each)
            for each in asked
            if each in chunks or each not in idle
        }

    def new_block_ids(self) -> Iterable[list[int]]:
        sizes = [group.spec.block_size for group in self.layout.groups]
        step = self.step - 1
        prompts = (
            self.block_ids(request, -(-before // size), group=group)
            for request, before, _ in self.prompts
            if request.order < self._first_admitted
            for group, size in enumerate(sizes)
        )
        clock, idle = self.clock, set(self.passed_over)
        decodes = (
            self.block_ids(
                *(request, (self.num_computed_tokens(request) - 1) // size),
                group=group,
            )
            for group, size in enumerate(sizes)
            for phase in range(0, clock.block_size, size)
            for request in clock.opening(step - phase)
            if request not in idle
        )
        return chain(prompts, decodes)

    def block_ids(
        self,
        request: Request,
        first: int = 0,
        stop: int | None = None,
        *,
        group: int | None = None,
    ) -> list[int]:
        if group is None or self.groups is None:
            tables: Any = self.tables
            found: list[int] = tables.block_ids(request, first, stop)
            return found
        if request.table is None:
            return []
        ids: list[int] = request.table.ids_of(group)
        return ids[first:stop]

    def offered(self, request: Request) -> GroupBlockIds:
        """Return the blocks of a prompt that a producer holds for others, by group."""
        exchange: Exchange = self.connector.pairing.exchange
        return exchange.offered(request)
