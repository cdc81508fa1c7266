"""What GPUs cost: a table that the user edits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.config.plug import did_you_mean
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_KEYS = ("currency", "date", "note", "per_gpu_hour")
SECONDS_PER_HOUR = 3600.0
TOKENS_PER_MILLION = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a GPU for an hour.

    Parameters
    ----------
    per_gpu_hour
        By GPU, as ``engine.gpu`` names it.
    currency
        Of all of them; shown as it is.
    date, note
        When they were true, and what else there is to say.
    """

    per_gpu_hour: Mapping[str, float]
    currency: str = "USD"
    date: str = ""
    note: str = ""

    def per_hour(self, gpu: str, num_gpus: int) -> float:
        """Return what so many GPUs cost in an hour."""
        return self.per_gpu_hour[gpu] * num_gpus

    def check(self, gpus: Iterable[str]) -> None:
        """Refuse a plan that has GPUs without a price.

        Raises
        ------
        ConfigError
            With the first that is missing.
        """
        for gpu in gpus:
            if gpu not in self.per_gpu_hour:
                raise ConfigError(
                    f"prices.per_gpu_hour.{gpu}: there is no price for this GPU"
                    f"{did_you_mean(gpu, self.per_gpu_hour)}; add one, in "
                    f"{self.currency} an hour"
                )


def parse_prices(table: Any) -> Prices:
    """Return the prices of a plan or of a file of their own.

    Raises
    ------
    ConfigError
        If it is no such table, or a price is no number above 0.
    """
    if not isinstance(table, dict) or not isinstance(table.get("per_gpu_hour"), dict):
        raise ConfigError(
            "prices: give a table such as {per_gpu_hour: {h100_sxm: 3.0}}, or the path "
            "of a file that holds one (examples/prices.yaml)"
        )
    for key in table:
        if key not in _KEYS:
            raise ConfigError(
                f"prices.{key}: unknown key{did_you_mean(key, _KEYS)} (there are: "
                f"{', '.join(_KEYS)})"
            )
    for gpu, price in table["per_gpu_hour"].items():
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not is_number or not 0 < price < float("inf"):
            raise ConfigError(
                f"prices.per_gpu_hour.{gpu}: give a number above 0, got {price!r}"
            )
    texts = {key: str(table[key]) for key in _KEYS[:3] if key in table}
    rates = {str(gpu): float(p) for gpu, p in table["per_gpu_hour"].items()}
    return Prices(per_gpu_hour=rates, **texts)


def per_million(cost_per_hour: float, tokens_per_s: float) -> float | None:
    """Return the cost of a million tokens; None where there are none."""
    if not tokens_per_s > 0:
        return None
    return cost_per_hour / (tokens_per_s * SECONDS_PER_HOUR) * TOKENS_PER_MILLION
