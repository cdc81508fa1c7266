"""Answers on their way to clients, who may leave before the end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.responses import Response

from sim.serving.answer import EngineDeadError
from sim.serving.replies import error_of, event

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from starlette.types import Message, Receive, Scope, Send

    from sim.serving.live import LiveEngine
    from sim.serving.replies import Reply

_DONE = "data: [DONE]\n\n"


class Stream(Response):
    """Server-sent events of one answer, each written as soon as it is known.

    What became known together is one write. An answer whose client leaves is withdrawn.
    """

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, engine: LiveEngine) -> None:
        self._reply = reply
        self._engine = engine
        self.status_code = 200
        self.background = None
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        answer = self._reply.answer
        try:
            await unless_left(self._told(send), receive)
        finally:
            if not answer.is_done:
                self._engine.abort(answer)

    async def _told(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start"} | head)
        reply, answer, begun = self._reply, self._reply.answer, False
        is_open = True
        while is_open:
            texts: list[str] = []
            try:
                news = await answer.news()
                if not begun:
                    texts += reply.beginning()
                    begun = True
                texts += [reply.part(*each) for each in news]
                is_open = not answer.is_done
                if not is_open:
                    if refusal := answer.refusal:
                        texts.append(event(error_of(refusal, 400)))
                    if reply.asked.include_usage:
                        texts.append(reply.usage())
            except EngineDeadError as error:
                told = error_of(f"the engine has ended: {error}", 500)
                texts, is_open = [event(told)], False
            if not is_open:
                texts.append(_DONE)
            body = "".join(texts).encode()
            await send(
                {"type": "http.response.body", "body": body, "more_body": is_open}
            )


async def unless_left(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Do `work` until the client leaves; return whether it was completed."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = working.done()
        for task in (working, leaving):
            task.cancel()
    with suppress(asyncio.CancelledError):
        await working  # raises what it found
    return is_done


async def _left(receive: Receive) -> Message:
    """Wait until the client has left."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message
