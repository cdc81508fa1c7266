"""A real router's server before fake workers, asked request by request."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

NUM_HEADS, HEAD_CHARS = 5, (60, 150, 300)
TAIL_CHARS = (5, 50, 400)
PATIENCE_S = 30.0
ANSWER = json.dumps(
    {
        "status": "ok",
        "model_path": "fake",
        "served_model_name": "fake",
        "object": "list",
        "data": [{"id": "fake", "object": "model"}],
        "text": "x",
        "meta_info": {"id": "x", "finish_reason": {"type": "stop"}},
    }
).encode()


@dataclass(frozen=True, slots=True)
class Came:
    """A prompt that the router sent to the worker at `place` of its own order."""

    text: str
    place: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request at `place`, of which the router knows by now."""

    place: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to a real router, and how many of them are in flight.

    Attributes
    ----------
    hot
        Share of prompts that are the first of a few texts and little more; the texts
        are new from time to time.
    most
        Requests in flight.
    """

    seed: int
    num_requests: int
    num_workers: int
    hot: float
    most: int


class Workers:
    """Servers that hold each request until they are told to answer."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.called: asyncio.Queue[tuple[int, asyncio.Event]] = asyncio.Queue()

    @asynccontextmanager
    async def serve(self, num_workers: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for place in range(num_workers):

                async def answer(
                    reader: asyncio.StreamReader,
                    writer: asyncio.StreamWriter,
                    place: int = place,
                ) -> None:
                    try:
                        while await self._answer(place, reader, writer):
                            pass
                    except (asyncio.IncompleteReadError, ConnectionError):
                        pass
                    except asyncio.CancelledError:
                        pass  # the test has failed
                    writer.close()

                server = await asyncio.start_server(answer, "127.0.0.1", 0)
                stack.callback(server.close)
                self.urls.append(f"http://127.0.0.1:{_port_of(server)}")
            yield

    async def _answer(
        self, place: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("PRI "):
            return False  # HTTP/2 is asked for
        await reader.readexactly(_length(head))
        if head.startswith("POST /generate"):
            gate = asyncio.Event()
            self.called.put_nowait((place, gate))
            await gate.wait()
        length = f"Content-Length: {len(ANSWER)}\r\n\r\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{length}"
        writer.write(head.encode() + ANSWER)
        await writer.drain()
        return True


@dataclass(slots=True)
class Gateway:
    """A router's server.

    Attributes
    ----------
    package
        `sglang_router` or `smg`.
    log
        What the server prints.
    """

    package: str
    policy: str
    options: Sequence[str]
    log: Path
    workers: Workers = field(default_factory=Workers)
    port: int = 0

    async def decisions(self, traffic: Traffic) -> list[Came | Ended]:
        """Ask for one request after the other, some of which stay in flight."""
        async with self.workers.serve(traffic.num_workers), self._started():
            order = await self._order(traffic.num_workers)
            async with asyncio.TaskGroup() as asking:
                return await self._asked(traffic, order, asking)

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        self.port, metrics = _free_port(), _free_port()
        command = [sys.executable, "-m", f"{self.package}.launch_router"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-port", str(metrics), "--disable-retries"]
        command += ["--policy", self.policy]
        command += ["--worker-startup-check-interval", "1", "--log-level", "warn"]
        command += [*self.options, "--worker-urls", *self.workers.urls]
        with self.log.open("w") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            process.kill()
            await process.wait()

    async def _order(self, num_workers: int) -> list[int]:
        """Return the workers in the order of the router, when it knows all."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    loads = await self._loads()
                except (OSError, ValueError, KeyError):
                    loads = {}
                if len(loads) == num_workers:
                    return [*loads]
                await asyncio.sleep(0.2)

    async def _asked(
        self, traffic: Traffic, order: Sequence[int], asking: asyncio.TaskGroup
    ) -> list[Came | Ended]:
        draw, done = random.Random(traffic.seed), list[Came | Ended]()
        heads: list[str] = []
        held: list[tuple[int, asyncio.Event, asyncio.Task[Any]]] = []
        num_in_flight = [0] * traffic.num_workers
        for number in range(traffic.num_requests):
            if number % (2 * traffic.most) == 0:
                heads = [
                    "".join(draw.choices("abcdefgh ", k=max(HEAD_CHARS)))
                    for _ in range(NUM_HEADS)
                ]
            while held and (len(held) >= traffic.most or draw.random() < 0.4):
                worker, gate, task = held.pop(draw.randrange(len(held)))
                gate.set()
                await task
                num_in_flight[worker] -= 1
                await self._until(num_in_flight)
                done.append(Ended(order.index(worker)))
            head, tail_chars = heads[0], min(TAIL_CHARS)
            if draw.random() >= traffic.hot:
                head = draw.choice(heads)[: draw.choice(HEAD_CHARS)]
                tail_chars = draw.choice(TAIL_CHARS)
            text = f"{head} {number} {''.join(draw.choices('klmnop', k=tail_chars))}"
            body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
            task = asking.create_task(self._ask("POST", "/generate", body))
            async with asyncio.timeout(PATIENCE_S):
                worker, gate = await self.workers.called.get()
            held.append((worker, gate, task))
            num_in_flight[worker] += 1
            done.append(Came(text, order.index(worker)))
        for _, gate, _ in held:
            gate.set()
        return done

    async def _until(self, num_in_flight: Sequence[int]) -> None:
        """Wait until a router that counts has taken note of an end."""
        if self.policy != "cache_aware":
            return
        async with asyncio.timeout(PATIENCE_S):
            while True:
                loads = await self._loads()
                if [loads[each] for each in sorted(loads)] == num_in_flight:
                    return
                await asyncio.sleep(0.002)

    async def _loads(self) -> dict[int, int]:
        """Return by worker what the router thinks is in flight."""
        workers = (await self._ask("GET", "/workers"))["workers"]
        return {
            self.workers.urls.index(each["url"]): each["load"]
            for each in workers
            if each["is_healthy"]
        }

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        content = json.dumps(body).encode() if body else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{head}\r\n\r\n".encode() + content)
        answer = await reader.read()
        writer.close()
        return json.loads(answer.partition(b"\r\n\r\n")[2])


def _length(head: str) -> int:
    lengths = [
        int(line.partition(":")[2])
        for line in head.splitlines()
        if line.lower().startswith("content-length:")
    ]
    return sum(lengths)


def _port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
