"""Import paths that have moved: found for one more release, with a warning."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    from collections.abc import Callable


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for module `old` that takes its names from `new`."""

    def from_new(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{old}' has no attribute '{name}'")
        found = getattr(import_module(new), name)
        warn(f"{old}.{name} is now {new}.{name}", DeprecationWarning, stacklevel=2)
        return found

    return from_new


def register_moved(old: str, new: str) -> None:
    """Let module `old` of a package that is being imported be found without a file."""
    module = sys.modules[old] = ModuleType(old, f"Deprecated: import from `{new}`.")
    module.__dict__["__getattr__"] = moved(old, new)
