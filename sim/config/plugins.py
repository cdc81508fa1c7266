"""Files that a configuration would run: which they are, and how they are refused.

A value ``path/to/file.py:ClassName`` runs that file with all that its user may do.
``--no-plugins`` refuses such files, as for the configuration of another user.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_PLUGINS: Final = "KVSIM_NO_PLUGINS"
"""Set to anything, also for the processes of a sweep: files are not run."""

USER_CLASS: Final = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")


def refuses_plugins() -> bool:
    """Return whether this process runs no files of users."""
    return bool(os.environ.get(NO_PLUGINS))


def refuse_as(parent: bool) -> None:
    """Refuse files if the process that started this one does.

    A server of forks may have been started under another rule than its child now.
    """
    if parent:
        os.environ[NO_PLUGINS] = "1"
    else:
        os.environ.pop(NO_PLUGINS, None)


@contextmanager
def without_plugins() -> Iterator[None]:
    """Refuse files in this process and in those that it starts."""
    before = os.environ.get(NO_PLUGINS)
    os.environ[NO_PLUGINS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_PLUGINS]
        else:
            os.environ[NO_PLUGINS] = before


def plugins_in(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of a key and its ``file.py:ClassName``, wherever one stands."""
    if isinstance(value, str) and USER_CLASS.fullmatch(value):
        yield where, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from plugins_in(each, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from plugins_in(each, f"{where}[{index}]")


def plugin_files(value: Any) -> list[str]:
    """Return the files of `plugins_in`, each once."""
    return sorted({each.rpartition(":")[0] for _, each in plugins_in(value)})


def refuse_plugins(value: Any, where: str = "") -> None:
    """Raise ConfigError for a file that would be run, where none may be."""
    if not refuses_plugins():
        return
    for place, each in plugins_in(value, where):
        raise ConfigError(
            f"{place}: '{each}' would run a file, and --no-plugins was given; read the "
            f"file, and leave --no-plugins out if you trust it"
        )
