"""Engines that are served together, each on its port, until a signal ends them."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from sim.serving.admin import admin_application

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.serving.server import Port, ServedEngine


class Served:
    """Engines that are served together.

    Parameters
    ----------
    engines
        Each on its port.
    admin
        Where faults are ordered; None for nowhere.
    """

    def __init__(
        self, engines: Sequence[ServedEngine], admin: Port | None = None
    ) -> None:
        self.engines = engines
        self.admin = admin
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began = threading.Event()

    @property
    def url(self) -> str:
        """Address of the first."""
        return self.engines[0].port.url

    def serve(self) -> None:
        """Serve until a Ctrl-C, or until `stop`."""
        try:
            gc.collect()
            gc.freeze()  # a walk through all that was imported takes 50 ms
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            gc.unfreeze()
            for engine in self.engines:
                engine.close()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._stop)
        now_s = monotonic()  # one clock for all, so that their arrivals have an order
        for each in self.engines:
            each.start(now_s)
        lives = [asyncio.create_task(each.live()) for each in self.engines]
        admin = None
        if self.admin is not None:
            application = admin_application(self.engines)
            admin = asyncio.create_task(self.admin.serve(application))
        self._began.set()
        try:
            done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
            self._stop()
            await asyncio.gather(*lives, return_exceptions=True)
        finally:
            if self.admin is not None and admin is not None:
                self.admin.end(at_once=True)
                await admin
        for life in done:
            life.result()

    def stop(self) -> None:
        """Ask all to end, from any thread."""
        self._began.wait(10)
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for engine in self.engines:
            engine.stop()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the event loop: uvloop, where it can be had."""
    try:
        import uvloop  # noqa: PLC0415 - not on all systems
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
