"""Asks a page's server as a browser does, without a network; and small pages to ask."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from sim.views.explore.base import Base
from sim.views.explore.work import answer
from sim.views.explore.worker import Worker
from tests.sim.views.report.pages import crowded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from sim.views.explore.work import Wanted

TOKEN, PORT = "a-token-of-this-start", 8471
OWN = {"host": f"127.0.0.1:{PORT}", "origin": f"http://127.0.0.1:{PORT}"}
JSON = {"content-type": "application/json"}


def base(**changes: Any) -> Base:
    """A page on a run of a tenth of a second that preempts."""
    return Base("crowded", crowded() | changes)


class ThreadWorker(Worker):
    """Simulates in this process: no start to wait for, but nothing to kill either."""

    def start(self) -> None:
        return None

    def begin(self, data: Mapping[str, Any], wanted: Wanted = "kept") -> Connection:
        ours, theirs = Pipe()

        def work() -> None:
            theirs.send(answer(data, wanted, theirs))
            theirs.close()

        threading.Thread(target=work).start()
        self.is_busy = True
        return ours


@dataclass(frozen=True)
class Reply:
    """A response of the page's server."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]


def ask(
    app: Any,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    kind: str = "http",
) -> Reply:
    """Send one request to an application, and return its whole reply."""
    told = {**OWN, "content-length": str(len(body)), **(headers or {})}
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in told.items() if v],
        "asgi": {"version": "3.0"},
    }
    return asyncio.run(_asked(app, scope, body))


async def _asked(app: Any, scope: Mapping[str, Any], body: bytes) -> Reply:
    sent: list[Any] = []
    parts = [
        {"type": "http.request", "body": body[i : i + 4096], "more_body": True}
        for i in range(0, len(body), 4096)
    ]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    done = asyncio.Event()

    async def receive() -> Any:
        if parts:
            return parts.pop(0)
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    first, *rest = sent
    if first["type"] != "http.response.start":
        return Reply(first["code"], {}, b"")
    return Reply(
        first["status"],
        {k.decode(): v.decode() for k, v in first["headers"]},
        b"".join(each.get("body", b"") for each in rest),
    )
