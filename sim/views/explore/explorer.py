"""What the page asks: one run at a time, the latest; what was run is kept."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from anyio import to_thread

from sim.config.tables import parse_config
from sim.errors import UserError
from sim.studies.sweeps.job import Job
from sim.studies.sweeps.supplies import gather
from sim.views.explore.answers import answer
from sim.views.explore.kept import Kept
from sim.views.explore.work import Far, Refused
from sim.views.explore.worker import Worker, is_last, listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from multiprocessing.connection import Connection

    from sim.views.explore.base import Base, Settings
    from sim.views.explore.work import Said

MOST_KEPT_BYTES: Final = 64 * 2**20
"""Memory of the runs that are kept, to be shown again without another run."""

MOST_BESIDE: Final = 3
"""Runs that are shown beside that of the page."""

Event = dict[str, Any]


class Explorer:
    """Runs what the page asks for in a process of its own, the latest question only.

    Parameters
    ----------
    base
        The configuration that settings are put upon.
    make_worker
        Makes what simulates, given the traces that were read.

    Attributes
    ----------
    num_runs
        Runs that were begun.
    """

    def __init__(
        self,
        base: Base,
        make_worker: Callable[[Mapping[str, bytes]], Worker] = Worker,
    ) -> None:
        self.base = base
        self._make_worker = make_worker
        self.num_runs = 0
        self._worker: Worker | None = None
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._latest = 0
        self._changing = asyncio.Lock()

    @property
    def pids(self) -> list[int]:
        """Processes that are there to simulate."""
        pid = None if self._worker is None else self._worker.pid
        return [] if pid is None else [pid]

    async def begin(self) -> None:
        """Start the process before it is needed."""
        async with self._changing:
            await to_thread.run_sync(self._started)

    def end(self) -> None:
        """End the process, whatever it is at."""
        self._latest += 1
        if self._worker is not None:
            self._worker.kill()

    def _started(self) -> Worker:
        if self._worker is None:
            job = Job(0, {}, self.base.config.to_data())
            self._worker = self._make_worker(gather([job], at_least=1).traces)
        self._worker.start()
        return self._worker

    # -- one question -----------------------------------------------------------------

    async def ask(
        self, settings: Settings, beside: Sequence[tuple[str, Settings]] = ()
    ) -> AsyncIterator[Event]:
        """Yield how far a run has come, and at last what the page shows of it.

        A later question ends this one, whose last word is then ``cancelled``.

        Parameters
        ----------
        settings
            Checked, see `sim.views.explore.base.Base.checked`.
        beside
            Names and settings of the runs that are shown with it; those that are not
            kept any more are run again, first.
        """
        self._latest += 1
        ticket = self._latest
        try:
            await self._cancelled()
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
            if ticket == self._latest and self._worker and self._worker.is_busy:
                self._worker.kill()  # the page has gone: nobody waits for it

    async def _run(
        self, ticket: int, settings: Settings
    ) -> AsyncIterator[Event | Kept]:
        data = self.base.with_settings(settings)
        config = parse_config(data).to_data()
        key = json.dumps(config, sort_keys=True)
        if key in self._kept:
            self._kept.move_to_end(key)
            yield self._kept[key]
            return
        connection = await self._connected(ticket, config)
        while connection is not None:
            said = await to_thread.run_sync(listen, connection, abandon_on_cancel=True)
            if ticket != self._latest:
                break
            if is_last(said):
                self._freed(said)
                yield self._last(key, said)
                return
            assert isinstance(said, Far)
            yield {"progress": said.share, "now_s": said.now_s}
        yield {"cancelled": True}

    async def _cancelled(self) -> None:
        """End what the worker is at."""
        async with self._changing:
            if self._worker is not None and self._worker.is_busy:
                await to_thread.run_sync(self._worker.kill)

    async def _connected(
        self, ticket: int, config: Mapping[str, Any]
    ) -> Connection | None:
        """Have the worker begin; None if there is a later question by now."""
        async with self._changing:
            if ticket != self._latest:
                return None
            worker = await to_thread.run_sync(self._started)
            if ticket != self._latest:
                return None
            self.num_runs += 1
            return worker.begin(config)

    def _freed(self, said: Said) -> None:
        assert self._worker is not None
        if isinstance(said, Refused) and said.is_fault:
            self._worker.kill()  # dead, or in a state that nobody knows
        self._worker.is_busy = False

    def _last(self, key: str, said: Said) -> Event | Kept:
        if isinstance(said, Refused):
            return {"error": said.line}
        assert isinstance(said, Kept)
        self._kept[key] = said
        while sum(each.num_bytes for each in self._kept.values()) > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)
        return said
