"""Runs of the page are processes: one at a time, none left, whatever happens."""

from __future__ import annotations

import os
import signal
import sys
import threading
import urllib.error
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("starlette", reason="the extra 'explore' is not installed")

from sim.cli.main import run as kvsim
from tests.shared import ROOT
from tests.sim.views.explore.served import (
    Served,
    eventually,
    is_alive,
    rss_bytes,
    served,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

DEMO = str(ROOT / "examples/demo.yaml")
LONG = ("--set", "workload.preset.duration_s=360000")
"""A hundred hours: nobody waits for such a run."""


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    with served(DEMO, "--set", "workload.preset.duration_s=600") as found:
        found.run()
        yield found


def test_the_number_of_preemptions_is_that_of_kvsim_run(
    page: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"engine.num_gpu_blocks_override": 9000}
    (*_, last) = page.post("run", {"settings": settings})
    path = tmp_path / "explored.yaml"
    path.write_text(last["result"]["yaml"])
    assert kvsim(["run", str(path), "--out", str(tmp_path / "one"), "--quiet"]) == 0
    told = ["--set", "workload.preset.duration_s=600"]
    told += ["--set", "engine.num_gpu_blocks_override=9000"]
    given = ["run", DEMO, *told, "--out", str(tmp_path / "other"), "--quiet"]
    assert kvsim(given) == 0
    ours = (tmp_path / "one" / "summary.json").read_bytes()
    assert ours == (tmp_path / "other" / "summary.json").read_bytes()
    preemptions = last["result"]["summary"]["num_preemptions"]
    assert preemptions > 0
    assert f'"num_preemptions": {preemptions},'.encode() in ours


def test_fifty_quick_moves_leave_one_run_and_no_orphan(page: Served) -> None:
    page.run()
    before = page.processes()
    words: list[str] = []

    def ask(number: int) -> None:
        settings = {"workload.preset.duration_s": 36_000.0 + number}
        last = page.post("run", {"settings": settings})[-1]
        words.append(next(iter(last)))

    movers = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
    for each in movers:
        each.start()
    eventually(lambda: len(words) == 49)
    assert set(words) == {"cancelled"}
    assert len(page.workers()) == 1
    assert len(page.processes()) <= len(before)
    page.run()  # ends the fiftieth
    for each in movers:
        each.join()
    assert words[-1] == "cancelled"
    assert len(page.workers()) == 1


def test_a_page_that_goes_away_leaves_no_run(page: Served) -> None:
    (busy,) = page.workers()
    settings = {"workload.preset.duration_s": 360_000.0}
    with page.open("run", {"settings": settings}) as reply:
        assert b"progress" in reply.readline()
    eventually(lambda: not is_alive(busy))
    assert page.run(seed=1)["result"]


def test_a_killed_worker_is_a_line_and_the_page_lives(page: Served) -> None:
    page.run(seed=2)
    (worker,) = page.workers()
    settings = {"workload.preset.duration_s": 360_000.0}
    with page.open("run", {"settings": settings}) as reply:
        reply.readline()
        os.kill(worker, signal.SIGKILL)
        *_, last = reply.readlines()
    assert b"died, or was killed" in last
    assert page.run(seed=3)["result"]


def test_ctrl_c_ends_all() -> None:
    with served(DEMO, *LONG) as page:
        asking = threading.Thread(target=_ask_in_vain, args=(page,))
        asking.start()
        eventually(page.workers)
        below = page.processes()
        assert below
        os.killpg(page.process.pid, signal.SIGINT)  # as a terminal does
        assert page.process.wait(30) == 0
        eventually(lambda: not any(map(is_alive, below)))
        asking.join()
        assert page.process.stderr is not None
        assert page.process.stderr.read() == ""


def _ask_in_vain(page: Served) -> None:
    try:
        page.run()
    except (OSError, ValueError, IndexError):
        return  # it ended


def test_a_server_that_is_killed_leaves_no_process() -> None:
    with served(DEMO, *LONG) as page:
        asking = threading.Thread(target=_ask_in_vain, args=(page,))
        asking.start()
        eventually(page.workers)
        below = page.processes()
        page.process.kill()
        eventually(lambda: not any(map(is_alive, below)))
        asking.join()


def test_strangers_are_refused_over_the_wire(page: Served) -> None:
    for headers, status in (
        ({"Host": "evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ):
        with pytest.raises(urllib.error.HTTPError) as found:
            page.post("run", {"settings": {}}, **headers)
        assert found.value.code == status
        found.value.close()
    wrong = Served(page.url[:-2] + "x/", page.process)
    with pytest.raises(urllib.error.HTTPError) as found:
        wrong.post("run", {"settings": {}})
    assert found.value.code == 403
    found.value.close()
    with pytest.raises(urllib.error.HTTPError) as found:
        page.post("run", {"settings": {"engine.gpu": "x" * 70_000}})
    assert found.value.code == 413
    found.value.close()


def test_memory_does_not_grow_with_use(page: Served) -> None:
    """A hundred runs, each of which is another: about what ten minutes' use asks."""
    for seed in range(10, 40):
        page.run(seed=seed)
    before = rss_bytes(page.process.pid) + sum(map(rss_bytes, page.workers()))
    for seed in range(40, 140):
        page.run(seed=seed)
    after = rss_bytes(page.process.pid) + sum(map(rss_bytes, page.workers()))
    assert after - before < 200 * 2**20
