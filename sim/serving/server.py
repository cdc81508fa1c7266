"""The OpenAI-compatible server before one simulated engine."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from contextlib import asynccontextmanager, closing, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sim.errors import ConfigError
from sim.serving.asked import Asked, BadRequestError, asked_of
from sim.serving.live import is_refused
from sim.serving.text import filler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request

    from sim.serving.live import LiveEngine, Stream

MOST_BODY_BYTES: Final = 64 * 2**20
_LOOK_EVERY_S: Final = 0.1


def application(
    engine: LiveEngine, model: str, api_key: str | None = None
) -> Starlette:
    """Return the ASGI application that serves one engine."""
    api = _Api(engine, model)

    def guarded(
        endpoint: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            expected = f"Bearer {api_key}"
            if api_key is not None and not secrets.compare_digest(
                given.encode(), expected.encode()
            ):
                return _error("Unauthorized", 401)
            return await endpoint(request)

        return answer

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        driver = asyncio.create_task(engine.drive())
        yield
        driver.cancel()
        with suppress(asyncio.CancelledError):
            await driver

    return Starlette(
        routes=[
            Route("/v1/completions", guarded(api.completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(api.chat), methods=["POST"]),
            Route("/v1/models", guarded(api.models)),
            Route("/health", api.health),
            Route("/version", api.version),
        ],
        lifespan=lifespan,
    )


class _Api:
    def __init__(self, engine: LiveEngine, model: str) -> None:
        self.engine = engine
        self.model = model

    async def health(self, _: Request) -> Response:
        return Response()

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": f"kvsim {version('kvsim')}"})

    async def models(self, _: Request) -> Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "kvsim",
            "max_model_len": self.engine.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        try:
            asked = asked_of(await _body(request), self.engine.usual_length, is_chat)
        except BadRequestError as error:
            return _error(str(error), 400)
        if asked.model not in (None, self.model):
            return _error(f"The model `{asked.model}` does not exist.", 404)
        stream = self.engine.submit(
            asked.text, asked.num_output_tokens, limit=asked.limit
        )
        if is_refused(stream.request):
            return _error(stream.request.reason, 400)
        reply = _Reply(asked, stream, self.model, is_chat=is_chat)
        if asked.stream:
            return StreamingResponse(
                self._events(reply), media_type="text/event-stream"
            )
        if not await self._is_awaited(request, stream):
            return Response(status_code=499)
        return JSONResponse(reply.whole())

    async def _is_awaited(self, request: Request, stream: Stream) -> bool:
        """Wait for the end of an answer; False if its client left before."""
        waiting = asyncio.create_task(_until_done(stream))
        while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S))[0]:
            if await request.is_disconnected():
                waiting.cancel()
                self.engine.abort(stream)
                return False
        return True

    async def _events(self, reply: _Reply) -> AsyncIterator[str]:
        stream = reply.stream
        try:
            num_told = 0
            while not stream.is_done or num_told < stream.request.num_output_tokens:
                num_tokens = await stream.tokens()
                if num_tokens > num_told:
                    yield _event(reply.part(num_told, num_tokens))
                    num_told = num_tokens
            if reply.asked.include_usage:
                yield _event(reply.last())
            yield "data: [DONE]\n\n"
        finally:
            if not stream.is_done:
                self.engine.abort(stream)


class _Reply:
    """What a client reads of one request, in whole or in parts."""

    def __init__(
        self, asked: Asked, stream: Stream, model: str, *, is_chat: bool
    ) -> None:
        self.asked = asked
        self.stream = stream
        self._is_chat = is_chat
        kind = "chatcmpl" if is_chat else "cmpl"
        self._head = {
            "id": f"{kind}-{stream.request.request_id}",
            "created": 0,
            "model": model,
        }

    def whole(self) -> dict[str, Any]:
        text = self._text(0, self.stream.request.num_output_tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason()}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._head | {
            "object": kind,
            "choices": [choice],
            "usage": self._usage(),
        }

    def part(self, first: int, end: int) -> dict[str, Any]:
        """Return the tokens from `first` on, before `end`."""
        text = self._text(first, end)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason()}
        if self._is_chat:
            choice["delta"] = {"content": text} | (
                {} if first else {"role": "assistant"}
            )
        else:
            choice["text"] = text
        return self._chunk([choice])

    def last(self) -> dict[str, Any]:
        """Return what tells nothing but the usage."""
        return self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

    def _text(self, first: int, end: int) -> str:
        text = filler(first, end)
        most = self.asked.most_characters
        return text if most is None else text[: max(0, most - len(filler(0, first)))]

    def _reason(self) -> str | None:
        request = self.stream.request
        if not self.stream.is_done or request.num_output_tokens > self.stream.num_told:
            return None
        if self.asked.ends_by_itself and (
            request.num_output_tokens == self.asked.num_output_tokens
        ):
            return "stop"
        return "length"

    def _usage(self) -> dict[str, Any]:
        request = self.stream.request
        return {
            "prompt_tokens": request.num_prompt_tokens,
            "completion_tokens": request.num_output_tokens,
            "total_tokens": request.num_tokens,
        }


async def _until_done(stream: Stream) -> None:
    while not stream.is_done:
        await stream.tokens()
    await stream.tokens()


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > MOST_BODY_BYTES:
            raise BadRequestError(
                f"a body has at most {MOST_BODY_BYTES} bytes; send a shorter prompt"
            )
    return bytes(found)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(message: str, status: int) -> JSONResponse:
    kind = {401: "Unauthorized", 404: "NotFoundError"}.get(status, "BadRequestError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status)


class Served:
    """A bound server of one engine.

    Parameters
    ----------
    engine
        What it serves.
    model
        Name of the model.
    host, port
        Where it listens; port 0 for any that is free.
    api_key
        What clients must send; None for nothing.
    """

    def __init__(
        self,
        engine: LiveEngine,
        model: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ) -> None:
        if not 0 <= port <= 65_535:
            raise ConfigError(f"--port takes 0 to 65535, got {port}")
        try:
            self._socket = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be used: {error.strerror}; give another"
            ) from error
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            application(engine, model, api_key),
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=2,
            ws="none",
        )
        self._server = uvicorn.Server(config)

    def serve(self) -> None:
        """Serve until a Ctrl-C, or until `stop`."""
        with closing(self._socket), suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Ask the server to end."""
        self._server.should_exit = True
