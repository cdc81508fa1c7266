"""Questions of the page: one run at a time, the latest; finished runs are kept."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from anyio import to_thread

from sim.config.tables import parse_config
from sim.errors import ConfigError, UserError
from sim.views.explore.answers import answer
from sim.views.explore.kept import Kept
from sim.views.explore.ranges import point, values_of
from sim.views.explore.work import Far, File, Refused
from sim.views.explore.worker import Worker, listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from sim.views.explore.base import Base, Settings
    from sim.views.explore.work import Done, Wanted

MOST_KEPT_BYTES: Final = 64 * 2**20
"""Memory of the runs that are kept, to be shown again without another run."""

MOST_NUMBERS: Final = 500
"""Runs of which the numbers alone are kept, for curves over a range."""

MOST_BESIDE: Final = 3
"""Runs that are shown beside that of the page."""

BEHIND: Final = 10
"""Niceness of workers in the background."""

Event = dict[str, Any]


class MakeWorker(Protocol):
    """Makes a `sim.views.explore.worker.Worker`, which simulates."""

    def __call__(self, traces: Mapping[str, bytes], niceness: int = 0) -> Worker: ...


class Desk:
    """One worker, and the latest question that was put to it.

    Parameters
    ----------
    base
        Says which traces are read beforehand.
    make_worker
        See `Explorer`.
    niceness
        By how much other processes go first.
    """

    def __init__(self, base: Base, make_worker: MakeWorker, niceness: int = 0) -> None:
        self._base = base
        self._make_worker = make_worker
        self._niceness = niceness
        self._worker: Worker | None = None
        self._latest = 0
        self._changing = asyncio.Lock()
        self.num_runs = 0

    def ticket(self) -> int:
        """Return the number of a new question; all before it have no answer."""
        self._latest += 1
        return self._latest

    def is_latest(self, ticket: int) -> bool:
        """Whether no later question was asked."""
        return ticket == self._latest

    async def start(self) -> None:
        """Start the process before it is needed."""
        async with self._changing:
            await to_thread.run_sync(self._started)

    def end(self) -> None:
        """End the process in any state, and have no answer to any question."""
        self._latest += 1
        if self._worker is not None:
            self._worker.kill()

    def leave(self, ticket: int) -> None:
        """End the run of a question that is not waited for any more."""
        if self.is_latest(ticket) and self._worker and self._worker.is_busy:
            self._worker.kill()

    async def clear(self) -> None:
        """End the run in progress, and have another process ready."""
        async with self._changing:
            if self._worker is not None and self._worker.is_busy:
                await to_thread.run_sync(self._worker.kill)
                await to_thread.run_sync(self._started)

    async def run(
        self, ticket: int, config: Mapping[str, Any], wanted: Wanted
    ) -> AsyncIterator[Far | Refused | Done]:
        """Yield how far a run has come and its last word; nothing once it is late."""
        connection = await self._begun(ticket, config, wanted)
        while connection is not None:
            said = await to_thread.run_sync(listen, connection, abandon_on_cancel=True)
            if not self.is_latest(ticket):
                return
            if isinstance(said, Far):
                yield said
                continue
            self._freed(said)
            yield said
            return

    def _started(self) -> Worker:
        if self._worker is None:
            self._worker = self._make_worker(self._base.traces, self._niceness)
        self._worker.start()
        return self._worker

    async def _begun(
        self, ticket: int, config: Mapping[str, Any], wanted: Wanted
    ) -> Connection | None:
        """Have the worker begin; None if there is a later question by now."""
        async with self._changing:
            if not self.is_latest(ticket):
                return None
            worker = await to_thread.run_sync(self._started)
            if not self.is_latest(ticket):
                return None
            self.num_runs += 1
            return worker.begin(config, wanted)

    def _freed(self, said: Refused | Done) -> None:
        assert self._worker is not None
        if isinstance(said, Refused) and said.is_fault:
            self._worker.kill()  # dead, or in an unknown state
        self._worker.is_busy = False


class Explorer:
    """Answers the page: each question by runs in a process, unless they are kept.

    Parameters
    ----------
    base
        The configuration that settings are put upon.
    make_worker
        Makes a worker, given the traces that were read.
    """

    def __init__(self, base: Base, make_worker: MakeWorker = Worker) -> None:
        self.base = base
        self.front = Desk(base, make_worker)
        self.behind = Desk(base, make_worker, BEHIND)
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._numbers: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    async def begin(self) -> None:
        """Start the process before it is needed."""
        await self.front.start()

    def end(self) -> None:
        """End all processes, in any state."""
        self.front.end()
        self.behind.end()

    async def ask(
        self, settings: Settings, beside: Sequence[tuple[str, Settings]] = ()
    ) -> AsyncIterator[Event]:
        """Yield how far a run has come, and at last the page's answer on it.

        A later question ends this one, whose last word is then ``cancelled``.

        Parameters
        ----------
        settings
            Checked, see `sim.views.explore.base.Base.checked`.
        beside
            Names and settings of the runs that are shown with it; those that are not
            kept any more are run again, first.
        """
        self.behind.ticket()
        ticket = self.front.ticket()
        try:
            await self.behind.clear()
            await self.front.clear()
            found = []
            for name, each in (*beside[:MOST_BESIDE], ("", settings)):
                kept = None
                async for event in self._run(ticket, each):
                    if isinstance(event, Kept):
                        kept = event
                    else:
                        yield event | ({"of": name} if name else {})
                if kept is None:
                    return
                found.append((name, kept))
            *others, (_, now) = found
            make = partial(answer, self.base, settings, now, others)
            shown = await to_thread.run_sync(make)
            yield {"result": shown}
        except UserError as error:
            yield {"error": " ".join(str(error).split())}
        finally:
            self.front.leave(ticket)

    async def _run(
        self, ticket: int, settings: Settings
    ) -> AsyncIterator[Event | Kept]:
        config, key = self._config(settings)
        if key in self._kept:
            self._kept.move_to_end(key)
            yield self._kept[key]
            return
        async for said in self.front.run(ticket, config, "kept"):
            if isinstance(said, Kept):
                self._keep(key, said)
                yield said
                return
            yield _event(said)
            if isinstance(said, Refused):
                return
        yield {"cancelled": True}

    def _config(self, settings: Settings) -> tuple[dict[str, Any], str]:
        """Return the complete configuration, and the same as a key."""
        data = parse_config(self.base.with_settings(settings)).to_data()
        return data, json.dumps(data, sort_keys=True)

    def _keep(self, key: str, kept: Kept) -> None:
        self._kept[key] = kept
        while sum(each.num_bytes for each in self._kept.values()) > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)
        self._note(key, kept.summary)

    def _note(self, key: str, summary: Mapping[str, Any]) -> None:
        self._numbers[key] = summary
        if len(self._numbers) > MOST_NUMBERS:
            self._numbers.popitem(last=False)

    # -- a curve over the range of a control ------------------------------------------

    async def curve(self, settings: Settings, key: str) -> AsyncIterator[Event]:
        """Yield the values of a control, and the numbers of each, as runs end.

        They are run in the background, in an order that shows the whole range early;
        a later curve, or a run of the page, ends this one.
        """
        control = self.base.control(key, settings)
        values = values_of(control, settings.get(key, control.value))
        yield {"values": values}
        ticket = self.behind.ticket()
        try:
            await self.behind.clear()
            for place in spread(len(values)):
                tried = self.base.moved(settings, key, values[place])
                async for found in self._point(ticket, tried):
                    yield {"place": place, "value": values[place]} | found
                if not self.behind.is_latest(ticket):
                    yield {"cancelled": True}
                    return
        finally:
            self.behind.leave(ticket)

    async def _point(self, ticket: int, settings: Settings) -> AsyncIterator[Event]:
        try:
            config, key = self._config(settings)
        except UserError as error:
            yield {"error": " ".join(str(error).split())}
            return
        if key in self._numbers:
            yield point(self._numbers[key])
            return
        async for said in self.behind.run(ticket, config, "numbers"):
            if isinstance(said, Refused):
                yield {"error": said.line}
            elif isinstance(said, dict):
                self._note(key, said)
                yield point(said)

    # -- files ------------------------------------------------------------------------

    async def file(self, settings: Settings, wanted: Wanted) -> File:
        """Return a report or results of a run, with its intervals.

        Raises
        ------
        ConfigError
            If there is none: in a line, why.
        """
        config, _ = self._config(settings)
        self.behind.ticket()
        ticket = self.front.ticket()
        try:
            await self.front.clear()
            async for said in self.front.run(ticket, config, wanted):
                if isinstance(said, File):
                    return said
                if isinstance(said, Refused):
                    raise ConfigError(said.line)
        finally:
            self.front.leave(ticket)
        raise ConfigError("something else was asked meanwhile; ask again")


def _event(said: Far | Refused | Done) -> Event:
    if isinstance(said, Refused):
        return {"error": said.line}
    assert isinstance(said, Far)
    return {"progress": said.share, "now_s": said.now_s}


def spread(number: int) -> list[int]:
    """Return the places from 0 on, both ends and the middle first.

    Examples
    --------
    >>> spread(8)
    [0, 7, 3, 1, 5, 2, 4, 6]
    """
    order, spans = [0, number - 1] if number > 1 else [0] * number, [(0, number - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return order
