"""One setting of the page: its values, and the facts to know of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sim.errors import ConfigError

What = Literal["number", "whole", "switch", "choice"]


@dataclass(frozen=True, slots=True)
class Slider:
    """The part of a range in which answers differ; beyond it a number is typed."""

    low: float
    high: float
    step: float = 0.0
    """0 for one that is logarithmic."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value, the facts to know of it, and these in a few words for a list."""

    value: str
    facts: str = ""
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """A setting that the page offers.

    Parameters
    ----------
    key
        Dotted key of the configuration.
    label
        Its name, as in the configuration.
    group
        Under which heading it stands.
    what
        Which values it takes.
    value
        That of the configuration as it was given.
    meaning, unit
        As of the page on the configuration.
    is_optional
        Whether it may be left out, for the release's default.
    low, high
        Bounds of the schema, inclusive; None for none.
    is_open
        Whether `low` itself is outside.
    slider
        Where a slider helps.
    choices
        Of a choice.
    rank
        From 0 among the controls that matter first; None for all others.
    lacking
        Schedulers that have no such key.
    """

    key: str
    label: str
    group: str
    what: What
    value: Any
    meaning: str = ""
    unit: str = ""
    is_optional: bool = False
    low: float | None = None
    high: float | None = None
    is_open: bool = False
    slider: Slider | None = None
    choices: tuple[Choice, ...] = ()
    rank: int | None = None
    lacking: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    def checked(self, value: Any) -> Any:
        """Return a value as the configuration takes it.

        Raises
        ------
        ConfigError
            If it is of another type, out of range, or none of the choices.
        """
        if value is None:
            if not self.is_optional:
                raise ConfigError(f"{self.key}: a value is needed, got null")
            return None
        if self.what == "choice":
            return self._chosen(value)
        if self.what == "switch":
            if not isinstance(value, bool):
                raise ConfigError(
                    f"{self.key}: takes true or false, got {_shown(value)}"
                )
            return value
        return self._number(value)

    def _chosen(self, value: Any) -> str:
        if not isinstance(value, str) or all(value != c.value for c in self.choices):
            raise ConfigError(
                f"{self.key}: takes one of the {len(self.choices)} names that the page "
                f"lists, got {_shown(value)}"
            )
        return value

    def _number(self, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"{self.key}: takes a number, got {_shown(value)}")
        if self.what == "whole":
            if value != int(value):
                raise ConfigError(f"{self.key}: takes a whole number, got {value}")
            value = int(value)
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not low <= value <= high or (self.is_open and value == low):
            raise ConfigError(
                f"{self.key}: takes {self._range_in_words()}, got {value}"
            )
        # Where a kind has the rules, it may want a whole number.
        is_whole = isinstance(self.value, int) and value == int(value)
        return int(value) if is_whole else value

    def _range_in_words(self) -> str:
        words = []
        if self.low is not None:
            words.append(f"{'more than' if self.is_open else 'at least'} {self.low:g}")
        if self.high is not None:
            words.append(f"at most {self.high:g}")
        return " and ".join(words)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
