"""The served engine, over a socket of the loopback, beside the same run offline."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import threading
import time
import tracemalloc
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from sim.config.tables import load_config, parse_config
from sim.errors import ConfigError
from sim.results.run import Results
from sim.serving.asked import asked_of
from sim.serving.filler import NUMBERS
from sim.serving.joined import join
from sim.serving.live import LiveEngine, LiveRun
from sim.serving.server import ServedEngine, engines_of
from sim.serving.text import CharacterTokens
from sim.simulation.run import Simulation
from tests.shared import ROOT
from tests.sim.config.test_config import minimal
from tests.sim.serving.client import MODEL, SETTINGS, Client, Group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


LONG = b'{"prompt": "a", "max_tokens": 20000, "ignore_eos": true}'


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.end()
    client.engine.run.check()


def chunks_of(text: bytes) -> list[dict[str, Any]]:
    *events, done, rest = text.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in events]


def test_answers_whole_and_streamed_have_the_length_that_is_asked(
    client: Client,
) -> None:
    assert client.ask("/health") == (200, b"")
    models = json.loads(client.ask("/v1/models")[1])
    assert [each["id"] for each in models["data"]] == [MODEL]
    assert json.loads(client.ask("/version")[1]) == {"version": "0.33"}
    whole = client.completion(prompt="x" * 400, max_tokens=8, ignore_eos=True)
    assert whole["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 8,
        "total_tokens": 108,
    }
    assert whole["choices"][0]["finish_reason"] == "length"
    assert abs(whole["created"] - time.time()) < 60
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    chat |= {"max_tokens": 8, "ignore_eos": True, "stream": True}
    chat |= {"stream_options": {"include_usage": True}}
    chunks = chunks_of(client.ask("/v1/chat/completions", chat)[1])
    said = "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1])
    assert said == whole["choices"][0]["text"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_samples_of_texts_and_of_token_ids_are_choices_in_order(
    client: Client,
) -> None:
    body: dict[str, Any] = {"prompt": [[1, 2, 3], [4] * 50], "n": 2, "logprobs": 1}
    body |= {"max_tokens": 3, "ignore_eos": True}
    whole = client.completion(**body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 53
    assert whole["usage"]["completion_tokens"] == 12
    logprobs = whole["choices"][3]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["choices"][3]["text"]
    assert logprobs["text_offset"] == [0, 4, 8]
    chunks = chunks_of(client.ask("/v1/completions", body | {"stream": True})[1])
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [each["text"] for each in whole["choices"]]


def test_a_stop_string_ends_the_answer_before_it(client: Client) -> None:
    found = client.completion(prompt="a", max_tokens=50, ignore_eos=True, stop="004")
    assert found["choices"][0]["text"] == "000 001 002 003 "
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        {"prompt": 3},
        {"prompt": []},
        {"prompt": [["a"]]},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "n": 0},
        {"prompt": "a", "stream": 1},
        {"prompt": "a", "model": 3},
        {"prompt": "a" * 1_000_000},
        {"prompt": [1] * 50_000, "max_tokens": 5},
        {"prompt": "a", "max_tokens": 10**7},
        {"prompt": "a", "max_tokens": 3, "min_tokens": 4},
        {"prompt": "a", "priority": 2**80},
        {"prompt": "a", "stop": "x" * 100_000},
        {"prompt": "a", "stop": ["x"] * 100_000},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "response_format": {"type": "json_object"}},
    ],
)
def test_a_bad_body_is_refused_in_one_line(client: Client, body: object) -> None:
    num_taken = len(client.engine.run.taken)
    status, text = client.ask("/v1/completions", body)
    assert status == 400
    error = json.loads(text)["error"]
    assert error["type"] == "BadRequestError"
    assert "\n" not in error["message"]
    assert len(client.engine.run.taken) == num_taken


def test_an_answer_is_as_long_as_is_asked_at_least(client: Client) -> None:
    for num_tokens in (1500, 2000):
        found = client.completion(prompt="a", min_tokens=num_tokens, max_tokens=9000)
        assert found["usage"]["completion_tokens"] >= num_tokens


def test_a_name_that_has_no_bytes_is_refused(client: Client) -> None:
    status, text = client.ask("/v1/completions", b'{"prompt": "a", "model": "\\ud800"}')
    assert status == 404
    assert "does not exist" in json.loads(text)["error"]["message"]


def test_nothing_is_kept_of_a_prompt_but_its_identity(client: Client) -> None:
    body = json.dumps({"prompt": "x" * 100_000, "max_tokens": 5}).encode()
    asked, (prompt,) = client.served_engine.api.read(body, is_chat=False)
    assert not asked.prompts
    assert prompt.num_tokens == 25_000


def test_a_refused_body_stays_nowhere(client: Client) -> None:
    """An error that passes a thread holds it in a circle, for Python's collector."""
    body = json.dumps({"prompt": "x" * 8_000_000}).encode()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(4):
            assert client.ask("/v1/completions", body)[0] == 400
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert num_bytes < len(body)


def test_a_client_that_vanishes_leaves_no_blocks() -> None:
    client = Client()
    connection = HTTPConnection(client.address, timeout=30)
    body = {"prompt": "x" * 4000, "max_tokens": 20_000, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    with closing(connection), connection.getresponse() as response:
        response.read(100)
    client.completion(prompt="b", max_tokens=200)
    client.end()
    (results,) = client.served_engine.results
    client.engine.run.check()
    assert client.engine.run.recorder.num_left == 1
    assert results.summary["num_requests"] == 2


def test_a_session_without_requests_ends_with_empty_results() -> None:
    client = Client()
    client.end()
    (results,) = client.served_engine.results
    assert results.summary["num_requests"] == 0


def test_a_key_is_asked_for() -> None:
    client = Client(api_key="secret")
    try:
        assert client.ask("/v1/models")[0] == 401
        assert client.ask("/v1/models", key="secret")[0] == 200
        assert client.ask("/health")[0] == 200
    finally:
        client.end()


def test_sglang_asks_for_its_key_and_flushes_its_cache() -> None:
    settings = ["engine.scheduler=sglang", "engine.enable_prefix_caching=null"]
    client = Client(*settings, api_key="secret")
    body: dict[str, Any] = {"prompt": "x" * 4000, "max_tokens": 5, "ignore_eos": True}
    try:
        for path, status in (("/server_info", 401), ("/health_generate", 200)):
            assert client.ask(path)[0] == status
        assert client.ask("/flush_cache", b"")[0] == 401
        for flushes, hits in ((False, 0), (True, 999), (False, 999), (False, 1998)):
            status, _ = client.ask("/v1/completions", body, key="secret")
            assert status == 200
            told = client.engine.run.scheduler.summary()
            assert told["prefix_cache_hits"] == hits
            if flushes:
                assert client.ask("/flush_cache", b"", key="secret")[0] == 200
                tree = client.engine.run.scheduler.tree  # type: ignore[attr-defined]
                assert tree.num_evictable_tokens == 0
    finally:
        client.end()
    client.engine.run.check()
    (results,) = client.served_engine.results
    assert any("flushed 1 times" in line for line in results.summary["warnings"])


def test_a_fault_of_the_engine_is_told_to_who_waits_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client()
    engine = client.engine.run.engine

    def broken(now_s: float) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    monkeypatch.setattr(engine.scheduler, "form", broken, raising=False)
    status, text = client.ask("/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert status == 500
    assert "broken on purpose" in json.loads(text)["error"]["message"]
    client.thread.join(30)
    assert not client.thread.is_alive()
    assert "broken on purpose" in str(client.fault)


def ask_together(client: Client, num: int, **more: Any) -> None:
    prefix = "a long system prompt " * 100
    body = {"max_tokens": 30, "ignore_eos": True} | more
    threads = [
        threading.Thread(
            target=client.ask,
            args=("/v1/completions", {"prompt": f"{prefix}{i}"} | body),
        )
        for i in range(num)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(["engine.async_scheduling=false"], marks=pytest.mark.slow),
        ["engine.scheduler=sglang"],
        pytest.param(
            ["engine.scheduler=v0", "engine.enable_prefix_caching=true"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["engine.scheduler=hf_fifo", "engine.enable_prefix_caching=null"],
            marks=pytest.mark.slow,
        ),
        ["engine.data_parallel_size=2"],
        ["engine.kv_offloading_size=8"],
        ["engine.model=openai/gpt-oss-20b"],
    ],
    ids=lambda settings: " ".join(settings).replace("engine.", "") or "v1",
)
def test_what_was_recorded_runs_again_offline_and_is_the_same(
    settings: list[str], tmp_path: Path
) -> None:
    client = Client(*settings, directory=tmp_path / "out")
    ask_together(client, 6, n=1)
    client.end()
    assert client.fault is None
    client.engine.run.check()
    config = load_config(tmp_path / "out" / "config.yaml", [])
    offline = Simulation(config).run()
    served = Results.load(tmp_path / "out")
    theirs = offline.recording.request_table.frame()
    columns = [name for name in theirs.columns if name != "slo_class"]
    assert served.requests[columns].equals(theirs[columns])
    assert served.summary["completed"] == 6
    # what is kept of each request that came is shared, as sessions are long
    assert len(set(map(id, client.engine.run.taken))) == 1
    preemptions = offline.recording.preemptions
    assert len(served.preemptions) == len(preemptions)
    num_hits = served.requests["num_cached_tokens"].sum()
    assert num_hits == theirs["num_cached_tokens"].sum()


def test_preemptions_are_those_of_the_run_offline(tmp_path: Path) -> None:
    settings = ["engine.num_gpu_blocks_override=60", "engine.async_scheduling=false"]
    client = Client(*settings, directory=tmp_path / "out")
    prompts = [f"{place} says " * 40 for place in range(8)]  # all come at once
    client.completion(prompt=prompts, max_tokens=60, ignore_eos=True)
    client.end()
    served = Results.load(tmp_path / "out").preemptions
    config = load_config(tmp_path / "out" / "config.yaml", [])
    offline = Simulation(config).run().recording.preemptions
    assert len(offline) > 1
    columns = ["time_s", "request_id", "reason", "num_tokens_lost", "num_blocks_freed"]
    assert served[columns].equals(offline[columns])


def test_an_overloaded_engine_says_that_it_cannot_keep_up() -> None:
    now = [0.0]
    config = load_config(ROOT / "examples/demo.yaml", SETTINGS)
    engine = LiveEngine(config, now=lambda: now[0])
    said: list[float] = []
    engine.on_late = said.append
    engine.run.env.timeout(1.0)
    now[0] = 1.05
    engine.advance()
    assert said == []
    engine.run.env.timeout(1.0)
    now[0] = 4.05
    engine.advance()
    assert said == [pytest.approx(2.0)]
    results = engine.finish()
    assert any("could not keep up" in line for line in results.summary["warnings"])


def test_an_overloaded_engine_lets_its_clients_have_their_turn() -> None:
    """Otherwise it catches up with ever more, and neither answers nor ends."""
    ticks = itertools.count()
    config = load_config(ROOT / "examples/demo.yaml", SETTINGS)
    engine = LiveEngine(config, speed=1e6, now=lambda: next(ticks) / 1000)
    asked = asked_of(LONG, engine.usual_length, NUMBERS, is_chat=False)
    answer = engine.submit([CharacterTokens().prompt("a" * 400, 16)], asked)
    (request,) = answer.requests
    num_tokens = [0]
    for _ in range(20):
        before = next(ticks)
        engine.advance()
        assert next(ticks) - before < 40  # each event asks the clock
        num_tokens.append(request.num_output_tokens)
    assert num_tokens[0] < num_tokens[10] < num_tokens[20] < 20_000
    assert engine.drift_s > 0
    engine.abort(answer)
    engine.finish()
    engine.run.check()


def test_faults_come_to_order(tmp_path: Path) -> None:
    client = Client(directory=tmp_path / "out", admin=True)
    body: dict[str, Any] = {"prompt": "a" * 99, "max_tokens": 20, "ignore_eos": True}
    client.completion(**body)
    client.order("slow?factor=3")
    client.completion(**body)
    client.order("halt")
    with closing(HTTPConnection(client.address, timeout=0.2)) as connection:
        connection.request("GET", "/health")
        with pytest.raises(TimeoutError):
            connection.getresponse()
    client.order("go_on")
    assert client.ask("/health")[0] == 200
    client.order("die")
    deadline = time.monotonic() + 10
    while not client.refuses() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.served_engine.state == "dead"
    client.order("come_back")
    while client.refuses() and time.monotonic() < deadline:
        time.sleep(0.01)
    client.completion(**body)
    client.end()
    first, second = (Results.load(tmp_path / name) for name in ("out", "out-2"))
    tpot_s = first.requests["tpot_s"].to_list()
    assert tpot_s[1] == pytest.approx(3 * tpot_s[0], rel=0.01)
    assert len(second.requests) == 1


def test_an_engine_that_cannot_come_back_is_a_line_and_others_go_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "out-2").mkdir()
    (tmp_path / "out-2" / "mine").touch()
    client = Client(directory=tmp_path / "out", admin=True)
    assert client.admin is not None
    address = urlsplit(client.admin.url).netloc
    client.order("come_back")  # it is there
    client.order("die")
    for _ in range(2):
        status, text = client.ask("/engines/0/come_back", b"", address=address)
        assert status == 400
        assert "out-2' exists already" in json.loads(text)["error"]["message"]
    shutil.rmtree(tmp_path / "out-2")
    client.order("come_back")
    assert client.ask("/health")[0] == 200
    client.end()
    assert client.fault is None


def test_a_page_of_a_browser_orders_no_faults() -> None:
    client = Client(admin=True)
    assert client.admin is not None
    address = urlsplit(client.admin.url).netloc
    with closing(HTTPConnection(address, timeout=30)) as connection:
        headers = {"Origin": "http://elsewhere.example"}
        connection.request("POST", "/engines/0/die", b"", headers)
        assert connection.getresponse().status == 403
    assert client.ask("/health")[0] == 200
    client.end()


def test_what_came_to_a_fleet_is_one_run_of_it_with_its_router(tmp_path: Path) -> None:
    fleet = "{pools: [{name: a, replicas: 2}], router: {kind: sglang_cache_aware}}"
    config = load_config(ROOT / "examples/demo.yaml", [*SETTINGS, f"fleet={fleet}"])
    engines = [
        ServedEngine(each, directory=tmp_path / f"{place}", speed=20)
        for place, each in enumerate(engines_of(config))
    ]
    body = json.dumps({"prompt": "a" * 400, "max_tokens": 3, "ignore_eos": True})
    with Group(engines):
        for place in (1, 0, 1):  # each after the one before
            address = urlsplit(engines[place].port.url).netloc
            with closing(HTTPConnection(address, timeout=30)) as connection:
                connection.request("POST", "/v1/completions", body)
                assert connection.getresponse().status == 200
    folders = [folder for engine in engines for folder in engine.folders]
    assert join(config, tmp_path, folders)
    offline = Simulation(load_config(tmp_path / "config.yaml", [])).run()
    table = offline.recording.request_table.frame().sort_values("request_id")
    # The router knows the prompt of the first one, so all go to one engine.
    assert table["engine"].nunique() == 1
    came = [Results.load(folder).requests for folder in folders]
    assert [len(each) for each in came] == [1, 2]
    arrivals = [came[1]["arrival_s"].iloc[0], came[0]["arrival_s"].iloc[0]]
    assert table["arrival_s"].to_list()[:2] == arrivals


@pytest.mark.slow
def test_results_are_written_while_the_server_goes_on(tmp_path: Path) -> None:
    client = Client(directory=tmp_path / "out", admin=True)
    assert client.admin is not None
    address = urlsplit(client.admin.url).netloc
    status, text = client.ask("/engines/0/results", b"", address=address)
    assert (status, json.loads(text)["error"]["type"]) == (400, "BadRequestError")
    body: dict[str, Any] = {"prompt": "a" * 99, "max_tokens": 20, "ignore_eos": True}
    client.completion(**body)
    status, text = client.ask("/engines/0/results", b"", address=address)
    assert status == 200, text
    client.completion(**body)
    client.end()
    before = Results.load(json.loads(text)["results"])
    served = Results.load(tmp_path / "out")
    assert len(served.requests) == 2
    columns = ["arrival_s", "ttft_s", "tpot_s", "finish_s", "num_output_tokens"]
    assert before.requests[columns].equals(served.requests[columns][:1])
    assert load_config(tmp_path / json.loads(text)["results"] / "config.yaml", [])


def test_ranks_that_divide_experts_are_served_one_step_at_a_time() -> None:
    data = minimal(
        model="Qwen/Qwen3-30B-A3B", data_parallel_size=2, enable_expert_parallel=True
    )
    with pytest.raises(
        ConfigError, match=r"async_scheduling: ranks .* set it to false"
    ):
        LiveRun(parse_config(data))
    data["engine"]["async_scheduling"] = False
    assert len(LiveRun(parse_config(data)).engines) == 2
