"""Served engines on their ports: their lives, their faults, their results."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from sim.errors import ConfigError, OutputError
from sim.results.output import output_directory
from sim.results.tables.parquet import StepsFile
from sim.serving.api import Api
from sim.serving.dialects import dialect_of
from sim.serving.joined import ARRIVALS, replayed
from sim.serving.live import LiveEngine
from sim.serving.metrics.engine import metrics_of
from sim.serving.so_far import write_so_far
from sim.serving.text import CharacterTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.applications import Starlette

    from sim.config.tables import RunConfig
    from sim.results.run import Results
    from sim.serving.kv_events import Publisher
    from sim.serving.text import Tokens

_PATIENCE_S: Final = 2
"""Seconds that open answers have when the server ends."""
_KEEP_ALIVE_S: Final = 60
"""Of connections without a request. On a busy machine the engines' 5 s would break off
clients whose next request has come, but was not read yet."""
ENGINE_DIED: Final = "the engine died"


def engines_of(config: RunConfig, num_replicas: int = 1) -> list[RunConfig]:
    """Return the engines of a configuration, one for each port.

    Raises
    ------
    ConfigError
        If they are not engines of their own.
    """
    if num_replicas < 1:
        raise ConfigError(f"--replicas takes at least 1, got {num_replicas}")
    if config.fleet is None:
        return [config] * num_replicas
    if num_replicas > 1:
        raise ConfigError("--replicas: the fleet says how many; leave it out")
    if config.fleet.has_roles:
        raise ConfigError(
            "fleet.pools: engines of kvsim serve do both, got the roles prefill and "
            "decode; remove them"
        )
    return [
        config.model_copy(update={"engine": config.engine_of(pool), "fleet": None})
        for pool in config.fleet.pools
        for _ in range(config.fleet.most_replicas(pool))
    ]


class _Uvicorn(uvicorn.Server):
    """One of several in a process: signals are for all of them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def break_off(self) -> None:
        """End at once, without a word to clients."""
        self.should_exit = self.force_exit = True
        for connection in list(self.server_state.connections):
            transport: Any = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()


class Port:
    """A bound address that serves one application after another."""

    def __init__(self, host: str, port: int) -> None:
        if not 0 <= port <= 65_535:
            raise ConfigError(f"a port is a number from 0 to 65535, got {port}")
        self.host = host
        self._socket: socket.socket | None = None
        self.number = port
        self._server: _Uvicorn | None = None
        self.bind()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.number}"

    def bind(self) -> None:
        """Listen, unless it does."""
        if self._socket is not None:
            return
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._socket = socket.create_server(
                (self.host, self.number), family=family, backlog=2048
            )
        except OSError as error:
            raise ConfigError(
                f"port {self.number} of {self.host} cannot be used: "
                f"{error.strerror}; give another"
            ) from error
        self.number = self._socket.getsockname()[1]

    async def serve(self, application: Starlette) -> None:
        """Serve until `end`; the port is free then."""
        self.bind()
        config = uvicorn.Config(
            application,
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_PATIENCE_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ws="none",
        )
        listening, self._socket = self._socket, None
        assert listening is not None
        self._server = _Uvicorn(config)
        try:
            await self._server.serve(sockets=[listening])
        finally:
            listening.close()

    def end(self, *, at_once: bool = False) -> None:
        """End `serve`: when open answers are complete, or at once."""
        if self._server is not None:
            self._server.should_exit = True
            if at_once:
                self._server.break_off()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class ServedEngine:
    """One engine on a port; when it dies, another one may take its place.

    Parameters
    ----------
    config
        The engine, without a fleet.
    host, port
        Where it listens; port 0 for any that is free.
    tokens
        How text becomes tokens.
    speed
        Simulated seconds in a real one.
    api_key
        What clients must send; None for nothing.
    directory
        Folder for the results; None for none. A second life writes beside it.
    overwrite
        Whether results may be replaced.
    kv_events
        Where events of the KV cache go; None for nowhere.

    Attributes
    ----------
    engine
        The present one.
    results, folders
        Of each life that has ended, and where they are.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokens: Tokens | None = None,
        speed: float = 1.0,
        api_key: str | None = None,
        directory: Path | None = None,
        overwrite: bool = False,
        kv_events: Publisher | None = None,
    ) -> None:
        self.config = config
        self.kv_events = kv_events
        self.port = Port(host, port)
        self.results: list[Results] = []
        self.folders: list[Path] = []
        self.on_late: Callable[[float], object] | None = None
        self._tokens = tokens or CharacterTokens()
        self._speed = speed
        self._api_key = api_key
        self._directory = directory
        self._overwrite = overwrite
        self._started_s = monotonic()
        self._num_lives = 0
        self._has_died = False
        self._buried = asyncio.Event()
        self._returns = asyncio.Event()
        self._writing = asyncio.Lock()
        self._stopped = False
        try:
            self._begin_apart()
        except BaseException:
            self.close()
            raise

    def _begin_apart(self) -> None:
        # Claims on folders are kept in a context, and tasks have one of their own.
        self._context = copy_context()
        self._context.run(self._begin)

    @property
    def state(self) -> str:
        if self._has_died:
            return "dead"
        return "halted" if self.engine.is_halted else "up"

    def _begin(self) -> None:
        """Make an engine with an empty cache, and a folder for what it does."""
        self._num_lives += 1
        self._stack = ExitStack()
        folder = None
        if self._directory is not None:
            self._final = self._directory
            if self._num_lives > 1:
                name = f"{self._directory.name}-{self._num_lives}"
                self._final = self._directory.with_name(name)
            folder = self._stack.enter_context(
                output_directory(self._final, overwrite=self._overwrite)
            )
        self.engine = LiveEngine(
            self.config,
            speed=self._speed,
            started_s=self._started_s if self._num_lives > 1 else None,
            arrivals=None if folder is None else folder / ARRIVALS,
        )
        self._started_s = self.engine.started_s
        self._folder = folder
        if folder is not None:
            recorder = self.engine.run.recorder
            steps = StepsFile(folder / "steps.parquet", recorder.step_kinds)
            recorder.sink = self._stack.enter_context(steps)
        if self.kv_events is not None:
            self.kv_events.watch(self.engine)
        metrics = metrics_of(self.engine, dialect_of(self.engine).metrics)
        self.api = Api(self.engine, self._tokens, metrics, self._api_key)

    def start(self, started_s: float) -> None:
        """Let the clock of the run stand at 0 then, by the wall clock."""
        self._started_s = started_s
        self.engine.start(started_s)

    async def live(self) -> None:
        """Serve until `stop`, through all its lives.

        Raises
        ------
        Exception
            The fault of an engine that ended without being told to.
        """
        while True:
            if self.on_late is not None:
                self.engine.on_late = self.on_late
            driver = asyncio.create_task(self.engine.drive())
            driver.add_done_callback(self._driven)
            try:
                if not self._has_died:  # again, before it was served
                    await self.port.serve(self.api.application())
            finally:
                driver.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await driver
                self._context.run(self._end)
            if self._stopped or not self._has_died:
                return
            self._buried.set()
            await self._returns.wait()
            if self._stopped:
                return

    def _driven(self, driver: asyncio.Task[None]) -> None:
        if not driver.cancelled() and driver.exception() is not None:
            self.port.end()

    def _end(self) -> None:
        with self._stack:
            self.api.goes_on.set()
            self.engine.go_on()
            reason = ENGINE_DIED if self._has_died else "the server ended"
            results = self.engine.finish(reason)
            if self._folder is not None:
                again = replayed(self.config, self._final / ARRIVALS)
                results = replace(results, config=again)
                results.write(self._folder)
                self.folders.append(self._final)
            self.results.append(results)

    async def write_so_far(self) -> Path:
        """Write results of what has come to the present engine; return their folder.

        Raises
        ------
        OutputError
            If there is no folder for results, or they cannot be written.
        """
        async with self._writing:  # each is a process
            if self._folder is None or self._has_died:
                raise OutputError("an engine that is up and has an --out has results")
            self.engine.flush()
            after_s = round(self.engine.run.env.now)
            final = self._final.with_name(f"{self._final.name}-after-{after_s}s")
            arrivals, withdrawn = self._folder / ARRIVALS, dict(self.engine.withdrawn)
            await write_so_far(self.config, arrivals, withdrawn, final)
            return final

    def stop(self) -> None:
        """End, when open answers are complete or have had their time."""
        self._stopped = True
        self.api.goes_on.set()
        self.engine.go_on()
        self._returns.set()
        self.port.end()

    # -- faults to order ------------------------------------------------------

    def slow(self, factor: float) -> None:
        """Let steps take so many times as long."""
        self.engine.slow(factor)

    def halt(self) -> None:
        """Stop answering anything, and stand still."""
        if self.state == "up":
            self.api.goes_on.clear()
            self.engine.halt()

    def go_on(self) -> None:
        """Go on after `halt`."""
        self.engine.go_on()
        self.api.goes_on.set()

    def die(self) -> None:
        """Break all connections off and refuse new ones."""
        if self.state != "dead":
            self._has_died = True
            self._buried.clear()
            self._returns.clear()
            self.port.end(at_once=True)

    async def come_back(self) -> None:
        """Begin again after `die`, with an empty cache.

        Raises
        ------
        OutputError, ConfigError
            If there is no place for its results, or its port is taken.
        """
        if not self._has_died:
            return
        await self._buried.wait()
        if self._has_died and not self._stopped:
            self.port.bind()
            try:
                self._begin_apart()
            except BaseException:
                self._num_lives -= 1
                self.port.close()
                raise
            self._has_died = False
            self._returns.set()

    def close(self) -> None:
        """Let go of a port that was never served."""
        self.port.close()
        if self.kv_events is not None:
            self.kv_events.close()
        self._context.run(self._stack.close)
