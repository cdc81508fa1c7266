"""Decodes of requests whose tables have several groups, taken on together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from math import lcm
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cache.v1.groups.mamba import MambaManager
from cache.v1.groups.window import SlidingWindowManager
from cache.v1.tables import TableRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from cache.v1.block_pool import BlockPool
    from cache.v1.groups.base import GroupManager


class DecodeRequest(TableRequest, Protocol):
    """A request on a decode clock.

    Attributes
    ----------
    base_tokens
        Its tokens less the number of the step.
    order
        Its place in running order.
    """

    base_tokens: int
    order: int


_order = attrgetter("order")


class GroupTables(Protocol):
    """Block tables of several groups, as decodes need them; see `BlockTables`."""

    managers: list[GroupManager]
    period: int
    phases: tuple[int, ...]

    @property
    def num_free_blocks(self) -> int: ...

    def extend(
        self, request: TableRequest, num_tokens: int, num_computed_tokens: int
    ) -> bool: ...


class Look(NamedTuple):
    """Groups that a decode's step may change, by its computed tokens modulo the period.

    Attributes
    ----------
    givers
        Groups in which a block may be left behind: number, manager, how far a window
        looks back (None where it is none), and block size.
    openers
        Numbers of groups in which it opens a block.
    registers
        Whether it fills blocks that may be registered.
    """

    givers: tuple[tuple[int, GroupManager, int | None, int], ...]
    openers: tuple[int, ...]
    registers: bool


def looks_of(
    managers: Sequence[GroupManager], registers_every: int, *, enable_caching: bool
) -> tuple[int, tuple[int, ...], set[int]]:
    """Return when decodes are looked at, and when blocks may be registered.

    The first two are `period` and `phases` of `BlockTables`.
    """
    managers = [manager for manager in managers if manager.phases()]
    sizes = [manager.block_size for manager in managers]
    period = lcm(*sizes)
    phases = {
        phase + start
        for manager in managers
        for phase in manager.phases()
        for start in range(0, period, manager.block_size)
    }
    ends: set[int] = set()
    if enable_caching:
        every = registers_every
        units = sizes if every == 1 else [every]
        ends = {e - 1 for unit in units for e in range(unit, period + 1, unit)}
    return period, tuple(sorted(phases | ends)), ends


def later_phases(phases: Collection[int], period: int) -> tuple[int, ...]:
    """Return phases, and those a step later: of what is known then."""
    return tuple(sorted({*phases, *((phase + 1) % period for phase in phases)}))


class Decodes(ABC):
    """Lets decodes go on that have had their first step.

    A decode opens at most a block a group in a step, and leaves few behind, so what
    `cache.v1.block_tables.BlockTables.extend` asks every group is known from the
    number of computed tokens.

    Parameters
    ----------
    tables
        Of all requests; of kinds that `are_known`.
    ends
        Those of its `phases` in which blocks are filled that may be registered.

    Attributes
    ----------
    phases
        Computed tokens, modulo the period, at which a decode is looked at.
    """

    def __init__(self, tables: GroupTables, ends: Collection[int]) -> None:
        self._tables = tables
        self._ends = ends
        self._period = tables.period
        self._extend: Callable[[Any, int, int], bool] = tables.extend
        self._look_at(tables.phases, num_in_flight=0)
        sizes = [m.block_size for m in tables.managers if m.phases()]
        self._least_size, self._num_openers = min(sizes, default=1), len(sizes)

    def _look_at(self, phases: tuple[int, ...], num_in_flight: int) -> None:
        managers, period = self._tables.managers, self._period
        self.phases, self._num_in_flight = phases, num_in_flight
        self._looks = looks = [
            _look(managers, phase, (phase - num_in_flight) % period, self._ends)
            for phase in range(period)
        ]
        self._opening = [
            (phase, len(looks[phase].openers))
            for phase in phases
            if looks[phase].openers
        ]

    def look_behind(self, extend: Callable[[Any, int, int], bool]) -> tuple[int, ...]:
        """Take the last computed token of decodes to be in flight; return `phases`.

        It is not known yet, and windows still read what lies behind it.

        Parameters
        ----------
        extend
            As that of the tables, for decodes in their first steps, whose tokens in
            flight may be more.
        """
        self._extend = extend
        self._look_at(later_phases(self.phases, self._period), num_in_flight=1)
        self._look_at(
            tuple(each for each in self.phases if any(self._looks[each])),
            num_in_flight=1,
        )
        return self.phases

    @staticmethod
    def are_known(managers: Collection[GroupManager]) -> bool:
        """Whether decodes of all these groups do no more than is said here.

        States that are hit inside blocks are copied, and those of drafts move.
        """
        return any(manager.phases() for manager in managers) and not any(
            isinstance(manager, MambaManager)
            and (manager.fine_pool is not None or manager.num_speculative_blocks)
            for manager in managers
        )

    def num_opened(
        self, buckets: Sequence[Collection[DecodeRequest]], step: int
    ) -> int:
        """Return how many blocks the decodes on a clock open in a step.

        Parameters
        ----------
        buckets
            By the step, modulo the period, in which their computed tokens are a
            multiple of it.
        step
            Its number.
        """
        period = self._period
        return sum(
            [
                len(buckets[(step - phase) % period]) * num
                for phase, num in self._opening
            ]
        )

    def num_steps(
        self,
        buckets: Sequence[Collection[DecodeRequest]],
        num_decodes: int,
        first: int,
        most: int,
    ) -> int:
        """Return how many steps, at most `most`, surely have their blocks.

        Blocks left behind meanwhile are not counted on.
        """
        num_free = self._tables.num_free_blocks
        num_rounds = most // self._least_size + 1
        if num_rounds * num_decodes * self._num_openers <= num_free:
            return most
        for num_steps in range(most):
            num_free -= self.num_opened(buckets, first + num_steps)
            if num_free < 0:
                return num_steps
        return most

    def go_on(
        self,
        buckets: Sequence[Collection[DecodeRequest]],
        step: int,
        unseen: Collection[DecodeRequest],
    ) -> None:
        """Let all decodes compute a token each, in running order; blocks suffice.

        Parameters
        ----------
        buckets, step
            See `num_opened`.
        unseen
            Those that have their first step, or did not compute in the one before.
        """
        period = self._period
        due = [
            bucket
            for phase in self.phases
            if (bucket := buckets[(step - phase) % period])
        ]
        if unseen:
            due.append(unseen)
        if len(due) > 1:
            in_need = sorted(chain.from_iterable(due), key=_order)
            if unseen:  # they may stand in a bucket, too
                self._begin(dict.fromkeys(in_need), step, unseen)
            else:
                self._go_on(in_need, step)
        elif unseen:
            self._begin(unseen, step, unseen)
        elif due:
            self._go_on(due[0], step)

    def _begin(
        self,
        requests: Iterable[DecodeRequest],
        step: int,
        unseen: Collection[DecodeRequest],
    ) -> None:
        """Do as `_go_on`, some of them in a first step."""
        known: list[DecodeRequest] = []
        for request in requests:
            if request not in unseen:
                known.append(request)
                continue
            if known:
                self._go_on(known, step)
                known = []
            num_tokens = request.base_tokens + step
            self._extend(request, num_tokens, num_tokens - 1)
        if known:
            self._go_on(known, step)

    @abstractmethod
    def _go_on(self, requests: Iterable[DecodeRequest], step: int) -> None:
        """Let decodes compute a token each that open, fill or leave behind a block."""


class BlockDecodes(Decodes):
    """`Decodes` of tables that go block by block.

    Parameters
    ----------
    tables, ends
        See `Decodes`.
    pool
        Of the blocks.
    register
        Registers the blocks that so many tokens of a request fill.
    """

    def __init__(
        self,
        tables: GroupTables,
        ends: Collection[int],
        pool: BlockPool,
        register: Callable[[TableRequest, int], None],
    ) -> None:
        super().__init__(tables, ends)
        self._pool = pool
        self._register = register

    def _go_on(self, requests: Iterable[DecodeRequest], step: int) -> None:
        looks, period, before = self._looks, self._period, step - 1
        num_in_flight = self._num_in_flight
        pool, register = self._pool, self._register
        take, drop, null_block = pool.take_block, pool.drop_block, pool.null_block
        managers = self._tables.managers
        num_opened = [0] * len(managers)
        for request in requests:
            num_computed_tokens = request.base_tokens + before
            givers, openers, registers = looks[num_computed_tokens % period]
            groups = request.table.groups
            num_processed_tokens = num_computed_tokens - num_in_flight
            for number, manager, reach, block_size in givers:
                own = groups[number]
                if reach is None:
                    manager.give_up(own, num_processed_tokens)
                    continue
                index = own.num_passed
                num_left = (num_processed_tokens - reach) // block_size - index
                if num_left != 1:
                    if num_left > 1:
                        manager.give_up(own, num_processed_tokens)
                    continue
                blocks = own.blocks
                block, blocks[index] = blocks[index], null_block
                own.num_passed = index + 1
                if block is not null_block:
                    manager.num_null_blocks += 1
                    manager.num_held_blocks -= 1
                    if not drop(block):
                        manager.num_used_blocks -= 1
            for number in openers:
                groups[number].blocks.append(take())
                num_opened[number] += 1
            if registers:
                register(request, num_processed_tokens + 1)
        for manager, number in zip(managers, num_opened, strict=True):
            manager.num_held_blocks += number
            manager.num_used_blocks += number


def _look(
    managers: Sequence[GroupManager], phase: int, processed: int, ends: Collection[int]
) -> Look:
    """Return the groups by computed, and by processed tokens modulo the period."""
    givers, openers = [], []
    for number, manager in enumerate(managers):
        block_size = manager.block_size
        if manager.phases() and phase % block_size == 0:
            openers.append(number)
        if processed % block_size in manager.giving_phases():
            reach = manager.reach if isinstance(manager, SlidingWindowManager) else None
            givers.append((number, manager, reach, block_size))
    return Look(tuple(givers), tuple(openers), processed in ends)
