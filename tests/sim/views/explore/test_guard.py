"""The page's server answers the page that it served, and refuses all others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra 'explore' is not installed")

from starlette.responses import PlainTextResponse

from sim.views.explore.guard import MOST_BYTES, Guard
from tests.sim.views.explore.asking import JSON, OWN, PORT, TOKEN, ask

SEEN: list[Any] = []


async def inside(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    SEEN.append((scope["path"], message.get("body")))
    await PlainTextResponse("inside")(scope, receive, send)


GUARD = Guard(inside, TOKEN, PORT)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def test_the_page_itself_comes_in() -> None:
    reply = ask(GUARD, f"/{TOKEN}/run", method="POST", headers=JSON, body=b"{}")
    assert (reply.status, reply.body) == (200, b"inside")
    assert SEEN == [("/run", b"{}")]
    assert ask(GUARD, f"/{TOKEN}/").status == 200
    assert ask(GUARD, f"/{TOKEN}").status == 200
    assert [path for path, _ in SEEN] == ["/run", "/", "/"]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "/run",
        "/wrong/run",
        f"/{TOKEN[:-1]}/",
        f"/{TOKEN}x/",
        f"/x/{TOKEN}/",
        f"/../{TOKEN}/",
        "/\udcff/",
    ],
)
def test_a_wrong_token_is_refused(path: str) -> None:
    reply = ask_raw(path)
    assert reply.status == 403
    assert "token" in reply.error
    assert not SEEN


def ask_raw(path: str) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await GUARD({**scope, "path": path}, receive, send)

    return ask(app, "/")


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT + 1}"],
)
def test_a_foreign_host_is_refused(host: str) -> None:
    """A name of somebody else's that leads to this machine, say."""
    reply = ask(GUARD, f"/{TOKEN}/", headers={"host": host})
    assert reply.status == 421
    assert not SEEN


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "http://evil.example",
        f"https://127.0.0.1:{PORT}",
        f"http://127.0.0.1:{PORT + 1}",
        f"http://127.0.0.1:{PORT}.evil.example",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_foreign_origin_is_refused(origin: str, method: str) -> None:
    headers = {**JSON, "origin": origin}
    reply = ask(GUARD, f"/{TOKEN}/run", method=method, headers=headers, body=b"{}")
    assert reply.status == 403
    assert "foreign" in reply.error
    assert not SEEN


def test_what_changes_something_needs_an_origin() -> None:
    headers = {**JSON, "origin": ""}
    reply = ask(GUARD, f"/{TOKEN}/run", method="POST", headers=headers, body=b"{}")
    assert reply.status == 403
    other = {**JSON, "sec-fetch-site": "cross-site"}
    reply = ask(GUARD, f"/{TOKEN}/run", method="POST", headers=other, body=b"{}")
    assert reply.status == 403
    assert not SEEN


def test_another_page_cannot_read_what_the_server_gives() -> None:
    other = {"origin": "", "sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}
    assert ask(GUARD, f"/{TOKEN}/start.json", headers=other).status == 403
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask(GUARD, f"/{TOKEN}/", headers={"origin": "", **followed}).status == 200
    assert len(SEEN) == 1


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods_are_refused(method: str) -> None:
    assert ask(GUARD, f"/{TOKEN}/", method=method).status == 405
    assert not SEEN


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded"]
)
def test_a_form_of_another_page_is_refused(kind: str) -> None:
    headers = {"content-type": kind}
    reply = ask(GUARD, f"/{TOKEN}/run", method="POST", headers=headers, body=b"{}")
    assert reply.status == 415
    assert not SEEN


def test_long_bodies_are_refused_announced_or_not() -> None:
    long = b" " * (MOST_BYTES + 1)
    for length in (str(len(long)), "", "0", "x", "-1", str(10**30)):
        headers = {**JSON, "content-length": length}
        reply = ask(GUARD, f"/{TOKEN}/run", method="POST", headers=headers, body=long)
        assert reply.status == 413, length
    assert not SEEN
    just = ask(GUARD, f"/{TOKEN}/run", method="POST", headers=JSON, body=long[1:])
    assert just.status == 200


def test_web_sockets_are_closed() -> None:
    assert ask(GUARD, f"/{TOKEN}/", kind="websocket").status == 1008


def test_every_answer_says_what_the_page_may_do() -> None:
    for path, headers in ((f"/{TOKEN}/", OWN), ("/wrong/", OWN)):
        told = ask(GUARD, path, headers=headers).headers
        policy = told["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "script-src 'self';" in policy
        assert "http" not in policy
        assert told["referrer-policy"] == "no-referrer"
        assert told["x-content-type-options"] == "nosniff"
        assert told["cache-control"] == "no-store"
