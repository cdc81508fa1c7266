"""``found.plot``: the figures of a plan or a validation by their names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sim.config.plug import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NamedFigures:
    """Figures, each a method named as its file in ``figures/``.

    Parameters
    ----------
    figures
        Name, and the function that draws what was found.
    found
        What it is given.

    Examples
    --------
    >>> figures = NamedFigures({"states": "a figure of {}".format}, "a run")
    >>> figures.states()
    'a figure of a run'
    >>> [name for name in dir(figures) if not name.startswith("_")]
    ['states']
    """

    _figures: Mapping[str, Callable[[Any], Figure]]
    _found: Any

    def __getattr__(self, name: str) -> Callable[[], Figure]:
        if name.startswith("_"):  # asked by copy and pickle before there are fields
            raise AttributeError(name)
        if name not in self._figures:
            hint = did_you_mean(name, self._figures)
            raise AttributeError(
                f"there is no figure '{name}'{hint} (there are: "
                f"{', '.join(self._figures)})"
            )
        return partial(self._figures[name], self._found)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._figures]
