"""A page that ``kvsim explore`` serves in a process of its own, asked over the wire."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 90.0


@dataclass(frozen=True)
class Served:
    """A server, and the address that it printed."""

    url: str
    process: subprocess.Popen[str]

    @property
    def origin(self) -> str:
        return "/".join(self.url.split("/")[:3])

    def post(self, path: str, body: Any, **headers: str) -> list[dict[str, Any]]:
        """Ask as the page does; return the lines of the answer."""
        with self.open(path, body, **headers) as reply:
            return [json.loads(line) for line in reply]

    def open(self, path: str, body: Any, **headers: str) -> Any:
        told = {"Origin": self.origin, "Content-Type": "application/json"} | headers
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, told)
        return urllib.request.urlopen(request, timeout=PATIENCE_S)

    def run(self, **settings: Any) -> dict[str, Any]:
        asked = {"settings": {k.replace("__", "."): v for k, v in settings.items()}}
        return self.post("run", asked)[-1]

    def processes(self) -> list[int]:
        """The processes below the server, of whatever depth."""
        found, left = [], [self.process.pid]
        while left:
            for child in children(left.pop()):
                found.append(child)
                left.append(child)
        return found

    def workers(self) -> list[int]:
        """Processes that simulate: children of the one that they are forked from."""
        return [pid for each in children(self.process.pid) for pid in children(each)]


def children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        tasks = Path(f"/proc/{pid}/task")
        texts = [(each / "children").read_text() for each in tasks.iterdir()]
        return [
            int(word) for text in texts for word in text.split() if is_alive(int(word))
        ]
    return []


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def rss_bytes(pid: int) -> int:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def eventually(what: Callable[[], Any]) -> Any:
    """Wait until something is so."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it never was so")


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """Serve a page, and end it however the test goes."""
    command = [sys.executable, "-m", "kvsim", "explore", "--no-browser", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), url
        yield Served(url, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
