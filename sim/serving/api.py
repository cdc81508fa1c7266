"""The HTTP API before one simulated engine: OpenAI's, with what vLLM and SGLang add."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sim.serving.answer import EngineDeadError
from sim.serving.asked import Asked, BadRequestError, asked_of, chat_text, fields_of
from sim.serving.dialects import dialect_of
from sim.serving.replies import Reply, error_of
from sim.serving.streams import Stream, unless_left
from sim.serving.text import FileTokens, prompt_of_ids

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prometheus_client import CollectorRegistry
    from starlette.requests import Request

    from sim.serving.live import LiveEngine
    from sim.serving.text import Prompt, Tokens

    Endpoint = Callable[[Request], Awaitable[Response]]

_Read = TypeVar("_Read")
MOST_BODY_BYTES: Final = 16 * 2**20
_LARGE_BODY_BYTES: Final = 2**18
_MOST_LARGE: Final = 16
"""Large bodies that are read at a time; others wait in their connections."""


class Api:
    """Endpoints before one engine, which may be replaced.

    Parameters
    ----------
    engine
        What answers.
    tokens
        How text becomes tokens.
    registry
        Metrics of the engine.
    api_key
        What clients must send; None for nothing.
    """

    def __init__(
        self,
        engine: LiveEngine,
        tokens: Tokens,
        registry: CollectorRegistry,
        api_key: str | None = None,
    ) -> None:
        self.engine = engine
        self._large = asyncio.Semaphore(_MOST_LARGE)
        self.tokens = tokens
        self.registry = registry
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._api_key = api_key
        self._table = engine.config.engine
        self._dialect = dialect_of(engine)
        self.model = self._table.model

    def application(self) -> Starlette:
        """Return the ASGI application."""
        dialect = self._dialect
        ends: list[tuple[str, Endpoint, list[str]]] = [
            ("/v1/completions", self.completions, ["POST"]),
            ("/v1/chat/completions", self.chat, ["POST"]),
            ("/v1/models", self.models, ["GET"]),
            ("/health", self.health, ["GET"]),
            ("/ping", self.health, ["GET"]),
            ("/version", self.version, ["GET"]),
            ("/metrics", self.metrics, ["GET"]),
            ("/tokenize", self.tokenize, ["POST"]),
            ("/detokenize", self.detokenize, ["POST"]),
        ]
        ends += [(path, self.health, ["GET"]) for path in dialect.health]
        ends += [
            (path, self._page(page), ["GET"]) for path, page in dialect.pages.items()
        ]
        ends += [
            (path, self._act(act), ["GET", "POST"])
            for path, act in dialect.actions.items()
        ]
        return Starlette(
            routes=[
                Route(
                    path,
                    self._when_awake(
                        self._keyed(end) if dialect.is_keyed(path) else end
                    ),
                    methods=methods,
                )
                for path, end, methods in ends
            ]
        )

    def _keyed(self, endpoint: Endpoint) -> Endpoint:
        key = self._api_key
        if key is None:
            return endpoint

        async def answer(request: Request) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            is_it = secrets.compare_digest(given.encode(), key.encode())
            if scheme.lower() != "bearer" or not is_it:
                return _error("Unauthorized", 401)
            return await endpoint(request)

        return answer

    def _when_awake(self, endpoint: Endpoint) -> Endpoint:
        """Wait while the engine stands still, as all of a hung server does."""

        async def answer(request: Request) -> Response:
            await self.goes_on.wait()
            try:
                return await endpoint(request)
            except BadRequestError as error:
                return _error(str(error), 400)
            except EngineDeadError as error:
                return _error(f"the engine has ended: {error}", 500)

        return answer

    # -- what tells of the server ---------------------------------------------

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self.engine.fault is None else 503)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": self._table.version})

    async def metrics(self, _: Request) -> Response:
        self.engine.advance()
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: Request) -> Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": self._dialect.owner,
            "root": self.model,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
            "permission": [],
        }
        return JSONResponse({"object": "list", "data": [card]})

    def _page(self, page: Callable[[LiveEngine], Any]) -> Endpoint:
        async def told(_: Request) -> Response:
            self.engine.advance()
            return JSONResponse(page(self.engine))

        return told

    def _act(self, act: Callable[[LiveEngine], tuple[int, str]]) -> Endpoint:
        async def done(_: Request) -> Response:
            self.engine.advance()
            status, said = act(self.engine)
            return Response(said, status, media_type="text/plain")

        return done

    # -- tokens ---------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        tokens = self._file_tokens()
        fields = await self._body(request, fields_of)
        text = fields.get("prompt")
        if "messages" in fields:
            text = chat_text(fields)
        if not isinstance(text, str):
            raise BadRequestError("give a prompt, or messages")
        ids, texts = await run_in_threadpool(tokens.ids, text)
        told = {"count": len(ids), "max_model_len": self.engine.max_model_len}
        more = {"token_strs": texts if fields.get("return_token_strs") else None}
        return JSONResponse(told | {"tokens": ids} | more)

    async def detokenize(self, request: Request) -> Response:
        tokens = self._file_tokens()
        ids = (await self._body(request, fields_of)).get("tokens")
        if not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise BadRequestError("tokens must be a list of token ids")
        return JSONResponse({"prompt": tokens.text(ids)})

    def _file_tokens(self) -> FileTokens:
        if isinstance(self.tokens, FileTokens):
            return self.tokens
        raise BadRequestError("there is no tokenizer; start with --tokenizer FILE")

    # -- completions ----------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        read = partial(self.read, is_chat=is_chat)
        asked, prompts = await self._body(request, read)
        if asked.model not in (None, self.model):
            return _error(f"The model `{asked.model:.200}` does not exist.", 404)
        engine = self.engine
        answer = engine.submit(prompts, asked)
        if refusal := answer.refusal:
            engine.abort(answer)
            return _error(refusal, 400)
        reply = Reply(asked, answer, self.model, self.tokens.filler)
        if asked.stream:
            return Stream(reply, engine)
        if not await unless_left(answer.end(), request.receive):
            engine.abort(answer)
            return Response(status_code=499)
        if refusal := answer.refusal:
            return _error(refusal, 400)
        return JSONResponse(reply.whole())

    def read(self, body: bytes, *, is_chat: bool) -> tuple[Asked, list[Prompt]]:
        """Return the request asked for, without its prompts as they came, and these."""
        usual = self.engine.usual_length
        asked = asked_of(body, usual, self.tokens.filler, is_chat=is_chat)
        prompts = [self._prompt(each, asked.limit) for each in asked.prompts]
        return replace(asked, prompts=()), prompts

    async def _body(self, request: Request, read: Callable[[bytes], _Read]) -> _Read:
        """Return the value that `read` makes of a body, of which nothing is kept."""
        told = request.headers.get("content-length", "")
        is_small = told.isdecimal() and int(told) <= _LARGE_BODY_BYTES
        if is_small:
            return read(await _whole(request))
        async with self._large:
            held = [await _whole(request)]
            # The engines go on meanwhile. Neither threads nor errors keep the body.
            found = await run_in_threadpool(_found, read, held)
        if isinstance(found, BadRequestError):
            raise found
        return found

    def _prompt(self, given: str | list[int], limit: int | None) -> Prompt:
        most, size = self.engine.max_model_len, self.engine.block_size
        tokens = self.tokens
        num = len(given) if isinstance(given, list) else tokens.count(given)
        if num < most:
            prompt = (
                prompt_of_ids(given, size)
                if isinstance(given, list)
                else tokens.prompt(given, size)
            )
            num = prompt.num_tokens
            if num < most and num + (limit or 1) <= most:
                return prompt
        asked = f"{limit} output tokens" if limit else "an answer"
        raise BadRequestError(
            f"This model's maximum context length is {most} tokens. However, you "
            f"requested {asked} and your prompt contains {num} tokens; shorten either."
        )


def _found(
    read: Callable[[bytes], _Read], held: list[bytes]
) -> _Read | BadRequestError:
    """Return the value read of a body that is taken from `held`, or its refusal."""
    try:
        return read(held.pop())
    except BadRequestError as error:
        return error.with_traceback(None)


async def _whole(request: Request) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > MOST_BODY_BYTES:
            raise BadRequestError(
                f"a body has at most {MOST_BODY_BYTES} bytes; send a shorter prompt"
            )
    return bytes(found)


def _error(message: str, status: int) -> Response:
    # Half a surrogate pair is a text in JSON, and has no bytes.
    said = message.encode("utf-8", "backslashreplace").decode()
    body: dict[str, Any] = error_of(said, status)
    return JSONResponse(body, status)
