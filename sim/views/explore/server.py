"""The server of the page: on the loopback, for one reader, nothing from outside."""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import asynccontextmanager, closing, suppress
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from plotly.offline import get_plotlyjs
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sim.errors import ConfigError, UserError
from sim.views.explore.controls import GROUPS, TRAFFIC
from sim.views.explore.explorer import MOST_BESIDE, Explorer
from sim.views.explore.guard import Guard
from sim.views.explore.page import document
from sim.views.explore.ranges import values_of
from sim.views.report.page import asset, style

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from types import FrameType

    from starlette.requests import Request

    from sim.views.explore.base import Base, Settings
    from sim.views.explore.explorer import Event

HOST: Final = "127.0.0.1"
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
_MOST_NAME: Final = 40


def bound(port: int) -> socket.socket:
    """Return a socket of the loopback that no other process has; any port for 0.

    Raises
    ------
    ConfigError
        If the port is taken, or not one of a user's.
    """
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--port takes 0 to 65535, got {port}")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen()
    except OSError as error:
        found.close()
        raise ConfigError(
            f"port {port} of {HOST} cannot be used: {error.strerror}; give another "
            f"--port, or leave it out for a free one"
        ) from error
    return found


class Page:
    """A page that is served: its address, and the server behind it.

    Parameters
    ----------
    base
        The base that it explores.
    port
        Where it listens; 0 for a free port.
    ancestors
        See `sim.views.explore.guard.Guard`.
    """

    def __init__(self, base: Base, port: int = 0, ancestors: str = "'none'") -> None:
        self._socket = bound(port)
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        self.explorer = Explorer(base)
        app = application(self.explorer)
        guarded = Guard(app, self.token, self.port, ancestors)
        config = uvicorn.Config(
            guarded,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
            ws="none",
        )
        self._server = _Server(config, self.explorer.end)

    @property
    def url(self) -> str:
        """The address, with the token of this start."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Serve until a Ctrl-C, or until `stop`."""
        with closing(self._socket), suppress(KeyboardInterrupt):
            try:
                self._server.run(sockets=[self._socket])
            finally:
                self.explorer.end()

    def stop(self) -> None:
        """Ask the server to end."""
        self.explorer.end()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Ends the run in progress with the first Ctrl-C, so that no answer is waited for.

    Parameters
    ----------
    config
        Of uvicorn.
    on_exit
        Called when a signal asks for the end.
    """

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


def application(explorer: Explorer) -> Starlette:
    """Return the application that answers the page; `Guard` refuses others."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        explorer.end()

    async def page(_: Request) -> Response:
        return Response(document(explorer.base.name), media_type="text/html")

    async def start(_: Request) -> Response:
        await explorer.begin()
        return JSONResponse(_start(explorer.base))

    async def run(request: Request) -> Response:
        asked = await _asked(request, {"settings", "beside"})
        if isinstance(asked, Response):
            return asked
        try:
            settings = explorer.base.checked(asked.get("settings", {}))
            beside = _beside(explorer.base, asked.get("beside", []))
        except UserError as error:
            return _refused(str(error))
        return _streamed(explorer.ask(settings, beside))

    async def curve(request: Request) -> Response:
        asked = await _asked(request, {"settings", "key"})
        if isinstance(asked, Response):
            return asked
        try:
            settings = explorer.base.checked(asked.get("settings", {}))
            control = explorer.base.control(asked.get("key"), settings)
            values_of(control, control.value)  # refused here, before anything is run
        except UserError as error:
            return _refused(str(error))
        return _streamed(explorer.curve(settings, control.key))

    async def file(request: Request) -> Response:
        asked = await _asked(request, {"settings", "what"})
        if isinstance(asked, Response):
            return asked
        try:
            settings = explorer.base.checked(asked.get("settings", {}))
            if asked.get("what") not in ("report", "results"):
                raise ConfigError("what: should be report or results")
            found = await explorer.file(settings, asked["what"])
        except UserError as error:
            return _refused(str(error))
        told = {"content-disposition": f'attachment; filename="{found.name}"'}
        return Response(
            found.content, media_type="application/octet-stream", headers=told
        )

    routes = [
        Route("/", page),
        Route("/start.json", start),
        Route("/run", run, methods=["POST"]),
        Route("/curve", curve, methods=["POST"]),
        Route("/file", file, methods=["POST"]),
        *(
            Route(f"/{name}", _given(text, kind), methods=["GET"])
            for name, (text, kind) in _files().items()
        ),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _streamed(events: AsyncIterator[Event]) -> Response:
    """Return an answer that comes line by line."""
    lines = (json.dumps(each, allow_nan=False) + "\n" async for each in events)
    return StreamingResponse(lines, media_type="application/x-ndjson")


def _files() -> Mapping[str, tuple[Callable[[], str], str]]:
    """Return the page's own files: a maker of the text, and its type."""
    return {
        "plotly.js": (get_plotlyjs, _SCRIPT),
        "drawing.js": (lambda: asset("drawing.js"), _SCRIPT),
        "theme.js": (lambda: asset("theme.js"), _SCRIPT),
        "explore.js": (lambda: _own("explore.js"), _SCRIPT),
        "looks.css": (lambda: style() + _own("explore.css"), _STYLE),
    }


def _own(name: str) -> str:
    return (files("sim.views.explore") / "assets" / name).read_text(encoding="utf-8")


def _given(text: Callable[[], str], kind: str) -> Any:
    async def endpoint(_: Request) -> Response:
        return Response(text(), media_type=kind)

    return endpoint


def _start(base: Base) -> dict[str, Any]:
    """Return the data with which the page starts."""
    return {
        "name": base.name,
        "version": version("kvsim"),
        "groups": list(GROUPS),
        "controls": [each.to_data() for each in base.controls.values()],
        "traffic": {
            name: [
                each.to_data()
                for each in base.of({TRAFFIC: name}).controls.values()
                if each.group == "traffic" and each.key != TRAFFIC
            ]
            for name in base.traffic_names
        },
    }


async def _asked(request: Request, keys: set[str]) -> dict[str, Any] | Response:
    """Return the table that a request holds, or a refusal."""
    try:
        found = json.loads(await request.body(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _refused("the body is not JSON")
    if not isinstance(found, dict) or set(found) - keys:
        return _refused(f"the body should be a table of {' and '.join(sorted(keys))}")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _beside(base: Base, given: object) -> list[tuple[str, Settings]]:
    """Return names and settings of runs to be shown with that of the page."""
    if not isinstance(given, list) or len(given) > MOST_BESIDE:
        raise ConfigError(f"beside: should be a list of at most {MOST_BESIDE} runs")
    found = []
    for each in given:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
            raise ConfigError(
                f"beside: each run should have settings and a name of at most "
                f"{_MOST_NAME} characters"
            )
        found.append((name, base.checked(each.get("settings", {}))))
    return found


def _refused(line: str) -> JSONResponse:
    return JSONResponse({"error": " ".join(line.split())}, status_code=400)
