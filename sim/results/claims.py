"""One writer at a time: a process that writes to a path keeps all others out."""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from sim.errors import OutputError

try:
    import fcntl
except ImportError:  # not everywhere; there, the last rename still refuses a second
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_held: Final = ContextVar[frozenset["Path"]]("_held", default=frozenset())
"""What this thread has claimed: to claim it again inside is no second writer."""


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
    except (OSError, RuntimeError, ValueError):  # to be refused by what writes
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
