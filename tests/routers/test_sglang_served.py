"""sglang-router before four served engines, beside the simulated one."""

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
from sim.serving.joined import join
from sim.serving.server import ServedEngine, engines_of
from sim.serving.text import FIRST_ANSWER, CharacterTokens
from sim.simulation.run import Simulation
from tests.shared import ROOT
from tests.sim.serving.client import SETTINGS, Group
from workloads.spec import RequestSpec
from workloads.traces.kvsim import KvsimTraceReader

if TYPE_CHECKING:
    from pathlib import Path

    from sim.config.tables import RunConfig

pytest.importorskip("sglang_router.launch_router", reason="pip install sglang-router")
pytestmark = pytest.mark.slow

NUM_ENGINES, NUM_REQUESTS, NUM_GROUPS, NUM_OUTPUT_TOKENS = 4, 120, 12, 40
SPEED = 0.25
MARGIN_S = 0.01 * SPEED
MODEL = "Qwen/Qwen3-8B"


def planned(seed: int) -> list[tuple[float, str]]:
    """Return simulated times, and texts with shared beginnings of twelve blocks."""
    draw, found, now_s = random.Random(seed), [], 0.0
    for index in range(NUM_REQUESTS):
        beginning = (f"group {draw.randrange(NUM_GROUPS):02d} says: " * 100)[: 64 * 12]
        text = f"{beginning}own {index} " + "y" * draw.randint(20, 900)
        found.append((now_s, text))
        now_s += draw.expovariate(25)
    return found


def is_steady(config: RunConfig, plan: list[tuple[float, str]]) -> bool:
    """Whether no choice by load hangs on a few milliseconds.

    A real router learns of an end when its last byte has passed.
    """
    specs = [
        RequestSpec(
            request_id=index,
            arrival_s=1 + now_s,
            prompt=CharacterTokens().prompt(text, 16).segments,
            num_output_tokens=NUM_OUTPUT_TOKENS,
            output_segment=FIRST_ANSWER + index,
            ends_at_stop=False,
        )
        for index, (now_s, text) in enumerate(plan)
    ]
    table = Simulation(config, specs=specs).run().recording.request_table.frame()
    table = table.sort_values("request_id")
    places, ends_s = table["engine"].to_list(), table["finish_s"].to_list()
    known: set[str] = set()
    for index, (now_s, text) in enumerate(plan):
        if text[:9] in known:
            continue
        known.add(text[:9])
        for shift_s in (-MARGIN_S, MARGIN_S):
            seen_s = 1 + now_s + shift_s
            before = zip(places[:index], ends_s[:index], strict=True)
            busy = [place for place, end_s in before if end_s > seen_s]
            loads = [busy.count(place) for place in range(NUM_ENGINES)]
            if loads.index(min(loads)) != places[index]:
                return False
    return True


def workers(port: int) -> list[str]:
    """Return the addresses of the router's workers, in its order."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/workers")
            listed = json.loads(connection.getresponse().read())["workers"]
        except (OSError, HTTPException, ValueError):
            return []
    return [each["url"] for each in listed if each["is_healthy"]]


async def ask_all(port: int, plan: list[tuple[float, str]]) -> None:
    async def one(prompt: str) -> None:
        body: dict[str, object] = {"model": MODEL, "prompt": prompt, "stream": True}
        body |= {"max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        writer.write(head.encode() + content)
        assert b"[DONE]" in await reader.read(-1)
        writer.close()

    began_s, waiting = time.monotonic(), []
    for now_s, prompt in plan:
        await asyncio.sleep(max(0, began_s + now_s / SPEED - time.monotonic()))
        waiting.append(asyncio.create_task(one(prompt)))
    await asyncio.gather(*waiting)


def test_its_choices_are_those_of_the_simulated_router(tmp_path: Path) -> None:
    settings = [*SETTINGS, f"engine.model={MODEL}", "engine.scheduler=sglang"]
    settings += ["engine.enable_prefix_caching=null"]
    fleet = f"pools: [{{name: a, replicas: {NUM_ENGINES}}}]"
    settings += [f"fleet={{{fleet}, router: {{kind: sglang_cache_aware}}}}"]
    config = load_config(ROOT / "examples/demo.yaml", settings)
    plan = next(plan for plan in map(planned, range(99)) if is_steady(config, plan))
    engines = [
        ServedEngine(each, directory=tmp_path / f"{place}", speed=SPEED)
        for place, each in enumerate(engines_of(config))
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy"]
    command += ["cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(engine.port.url for engine in engines)]
    with Group(engines), (tmp_path / "log").open("w") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while len(workers(port)) < NUM_ENGINES and time.monotonic() < deadline:
                time.sleep(0.2)
            urls = workers(port)
            asyncio.run(ask_all(port, plan))
        finally:
            router.terminate()
            router.wait(30)
    # Ties go by the order in which the router keeps its workers, which it draws.
    order = [[engine.port.url for engine in engines].index(url) for url in urls]
    assert join(config, tmp_path, [f for engine in engines for f in engine.folders])
    offline = Simulation(load_config(tmp_path / "config.yaml", [])).run()
    simulated = [
        order[place]
        for place in offline.recording.request_table.frame()
        .sort_values("request_id")["engine"]
        .to_list()
    ]
    assert len(simulated) == NUM_REQUESTS
    came = [
        (spec.arrival_s, place)
        for place, engine in enumerate(engines)
        for folder in engine.folders
        if engine.engine.run.taken
        for spec in KvsimTraceReader(folder / "arrivals.jsonl").read()
    ]
    chosen = [place for _, place in sorted(came)]
    assert min(chosen.count(place) for place in range(NUM_ENGINES)) > 0
    assert simulated == chosen
