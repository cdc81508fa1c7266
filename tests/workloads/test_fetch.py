from __future__ import annotations

import hashlib
import socket
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.workloads.shared_traces import AZURE_CODE, AZURE_CONV, MOONCAKE, shared_trace
from workloads import TRACE_READERS, WorkloadError
from workloads.fetch import PUBLIC_TRACES, PublicTrace, fetch, fetch_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Keep requests off the terminal."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def base_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("pooch", reason="the extra `traces` is not installed")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "trace.csv").write_bytes(CONTENT)
    with served(folder) as url:
        yield url


def described(url: str, sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> Any:
    return PublicTrace(
        url.rpartition("/")[2], url, sha256, "azure", "CC0-1.0", "nobody"
    )


def test_fetch_brings_the_file_once(base_url: str, tmp_path: Path) -> None:
    trace = described(base_url + "trace.csv")
    path = fetch_trace(trace, tmp_path / "new" / "cache")
    assert path.parent == tmp_path / "new" / "cache"
    assert path.read_bytes() == CONTENT
    # Nobody listens at the second URL: the copy that is here is enough.
    assert fetch_trace(described("http://127.0.0.1:9/trace.csv"), path.parent) == path
    assert [*path.parent.iterdir()] == [path]


def test_fetch_is_silent(
    base_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = pytest.importorskip("pooch").get_logger()
    logger.addHandler(caplog.handler)
    level = logger.level
    try:
        fetch_trace(described(base_url + "trace.csv"), tmp_path / "cache")
        with pytest.raises(WorkloadError):
            fetch_trace(described(base_url + "nowhere.csv"), tmp_path / "cache")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []
    assert logger.level == level  # as other users of pooch want it


def test_a_spoilt_copy_is_fetched_again(base_url: str, tmp_path: Path) -> None:
    trace = described(base_url + "trace.csv")
    path = fetch_trace(trace, tmp_path / "cache")
    path.write_bytes(b"spoilt")
    assert fetch_trace(trace, tmp_path / "cache").read_bytes() == CONTENT


def test_by_name(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"own": described(base_url + "trace.csv")}
    monkeypatch.setattr(sys.modules["workloads.fetch"], "PUBLIC_TRACES", table)
    assert fetch("own", tmp_path / "cache").read_bytes() == CONTENT
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / project)
    assert fetch("own").parent == tmp_path / "kvsim"


def test_wrong_content(base_url: str, tmp_path: Path) -> None:
    trace = described(base_url + "trace.csv", "0" * 64)
    with pytest.raises(WorkloadError, match=r"its checksum; it failed \(ValueError"):
        fetch_trace(trace, tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == []


def test_nothing_there(base_url: str, tmp_path: Path) -> None:
    trace = described(base_url + "nowhere.csv")
    with pytest.raises(WorkloadError, match=r"404.*download it by hand and") as info:
        fetch_trace(trace, tmp_path / "cache")
    assert "\n" not in str(info.value)
    assert [*(tmp_path / "cache").iterdir()] == []


def test_nobody_answers(base_url: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/trace.csv"
        with pytest.raises(WorkloadError, match=r"ConnectionError.*by hand") as info:
            fetch_trace(described(url), tmp_path / "cache")
    assert url in str(info.value)
    assert "\n" not in str(info.value)
    assert [*(tmp_path / "cache").iterdir()] == []


def test_a_directory_that_cannot_be(base_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkloadError, match="by hand and give its path"):
        fetch_trace(described(base_url + "trace.csv"), tmp_path / "file" / "cache")


def test_unknown_name() -> None:
    with pytest.raises(
        WorkloadError, match=r"got 'burstgpt'; try azure_llm_2023_code,"
    ):
        fetch("burstgpt")


def test_without_pooch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(WorkloadError, match=r"pip install 'kvsim\[traces\]'"):
        fetch("azure_llm_2023_conv")


def test_table() -> None:
    assert sorted(PUBLIC_TRACES) == [
        "azure_llm_2023_code",
        "azure_llm_2023_conv",
        "mooncake_conversation",
    ]
    for trace in PUBLIC_TRACES.values():
        assert trace.url.startswith("https://raw.githubusercontent.com/")
        assert trace.kind in TRACE_READERS
    assert len({trace.file_name for trace in PUBLIC_TRACES.values()}) == 3


@pytest.mark.parametrize(
    ("name", "file_name"),
    [
        ("azure_llm_2023_code", AZURE_CODE),
        ("azure_llm_2023_conv", AZURE_CONV),
        ("mooncake_conversation", MOONCAKE),
    ],
)
def test_checksums(name: str, file_name: str) -> None:
    content = shared_trace(file_name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == PUBLIC_TRACES[name].sha256
