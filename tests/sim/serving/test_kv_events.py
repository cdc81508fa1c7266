"""Events of the KV cache, as a router that knows the caches reads them."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import ConfigError
from tests.sim.serving.client import Client

zmq: Any = pytest.importorskip("zmq", reason="pip install pyzmq")
msgpack: Any = pytest.importorskip("msgpack", reason="pip install msgpack")


class Mirror:
    """Blocks of the cache as a subscriber learns them from events."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.blocks: dict[int, int] = {}
        self.stored: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.num_cleared = 0

    def read(self) -> None:
        while self.socket.poll(300):
            _, number, payload = self.socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            _, events, rank = msgpack.unpackb(payload)
            assert rank == 0
            for event in events:
                self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.num_cleared += 1
            self.blocks.clear()
            return
        for key in event["block_hashes"]:
            if event["type"] == "BlockStored":
                self.blocks[key] = self.blocks.get(key, 0) + 1
            else:
                self.blocks[key] -= 1
                if not self.blocks[key]:
                    del self.blocks[key]
        if event["type"] == "BlockStored":
            size = event["block_size"] * len(event["block_hashes"])
            assert len(event["token_ids"]) == size
            self.stored.append(event)


def test_a_mirror_of_the_events_is_the_cache() -> None:
    from sim.serving.kv_events import Publisher, Watch  # noqa: PLC0415 - needs zmq

    publisher = Publisher()
    client = Client("engine.num_gpu_blocks_override=60", kv_events=publisher)
    mirror = Mirror(publisher.endpoint)
    try:
        mirror.socket.poll(100)  # the subscription arrives
        for index in range(12):
            text = f"{index % 4}" * 64 + f"{index}" * 300
            client.completion(prompt=text, max_tokens=20, ignore_eos=True)
        client.completion(prompt=[7] * 40, max_tokens=2, ignore_eos=True)
        mirror.read()
        pool = client.engine.run.scheduler.tables.pool  # type: ignore[attr-defined]
        held = [key & (2**64 - 1) for key, _ in pool.cached_blocks.blocks()]
        assert sorted(mirror.blocks) == sorted(set(held))
        assert sum(mirror.blocks.values()) == len(held)
        assert pool.num_evictions > 0
        assert mirror.numbers == list(range(len(mirror.numbers)))
        assert [7] * 32 in [event["token_ids"] for event in mirror.stored]
        parents = {event["parent_block_hash"] for event in mirror.stored} - {None}
        known = {key for event in mirror.stored for key in event["block_hashes"]}
        assert parents <= known
        assert parents
        client.completion(prompt=[9] * 20, n=100, max_tokens=1, ignore_eos=True)
        (watch,) = (
            each
            for each in client.engine.run.engines[0].listeners
            if isinstance(each, Watch)
        )
        assert not watch.active
    finally:
        mirror.socket.close()
        client.end()


def test_only_engines_that_find_blocks_by_content_publish() -> None:
    from sim.serving.kv_events import Publisher  # noqa: PLC0415 - needs zmq

    publisher = Publisher()
    try:
        with pytest.raises(ConfigError, match="enable_prefix_caching"):
            Client("engine.enable_prefix_caching=false", kv_events=publisher)
    finally:
        publisher.close()
