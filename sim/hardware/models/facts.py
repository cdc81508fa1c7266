"""The values of a ``config.json``, checked as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

_MOST = 2**31 - 1
_MOST_FACTOR = 2**20


@dataclass(frozen=True, slots=True)
class Facts:
    """A mapping of a ``config.json`` whose values are checked as they are read."""

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def wrong(self, key: str, rule: str) -> ConfigError:
        shown = repr(self.values.get(key))
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return ConfigError(
            f"{self.prefix}{key} must be {rule} in {self.source}; got {shown}"
        )

    def optional(self, key: str, most: int = _MOST, least: int = 0) -> int | None:
        """Return an integer of `least` to `most`; None for null or no key."""
        value = self.values.get(key)
        if value is None:
            return None
        kind = "a positive integer" if least == 1 else f"an integer of {least} or more"
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, kind)
        if value > most:
            raise self.wrong(key, f"{kind}, at most {most}")
        return value

    def natural(self, key: str, most: int = _MOST) -> int:
        """Return an integer of 0 or more; 0 for null or no key."""
        return self.optional(key, most) or 0

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer: `default` for null or no key, if there is one."""
        if default is not None and self.values.get(key) is None:
            return default
        if key not in self.values:
            raise ConfigError(
                f"{self.prefix}{key} is missing in {self.source}; add it, as in the"
                " model's own config.json"
            )
        value = self.optional(key, least=1)
        if value is None:
            raise self.wrong(key, "a positive integer")
        return value

    def factor(self, key: str) -> float:
        """Return a finite number of 1 or more; 1 for null or no key."""
        value = self.values.get(key)
        if value is None:
            return 1.0
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 1 <= value <= _MOST_FACTOR:
            raise self.wrong(key, f"a number of 1 to {_MOST_FACTOR}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean; `default` for null or no key."""
        return self._typed(key, "true or false", default)

    def text(self, key: str) -> str:
        """Return a string; an empty one for null or no key."""
        return self._typed(key, "a string", "")

    def items(self, key: str) -> list[Any]:
        """Return a list; an empty one for null or no key."""
        return self._typed(key, "a list", [])

    def _typed(self, key: str, rule: str, default: T) -> T:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, type(default)):
            raise self.wrong(key, rule)
        return value

    def mapping(self, key: str) -> Facts:
        """Return a nested mapping; an empty one for null or no key."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Facts(value or {}, self.source, f"{self.prefix}{key}.")
