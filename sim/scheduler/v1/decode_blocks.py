"""Blocks of the decodes on the clock: opened, filled and left behind as steps go by."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cache.v1.groups.decodes import later_phases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from cache.v1.block_tables import BlockTables
    from cache.v1.runs.group_tables import GroupRunTables
    from cache.v1.runs.tables import RunTables
    from cache.v1.tables import QuickTables, Tables
    from sim.scheduler.request import Request
    from sim.scheduler.v1.clock import DecodeClock

    Buckets = Sequence[dict[Request, Any]]
    Groups = BlockTables | GroupRunTables

running_order = attrgetter("order")


class DecodeBlocks:
    """Blocks of decodes in one group, whose tables serve many decodes at once.

    Parameters
    ----------
    clock
        The decodes.
    tables
        Their blocks.
    rounds
        Lets decodes go on for some steps; see `QuickTables.append_rounds`.
    registers
        Whether blocks that they fill become findable.

    Attributes
    ----------
    rounds
        See above; returns what `ClockedScheduler.advance` does.
    unseen
        Decodes that have to be looked at in their next step, whatever their phase; only
        where blocks are given up.
    foresees_usage
        See `ClockedScheduler`.
    num_blocks_by_group
        See `ClockedScheduler`; of the latest `rounds`.
    """

    foresees_usage = True

    def __init__(
        self,
        clock: DecodeClock,
        tables: Tables,
        rounds: Callable[[Buckets, int, int], list[int]],
        *,
        registers: bool,
    ) -> None:
        self.rounds = rounds
        self.unseen: list[Request] = []
        self.num_blocks_by_group: list[int] = []
        self._clock = clock
        self._buckets = clock.buckets
        self._period = clock.block_size
        self._tables = tables
        self._registers = registers

    def go_on(self, step: int) -> bool:
        """Let all decodes compute a token in a step, in running order.

        False, and nothing is done, if blocks do not suffice, or if decodes have to be
        looked at one by one.
        """
        tables: QuickTables = self._tables  # type: ignore[assignment]
        if opening := self._buckets[step % self._period]:
            if len(opening) > tables.num_free_blocks:
                return False
            tables.append_blocks(opening.values())
        if self._registers:
            tables.register_blocks(self._clock.filling(step).values())
        return True

    def in_need(self, step: int) -> dict[Request, Any]:
        """Return the decodes that open, fill or give up a block in a step."""
        clock = self._clock
        opening = clock.opening(step)
        return opening | clock.filling(step) if self._registers else opening

    def num_steps(self, step: int, most: int) -> int:
        """Return how many steps from `step` on, at most `most`, have their blocks."""
        num_free, period = self._tables.num_free_blocks, self._period
        if (most // period + 1) * self._clock.num_decodes <= num_free:
            return most
        num_opening = self._clock.num_opening
        for num_steps in range(most):
            num_free -= num_opening[(step + num_steps) % period]
            if num_free < 0:
                return num_steps
        return most

    def usage_after(self, step: int, num_steps: int) -> float:
        """See `ClockedScheduler.usage_after`; of steps from `step` on."""
        tables, period = self._tables, self._period
        num_rounds, num_left = divmod(num_steps, period)
        num_used = tables.num_usable_blocks - tables.num_free_blocks
        num_used += num_rounds * self._clock.num_decodes
        num_opening = self._clock.num_opening
        for now in range(step, step + num_left):
            num_used += num_opening[now % period]
        return num_used / tables.num_usable_blocks


class AheadDecodeBlocks(DecodeBlocks):
    """`DecodeBlocks` of decodes whose last token is in flight."""

    def __init__(self, clock: DecodeClock, tables: RunTables) -> None:
        super().__init__(clock, tables, self._known_rounds, registers=True)
        self._append_known_rounds = tables.append_known_rounds

    def _known_rounds(self, buckets: Buckets, first: int, num_rounds: int) -> list[int]:
        filling = self._clock.filling(first).values()
        return self._append_known_rounds(buckets, first, num_rounds, filling)


class GroupDecodeBlocks(DecodeBlocks):
    """Blocks of decodes in tables that may have several groups, and give up blocks.

    With a sliding window, a decode gives up a block every `block_size` steps, and all
    those behind its prompt's window in its first.

    Parameters
    ----------
    clock, groups
        The decodes, and their blocks.
    running, prefilling
        Requests that hold blocks, and those of them that are no decodes.
    extend
        Lets one decode go on; see `Tables.extend`.
    keeps_all_blocks
        Whether no block is given up.
    """

    foresees_usage = False

    def __init__(
        self,
        clock: DecodeClock,
        groups: Groups,
        running: Collection[Request],
        prefilling: Collection[Request],
        extend: Callable[[Request, int, int], bool],
        *,
        keeps_all_blocks: bool,
    ) -> None:
        super().__init__(clock, groups, self._take_rounds, registers=True)
        self._groups = groups
        self._running = running
        self._prefilling = prefilling
        self._extend = extend
        self._keeps_all_blocks = keeps_all_blocks
        self._phases: Sequence[int] = groups.phases

    def go_on(self, step: int) -> bool:
        groups = self._groups
        if (
            groups.decodes is None
            or groups.observer is not None
            or groups.decodes.num_opened(self._buckets, step) > groups.num_free_blocks
        ):
            return False
        groups.decodes.go_on(self._buckets, step, self._first_steps())
        return True

    def in_need(self, step: int) -> dict[Request, Any]:
        in_need: dict[Request, Any] = {}
        for phase in self._phases:
            in_need |= self._clock.opening(step - phase)
        return in_need | dict.fromkeys(self._first_steps())

    def _first_steps(self) -> list[Request]:
        """Return the decodes that are `unseen`; from now on they are not."""
        unseen, self.unseen = self.unseen, []
        return self._decoding(unseen) if unseen else unseen

    def _decoding(self, requests: Iterable[Request]) -> list[Request]:
        running, prefilling = self._running, self._prefilling
        return [r for r in requests if r in running and r not in prefilling]

    def num_steps(self, step: int, most: int) -> int:
        """See `DecodeBlocks.num_steps`; what is given up meanwhile does not count."""
        if self._keeps_all_blocks:
            return super().num_steps(step, most)
        decodes, clock = self._groups.decodes, self._clock
        if decodes is None:
            return 0
        return decodes.num_steps(self._buckets, clock.num_decodes, step, most)

    def _take_rounds(self, buckets: Buckets, first: int, num_rounds: int) -> list[int]:
        groups, clock = self._groups, self._clock
        num_tokens = clock.num_base_tokens + clock.num_decodes * first
        facts: list[int] = []
        by_group = self.num_blocks_by_group = []
        for step in range(first, first + num_rounds):
            self._take(buckets, step)
            used = groups.num_used_blocks_by_group()
            by_group += used
            num_stored = groups.num_stored_tokens(num_tokens)
            facts += sum(used), groups.num_logical_blocks, num_stored
            num_tokens += clock.num_decodes
        groups.end_call()
        return facts

    def _take(self, buckets: Buckets, step: int) -> None:
        """Let all decodes compute a token; blocks suffice."""
        if self._groups.decodes is not None:
            self._groups.decodes.go_on(buckets, step, self._first_steps())
            return
        for request in sorted(self.in_need(step), key=running_order):
            num_computed = request.base_tokens + step
            self._extend(request, num_computed, num_computed - 1)


class AheadGroupDecodeBlocks(GroupDecodeBlocks):
    """`GroupDecodeBlocks` of decodes whose last token is in flight.

    Windows give up what steps in flight do not read either.
    """

    def __init__(
        self,
        clock: DecodeClock,
        groups: Groups,
        running: Collection[Request],
        prefilling: Collection[Request],
        *,
        keeps_all_blocks: bool,
    ) -> None:
        super().__init__(
            *(clock, groups, running, prefilling, self.extend),
            keeps_all_blocks=keeps_all_blocks,
        )
        self._in_flight_tokens: dict[Request, int] = {}
        self._second_steps: list[Request] = []
        self._phases = (
            later_phases(groups.phases, groups.period)
            if groups.decodes is None
            else groups.decodes.look_behind(self.extend)
        )

    def note_in_flight(self, chunks: Iterable[tuple[Request, int, int]]) -> None:
        """Note the chunks of the latest call, which run now; decodes have one token."""
        self._in_flight_tokens = {
            request: after - before for request, before, after in chunks
        }

    def extend(self, request: Request, num_tokens: int, before: int) -> bool:
        """Let a request go on; see `Tables.extend`. Only known tokens are findable."""
        is_chunk = request in self._prefilling
        num_in_flight = self._in_flight_tokens.get(request, int(not is_chunk))
        num_known = request.num_tokens if is_chunk else before
        return self._groups.extend(
            request,
            num_tokens,
            before,
            num_processed_tokens=before - num_in_flight,
            num_tokens_to_cache=min(num_tokens, num_known),
        )

    def _take(self, buckets: Buckets, step: int) -> None:
        super()._take(buckets, step)
        self._in_flight_tokens = {}  # chunks have ended

    def _first_steps(self) -> list[Request]:
        """Return decodes in their first two steps: a chunk was in flight before."""
        first, second = super()._first_steps(), self._second_steps
        self._second_steps = first
        if not second:
            return first
        both = self._decoding(dict.fromkeys([*first, *second]))
        return sorted(both, key=running_order)
