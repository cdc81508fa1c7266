"""The served engine, over a socket of the loopback, beside the same run offline."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from sim.config.tables import load_config
from sim.serving.live import LiveEngine
from sim.serving.server import Served
from sim.simulation.run import Simulation
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "Qwen/Qwen3-32B"
SETTINGS = ["engine.enable_prefix_caching=true", "workload.preset.duration_s=60"]


class Client:
    def __init__(self, engine: LiveEngine, api_key: str | None = None) -> None:
        self.engine = engine
        self.served = Served(engine, MODEL, api_key=api_key)
        self.address = urlsplit(self.served.url).netloc
        self.thread = threading.Thread(target=self.served.serve)
        self.thread.start()

    def ask(self, path: str, body: object = None, key: str = "") -> tuple[int, bytes]:
        connection = HTTPConnection(self.address, timeout=30)
        payload = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}"}
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, payload, headers)
        with closing(connection), connection.getresponse() as response:
            return response.status, response.read()

    def end(self) -> None:
        self.served.stop()
        self.thread.join(30)


def live() -> LiveEngine:
    return LiveEngine(load_config(ROOT / "examples/demo.yaml", SETTINGS), speed=20)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(live())
    yield client
    client.end()


def test_answers_whole_and_streamed_have_the_length_that_is_asked(
    client: Client,
) -> None:
    assert client.ask("/health") == (200, b"")
    models = json.loads(client.ask("/v1/models")[1])
    assert [each["id"] for each in models["data"]] == [MODEL]
    body: dict[str, Any] = {"prompt": "x" * 400, "max_tokens": 8, "ignore_eos": True}
    status, text = client.ask("/v1/completions", body)
    whole = json.loads(text)
    assert status == 200
    assert whole["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 8,
        "total_tokens": 108,
    }
    assert whole["choices"][0]["finish_reason"] == "length"
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    chat |= {"max_tokens": 8, "ignore_eos": True}
    chat |= {"stream_options": {"include_usage": True}}
    lines = client.ask("/v1/chat/completions", chat)[1].decode().split("\n\n")
    *events, done, rest = lines
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(line.removeprefix("data: ")) for line in events]
    said = "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1])
    assert said == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_a_stop_string_ends_the_answer_before_it(client: Client) -> None:
    body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True, "stop": "004"}
    found = json.loads(client.ask("/v1/completions", body)[1])
    assert found["choices"][0]["text"] == "000 001 002 003 "
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "body", [b"{", b"[]", {"prompt": 3}, {"prompt": "a", "max_tokens": 0}]
)
def test_a_bad_body_is_refused_in_one_line(client: Client, body: object) -> None:
    status, text = client.ask("/v1/completions", body)
    assert status == 400
    assert json.loads(text)["error"]["type"] == "BadRequestError"


def test_a_client_that_vanishes_leaves_no_blocks(client: Client) -> None:
    connection = HTTPConnection(client.address, timeout=30)
    body = {"prompt": "x" * 4000, "max_tokens": 20_000, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    with closing(connection), connection.getresponse() as response:
        response.read(100)
    client.ask("/v1/completions", {"prompt": "b", "max_tokens": 200})
    client.end()
    results = client.engine.finish()
    client.engine.run.check()
    assert client.engine.run.recorder.num_left == 1
    assert results.summary["num_requests"] == 2


def test_a_key_is_asked_for() -> None:
    client = Client(live(), api_key="secret")
    try:
        assert client.ask("/v1/models")[0] == 401
        assert client.ask("/v1/models", key="secret")[0] == 200
    finally:
        client.end()


def test_served_and_simulated_offline_are_the_same_run(client: Client) -> None:
    prefix = "a long system prompt " * 100
    threads = [
        threading.Thread(
            target=client.ask,
            args=(
                "/v1/completions",
                {"prompt": f"{prefix}{i}", "max_tokens": 30, "ignore_eos": True},
            ),
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.end()
    served = client.engine.finish()
    config = load_config(ROOT / "examples/demo.yaml", SETTINGS)
    offline = Simulation(config, specs=client.engine.run.taken).run()
    ours = served.recording.request_table.frame()
    theirs = offline.recording.request_table.frame()
    assert ours.equals(theirs)
    assert ours["num_cached_tokens"].max() > 400
