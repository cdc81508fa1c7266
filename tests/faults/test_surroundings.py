"""Commands on full, read-only and foreign disks, with nothing around, and in pairs."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.faults.commands import (
    COMMANDS,
    RESUMED,
    prepared,
    remove,
    start,
    whole,
    written_files,
)
from tests.shared import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_IN_A_NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-euc")
_FULL = """
mount -t tmpfs -o size=16k none disk
kept=$1; shift
head -c $1 /dev/zero > disk/.full || true; shift
code=0; "$@" 2> said || code=$?
echo $code > code; ls -A disk > left
mount -o remount,size=64m disk
rm disk/.full
if [ -e "disk/$kept" ]; then set -- "$@" --resume; fi
"$@" 2> again
cp -a disk/. copy
"""
"""Runs a command on a full disk, and again when there is room; both are kept."""
_READ_ONLY = """
mount --bind disk disk
mount -o remount,ro,bind disk
exec "$@"
"""
_CLOSED = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
_CLOCK = """
import itertools, time
_calls = itertools.count()
time.time = lambda: 1.8e9 - 3600.0 * next(_calls)
time.time_ns = lambda: int(time.time() * 1e9)
"""
"""An hour goes back whenever it is asked for."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("surroundings")


@pytest.fixture(scope="module")
def _has_namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("unshare"):
        there = tmp_path_factory.mktemp("there")
        mount = ["mount", "-t", "tmpfs", "none", str(there)]
        command = [*_IN_A_NAMESPACE, '"$@"', "sh", *mount]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
    pytest.skip("this system lets no user mount a file system of his own")


def _on_a_disk(name: str, place: Path) -> list[str]:
    """Return a command that writes into a folder called disk."""
    words = prepared(name, place)
    (place / "disk").mkdir()
    return [*words[:-1], f"disk/{words[-1]}"]


def _is_one_line(said: str) -> bool:
    return said.startswith("kvsim: ") and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_has_namespaces")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk(name: str, root: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    words = _on_a_disk(name, place)
    (place / "copy").mkdir()
    kept = words[-1].removeprefix("disk/") + RESUMED[name] if name in RESUMED else "-"
    in_use_bytes = "64000" if name == "convert" else "8000"  # its file is a small one
    before = (*_IN_A_NAMESPACE, _FULL, "sh", kept, in_use_bytes)
    process = start(words, place, before=before)
    _, err = process.communicate()
    assert process.returncode == 0, (err, (place / "again").read_text())
    said = (place / "said").read_text()
    assert (place / "code").read_text() == "2\n", said
    assert _is_one_line(said), said
    assert "make room" in said
    left = {*(place / "left").read_text().split()} - {".full"}
    assert left <= ({kept, kept.partition(".")[0]} if name in RESUMED else set()), left
    out = place / "copy" / words[-1].removeprefix("disk/")
    assert written_files(out) == whole(name, root).output


@pytest.mark.slow
@pytest.mark.usefixtures("_has_namespaces")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_only_disk(name: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    words = _on_a_disk(name, place)
    process = start(words, place, before=(*_IN_A_NAMESPACE, _READ_ONLY, "sh"))
    _, err = process.communicate()
    assert process.returncode == 2
    assert _is_one_line(err), err
    assert not list((place / "disk").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_of_another_user(name: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    words = _on_a_disk(name, place)
    before: tuple[str, ...] = ()
    if os.geteuid() == 0:  # who may write everywhere, unless that is taken away
        if not shutil.which("setpriv"):
            pytest.skip("setpriv is not installed")
        os.chown(place / "disk", 65534, 65534)
        rights = "-dac_override,-dac_read_search"
        before = ("setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}")
    else:
        (place / "disk").chmod(0o555)
    process = start(words, place, before=before)
    _, err = process.communicate()
    assert process.returncode == 2
    assert _is_one_line(err), err
    assert not list((place / "disk").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_around(name: str, root: Path) -> None:
    """No HOME, LANG, PATH or terminal, and a TMPDIR that does not exist."""
    complete = whole(name, root)
    words = [word for word in COMMANDS[name].split() if word != "--quiet"]
    nothing = {"PYTHONPATH": str(ROOT), "TMPDIR": "/nowhere", "HOME": "/nowhere"}
    for env in (nothing, {"PYTHONPATH": str(ROOT)}):
        before = ("/usr/bin/env", *_CLOSED) if env is nothing else ()
        process = start(words, complete.place, env=env, before=before)
        _, err = process.communicate()
        assert process.returncode == 0, err
        out = complete.place / words[-1]
        assert written_files(out) == complete.output
        remove(out)


@pytest.mark.slow
def test_figures_with_nothing_around(tmp_path: Path) -> None:
    place = tmp_path / "place"
    prepared("run", place)
    words = ["run", "run.yaml", "--quiet", "--out", "out"]
    env = {"PYTHONPATH": str(ROOT), "HOME": "/nowhere"}
    process = start(words, place, env=env)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert err == ""
    assert len(list((place / "out/figures").glob("*.png"))) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_clock_that_goes_back(name: str, root: Path) -> None:
    complete = whole(name, root)
    words = COMMANDS[name].split()
    clock = complete.place.parent / "clock"
    clock.mkdir(exist_ok=True)
    (clock / "sitecustomize.py").write_text(_CLOCK)
    env = os.environ | {"PYTHONPATH": f"{clock}{os.pathsep}{ROOT}"}
    for path in complete.place.rglob("*"):
        os.utime(path, (4e9, 4e9))
    process = start(words, complete.place, env=env)
    _, err = process.communicate()
    assert process.returncode == 0, err
    out = complete.place / words[-1]
    assert written_files(out) == complete.output
    remove(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_two_at_once(name: str, root: Path) -> None:
    complete = whole(name, root)
    words = COMMANDS[name].split()
    before = {path.name for path in complete.place.iterdir()}
    both = [start(words, complete.place) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    first, second = sorted(range(2), key=lambda index: both[index].returncode)
    assert [both[first].returncode, both[second].returncode] == [0, 2], said
    assert _is_one_line(said[second]), said
    out = complete.place / words[-1]
    assert written_files(out) == complete.output
    remove(out)
    assert {path.name for path in complete.place.iterdir()} == before
