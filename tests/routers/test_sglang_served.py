"""sglang-router before four served engines, beside the rule of the simulated one."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING

import pytest

from sim.config.tables import load_config
from sim.engine.requests import RequestFactory
from sim.engine.routers.prefix_tree import PrefixTree, pieces_of
from sim.results.run import Results
from sim.serving.server import ServedEngine
from tests.shared import ROOT
from tests.sim.serving.client import SETTINGS, Group
from workloads.traces.kvsim import KvsimTraceReader

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("sglang_router.launch_router", reason="pip install sglang-router")
pytestmark = pytest.mark.slow

NUM_ENGINES, NUM_REQUESTS, NUM_GROUPS = 4, 120, 12
CACHE_THRESHOLD = 0.3
MODEL = "Qwen/Qwen3-8B"


def prompts() -> list[str]:
    """Return texts with shared beginnings of twelve blocks."""
    draw = random.Random(5)
    found = []
    for index in range(NUM_REQUESTS):
        beginning = (f"group {draw.randrange(NUM_GROUPS):02d} says: " * 100)[: 64 * 12]
        found.append(f"{beginning}own {index} " + "y" * draw.randint(20, 900))
    return found


def is_ready(port: int) -> bool:
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


async def ask_all(port: int) -> None:
    async def one(prompt: str) -> None:
        body: dict[str, object] = {"model": MODEL, "prompt": prompt, "stream": True}
        body |= {"max_tokens": 40, "ignore_eos": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        writer.write(head.encode() + content)
        assert b"[DONE]" in await reader.read(-1)
        writer.close()

    draw, waiting = random.Random(6), []
    for prompt in prompts():
        waiting.append(asyncio.create_task(one(prompt)))
        await asyncio.sleep(draw.expovariate(25))
    await asyncio.gather(*waiting)


def test_its_choices_are_those_that_the_simulated_rule_allows(tmp_path: Path) -> None:
    settings = [*SETTINGS, f"engine.model={MODEL}", "engine.scheduler=sglang"]
    settings += ["engine.enable_prefix_caching=null"]
    config = load_config(ROOT / "examples/demo.yaml", settings)
    places = range(NUM_ENGINES)
    engines = [ServedEngine(config, directory=tmp_path / str(i)) for i in places]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy"]
    command += ["cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(engine.port.url for engine in engines)]
    with Group(engines), (tmp_path / "log").open("w") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not is_ready(port) and time.monotonic() < deadline:
                time.sleep(0.2)
            asyncio.run(ask_all(port))
        finally:
            router.terminate()
            router.wait(30)
    rows = []
    for place in places:
        if not engines[place].results[0].summary["num_requests"]:
            continue
        table = Results.load(tmp_path / str(place)).requests
        specs = KvsimTraceReader(tmp_path / str(place) / "arrivals.jsonl").read()
        offset_s = engines[place].engine.started_s
        for spec, finish_s in zip(specs, table["finish_s"], strict=True):
            rows.append((spec.arrival_s + offset_s, place, spec, finish_s + offset_s))
    rows.sort(key=lambda row: row[0])
    assert len(rows) == NUM_REQUESTS
    tree, factory, num_allowed = PrefixTree(1 << 24), RequestFactory(40_960), 0
    for index, (now_s, place, spec, _) in enumerate(rows):
        pieces = pieces_of(factory.samples(spec)[0].tokens.prompt())
        num_known, knowing = tree.match(pieces)
        loads = [
            sum(at == other and end > now_s for _, at, _, end in rows[:index])
            for other in places
        ]
        allowed = {other for other in places if loads[other] == min(loads)}
        if num_known > CACHE_THRESHOLD * spec.num_prompt_tokens:
            allowed = set(knowing)
        num_allowed += place in allowed
        tree.insert(pieces, place)
    # Its counts lag behind the engines': a few choices between loads may differ.
    assert num_allowed >= NUM_REQUESTS - 4
