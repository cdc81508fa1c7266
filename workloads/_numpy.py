"""numpy, imported when it is first used: 0.2 s that `kvsim --help` need not pay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            import numpy  # noqa: PLC0415

            value = getattr(numpy, name)
            setattr(self, name, value)  # found at once from then on
            return value

    np = _Numpy()
