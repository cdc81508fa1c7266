"""A served engine on the loopback, and a client of it."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sim.config.tables import load_config
from sim.serving.served import Served
from sim.serving.server import Port, ServedEngine
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.serving.live import LiveEngine

MODEL = "Qwen/Qwen3-32B"
SETTINGS = ["engine.enable_prefix_caching=true", "workload.preset.duration_s=60"]


class Client:
    """One engine, served from a thread, and what asks it."""

    def __init__(self, *settings: str, admin: bool = False, **options: Any) -> None:
        config = load_config(ROOT / "examples/demo.yaml", [*SETTINGS, *settings])
        self.served_engine = ServedEngine(config, **({"speed": 20} | options))
        self.admin = Port("127.0.0.1", 0) if admin else None
        self.served = Served([self.served_engine], self.admin)
        self.address = urlsplit(self.served.url).netloc
        self.fault: BaseException | None = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.served.serve()
        except Exception as error:
            self.fault = error

    @property
    def engine(self) -> LiveEngine:
        return self.served_engine.engine

    def ask(
        self, path: str, body: object = None, key: str = "", address: str = ""
    ) -> tuple[int, bytes]:
        connection = HTTPConnection(address or self.address, timeout=30)
        payload = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Authorization": f"Bearer {key}"}
        with closing(connection):
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                connection.request("POST", path, payload, headers)
            with connection.getresponse() as response:
                return response.status, response.read()

    def completion(self, **body: Any) -> dict[str, Any]:
        status, text = self.ask("/v1/completions", body)
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def refuses(self) -> bool:
        """Whether nobody listens any more."""
        try:
            self.ask("/health")
        except ConnectionRefusedError:
            return True
        except (ConnectionError, HTTPException):
            return False
        return False

    def order(self, action: str) -> None:
        """Order a fault."""
        assert self.admin is not None
        address = urlsplit(self.admin.url).netloc
        status, text = self.ask(f"/engines/0/{action}", b"", address=address)
        assert status == 200, text

    def end(self) -> None:
        self.served.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


class Group:
    """Engines that are served from a thread while a ``with`` block lasts."""

    def __init__(self, engines: Sequence[ServedEngine]) -> None:
        self.served = Served(engines)
        self.thread = threading.Thread(target=self.served.serve)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.served.stop()
        self.thread.join(30)
