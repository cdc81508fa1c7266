"""Files and folders of results: refused early, written or replaced as a whole.

One process writes to a path at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sim.errors import OutputError

try:
    import fcntl
except ImportError:  # not everywhere; there, the last rename still refuses a second
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_held: Final = ContextVar[frozenset[Path]]("_held", default=frozenset())
"""Paths that this thread has claimed; to claim one again inside is no second writer."""


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """Files of a command's folder; with anything else in it, it is not replaced."""

    of: str  # a noun with its article, such as "a run"
    marker: str  # the file by which such a directory is known
    names: frozenset[str]  # all files and folders that may be in it


RESULT_FILES = frozenset(
    {
        "config.yaml",
        "summary.json",
        "run.json",
        "requests.parquet",
        "steps.parquet",
        "preemptions.parquet",
        "itl.parquet",
        "kv_cache_groups.parquet",
        "prefix_tree.parquet",
        "tier.parquet",
        "fleet.parquet",
        "transfers.parquet",
        "schedule.jsonl.zst",
        "blocks.json",
        "advice.json",
        "arrivals.jsonl",
        "figures",
        "exports",
    }
)
"""Files and folders in the results of a run."""

RUN_FILES = ResultFiles("a run", "summary.json", RESULT_FILES)


def check_output(
    directory: Path, *, overwrite: bool, files: ResultFiles = RUN_FILES
) -> Path:
    """Refuse a results directory that must not or cannot be written.

    Called before anything is simulated, so that no work is lost.
    """
    try:
        target = directory.resolve()
        if target.exists():
            _check_existing(directory, target, files, overwrite=overwrite)
        _probe(target)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise OutputError(
            f"'{directory}' cannot be written: {_why(error)}; choose another --out"
        ) from error
    return target


def _check_existing(
    directory: Path, target: Path, files: ResultFiles, *, overwrite: bool
) -> None:
    if not target.is_dir():
        raise OutputError(f"'{directory}' is not a directory; choose another --out")
    if not overwrite:
        raise OutputError(
            f"'{directory}' exists already; choose another --out or add --overwrite"
        )
    if Path.cwd().is_relative_to(target):
        raise OutputError(
            f"'{directory}' is or holds the working directory and will not be "
            f"replaced; choose another --out"
        )
    names = {path.name for path in target.iterdir()}
    if names and files.marker not in names:
        raise OutputError(
            f"'{directory}' does not hold results of {files.of} and will not be "
            f"overwritten; choose another --out"
        )
    if foreign := sorted(names - files.names):
        raise OutputError(
            f"'{directory}' also holds '{foreign[0]}', which --overwrite would delete; "
            f"move it, or choose another --out"
        )


def _probe(target: Path) -> None:
    """Write beside `target`, or in the nearest folder there is, and clean up."""
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    _sibling(parent).rmdir()


def _why(error: Exception) -> str:
    """Return the reason without the temporary name that it befell."""
    return getattr(error, "strerror", None) or str(error)


def _sibling(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=".kvsim-", suffix=".partial", dir=parent))


@contextmanager
def output_directory(
    directory: Path, *, overwrite: bool, files: ResultFiles = RUN_FILES
) -> Iterator[Path]:
    """Yield a directory to write to that takes the place of `directory` at the end.

    Nothing half-written stays behind: if the body raises, its files are removed and
    an older `directory` is as it was. Other processes are kept out meanwhile.
    """
    with claimed_directory(directory, overwrite=overwrite, files=files) as target:
        try:
            partial = _sibling(target.parent)
        except OSError as error:
            raise OutputError(
                f"'{directory}' cannot be written: {_why(error)}; choose another --out"
            ) from error
        try:
            yield partial
            partial.chmod(0o755)
            _replace(partial, target, overwrite=overwrite)
        except OSError as error:
            raise OutputError(
                f"'{directory}' could not be written: {_why(error)}; make room or "
                f"choose another --out"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def claimed_directory(
    directory: Path, *, overwrite: bool, files: ResultFiles = RUN_FILES
) -> Iterator[Path]:
    """Keep other processes out of a results directory that may be written.

    The folders above it are made, and taken away again where nothing came of it.
    """
    target = check_output(directory, overwrite=overwrite, files=files)
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"'{directory}' cannot be written: {_why(error)}; choose another --out"
        ) from error
    try:
        with claimed(directory):
            # Another may have ended since it was looked at.
            check_output(directory, overwrite=overwrite, files=files)
            yield target
    finally:
        if not target.exists():
            with suppress(OSError):
                for parent in missing:
                    parent.rmdir()


@contextmanager
def output_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a path to write to that takes the place of `path` at the end."""
    if path.is_dir():
        raise OutputError(f"'{path}' is a directory; choose another --out")
    if path.exists() and not overwrite:
        raise OutputError(
            f"'{path}' exists already; choose another --out or add --overwrite"
        )
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _sibling(path.parent)
        with claimed(path):
            yield partial / path.name
            (partial / path.name).replace(path)
    except OSError as error:
        raise OutputError(
            f"'{path}' cannot be written: {_why(error)}; make room or choose another "
            f"--out"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _replace(partial: Path, target: Path, *, overwrite: bool) -> None:
    """Put `partial` where `target` is, if it is; the old one goes last."""
    if not overwrite or not target.exists():
        partial.rename(target)  # refused where something has come there meanwhile
        return
    old = _sibling(target.parent)
    target.rename(old / target.name)
    try:
        partial.rename(target)
    except BaseException:
        (old / target.name).rename(target)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, to_json(data))


def to_json(data: Mapping[str, Any]) -> str:
    """Return `data` as JSON with a final newline; NaN is a fault of ours."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside `path` and put it there, so that it is whole or as it was."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# -- one writer at a time ------------------------------------------------------------


@contextmanager
def claimed(path: Path | None) -> Iterator[None]:
    """Be the only process that writes to `path`, or refuse with an OutputError.

    A lock lies beside `path` for so long, of a name of its own, as `path` need not
    exist and may be replaced. A killed process loses its lock, whatever it leaves.
    Without a path, a folder to lie in, or locks on that file system, nothing is held.
    """
    target = path and _target(path)
    if not target or fcntl is None or target in _held.get():
        yield
        return
    lock = target.parent / f".kvsim-{sha256(os.fsencode(target.name)).hexdigest()[:16]}"
    try:
        handle = _locked(lock)
    except BlockingIOError:
        raise OutputError(
            f"another kvsim is writing to '{path}'; wait until it has ended, or choose "
            f"another --out"
        ) from None
    except OSError:  # read-only, or a file system without locks
        yield
        return
    token = _held.set(_held.get() | {target})
    try:
        yield
    finally:
        _held.reset(token)
        lock.unlink(missing_ok=True)  # before it is let go, so that it is ours
        fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes forked meanwhile
        os.close(handle)


def _target(path: Path) -> Path | None:
    """Return the path to be claimed; None for a device, or where no folder is."""
    try:
        target = path.resolve()
        is_special = target.exists() and not (target.is_file() or target.is_dir())
        return None if is_special or not target.parent.is_dir() else target
    except (OSError, RuntimeError, ValueError):  # the writer will refuse it
        return None


def _locked(lock: Path) -> int:
    """Return the open file of a lock that is held, and that lies where it is sought."""
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder ended in between, and took it away
