"""The page on disk: refused early, written as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from sim.errors import OutputError


def check_page(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that must not or cannot be written, before anything is read."""
    if path.is_dir():
        raise OutputError(f"'{path}' is a directory; give --out a file, such as x.html")
    if path.exists() and not overwrite:
        raise OutputError(
            f"'{path}' exists already; choose another --out or add --overwrite"
        )
    if not path.parent.is_dir():
        raise OutputError(
            f"there is no directory '{path.parent}'; make it, or choose another --out"
        )


def write_page(text: str, path: Path, *, overwrite: bool) -> None:
    """Write a page; an older one stays until the new one is complete."""
    check_page(path, overwrite=overwrite)
    partial: Path | None = None
    try:
        handle, name = tempfile.mkstemp(
            prefix=".kvsim-", suffix=".partial", dir=path.parent
        )
        partial = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path.resolve())
    except OSError as error:
        raise OutputError(
            f"'{path}' cannot be written: {error.strerror or error}; choose another "
            f"--out"
        ) from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
