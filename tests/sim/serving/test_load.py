"""Many clients at once, good and bad ones; and a Ctrl-C of the command."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from sim.results.run import Results
from tests.shared import ROOT
from tests.sim.serving.client import SETTINGS, Client

if TYPE_CHECKING:
    from pathlib import Path

NUM_REQUESTS, NUM_CONNECTIONS = 10_000, 1_000


def posted(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def completion(index: int, **more: object) -> bytes:
    prompt = f"a shared beginning {index % 10} " * 20 + str(index)
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True} | more
    return posted(json.dumps(body).encode())


async def answer_of(reader: asyncio.StreamReader) -> int:
    """Read a whole answer; return its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    await reader.readexactly(length)
    return int(head.split()[1])


async def connection(host: str, port: int, first: int, statuses: list[int]) -> None:
    """Send ten requests one after another: good, malformed, huge, left, read slowly."""
    reader, writer = await asyncio.open_connection(host, port)
    for index in range(first, first + NUM_REQUESTS // NUM_CONNECTIONS):
        kind = index % 20
        if kind == 3:
            writer.write(posted(b'{"prompt": '))
        elif kind == 5 and index % 100 == 5:
            writer.write(posted(json.dumps({"prompt": "x" * 2**20}).encode()))
        elif kind in (7, 9):  # vanishes, or reads slowly and then vanishes
            writer.write(completion(index, stream=True, max_tokens=30))
            if kind == 9:
                await reader.read(10)
                await asyncio.sleep(0.05)
            writer.transport.abort()
            statuses.append(0)
            reader, writer = await asyncio.open_connection(host, port)
            continue
        else:
            writer.write(completion(index))
        statuses.append(await answer_of(reader))
    writer.close()


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 3 * NUM_CONNECTIONS:
        pytest.skip(f"the system allows {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of tests before
    client = Client("engine.model=Qwen/Qwen3-8B", speed=50)
    address = urlsplit(client.served.url)
    assert address.hostname is not None
    assert address.port is not None
    host, port = address.hostname, address.port
    statuses: list[int] = []

    async def all_of() -> None:
        each = NUM_REQUESTS // NUM_CONNECTIONS
        await asyncio.gather(
            *(
                connection(host, port, number * each, statuses)
                for number in range(NUM_CONNECTIONS)
            )
        )

    try:
        asyncio.run(all_of())
        while client.engine.num_unfinished:
            client.ask("/health")
    finally:
        client.end()
    run = client.engine.run
    run.check()
    assert len(statuses) == NUM_REQUESTS
    assert {status: statuses.count(status) for status in set(statuses)} == {
        200: NUM_REQUESTS * 17 // 20 - NUM_REQUESTS // 100,
        400: NUM_REQUESTS // 20 + NUM_REQUESTS // 100,
        0: NUM_REQUESTS // 10,
    }
    assert not run.recorder.active
    assert run.scheduler.cache_usage().num_physical_blocks == 0
    # kilobytes; an engine of this size and what tests import need 300 MB
    most = max(peak + 1, 900_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are otherwise")
def test_a_ctrl_c_writes_results_and_ends_without_a_word_of_python(
    tmp_path: Path,
) -> None:
    settings = [word for each in SETTINGS for word in ("--set", each)]
    command = [sys.executable, "-m", "kvsim", "serve", "examples/demo.yaml"]
    command += ["--port", "0", "--replicas", "2", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [*command, *settings],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        urls = [server.stdout.readline().strip() for _ in range(2)]
        assert server.stdout.readline().startswith("Ctrl-C")

        async def ask() -> list[int]:
            found = []
            for url in urls:
                address = urlsplit(url)
                pair = await asyncio.open_connection(address.hostname, address.port)
                pair[1].write(completion(1))
                found.append(await answer_of(pair[0]))
                pair[1].close()
            return found

        assert asyncio.run(ask()) == [200, 200]
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=60)
    assert server.returncode == 0
    assert "Traceback" not in said
    for place in range(2):
        results = Results.load(tmp_path / "out" / f"engine-{place}")
        assert results.summary["completed"] == 1
