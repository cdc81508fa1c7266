"""The guard of the page's server: it answers the page that it served, alone.

The server listens on the loopback, where every program of this machine and every page
of its browsers could ask. So each request needs the token of this start in its path,
the server's own name as Host (against names that lead here), and no foreign Origin.
"""

from __future__ import annotations

import hmac
import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES: Final = 65_536
"""Longest body of a request."""

_FOREIGN: Final = "a foreign page has asked; open what was printed"

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors {ancestors}"
)


class Guard:
    """Refuses requests from elsewhere than the page, and tells browsers its rights.

    Parameters
    ----------
    app
        The application to call when all is well; paths come without the token.
    token
        Of this start.
    port
        Where the server listens.
    ancestors
        Pages that may show this one in a frame, as of a content security policy.
    """

    def __init__(
        self, app: ASGIApp, token: str, port: int, ancestors: str = "'none'"
    ) -> None:
        self._app = app
        self._token = token.encode()
        names = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._hosts = frozenset(name.encode() for name in names)
        self._origins = frozenset(f"http://{name}".encode() for name in names)
        self._headers = [
            (b"content-security-policy", _POLICY.format(ancestors=ancestors).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        send = self._guarded(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        body = b""
        if scope["method"] == "POST":
            found = await _body(receive)
            if found is None:
                line = f"a request has at most {MOST_BYTES:,} bytes; send less"
                await _refuse(send, 413, line)
                return
            body = found
        path = scope["path"][1 + len(self._token) :] or "/"
        inside = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(inside, _once(body, receive), send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason of a refusal, or None if the request may come in."""
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if headers.get(b"host") not in self._hosts:
            return 421, "this server answers to 127.0.0.1 alone; open what was printed"
        first = scope["path"].split("/")[1].encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(first, self._token):
            return 403, "the token is not that of this start; open what was printed"
        if headers.get(b"origin", b"") not in {b"", *self._origins}:
            return 403, _FOREIGN
        method = scope["method"]
        if method == "POST":
            return _post_refusal(headers)
        if method != "GET":
            return 405, f"{method[:20]} is nothing that the page asks; GET and POST are"
        is_opened = headers.get(b"sec-fetch-mode") == b"navigate"
        return None if is_opened or _is_own(headers) else (403, _FOREIGN)

    def _guarded(self, send: Send) -> Send:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [each for each in self._headers if each[0] not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        return guarded


def _is_own(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"sec-fetch-site", b"none") in (b"same-origin", b"none")


def _post_refusal(headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
    if not headers.get(b"origin") or not _is_own(headers):
        return 403, "what changes something comes from the page itself, with its origin"
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        return 415, "the body is JSON; say content-type: application/json"
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MOST_BYTES:
        return 413, f"a request has at most {MOST_BYTES:,} bytes; send less"
    return None


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is too long."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that gives the body once, then the connection's messages."""
    is_given = False

    async def given() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return given


async def _refuse(send: Send, status: int, line: str) -> None:
    body = json.dumps({"error": line}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
