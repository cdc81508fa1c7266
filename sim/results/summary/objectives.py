"""Objectives of a service, and by how much a run keeps them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING, Any

from sim.config.plug import did_you_mean
from sim.errors import ConfigError
from sim.results.schema import LATENCIES, OF_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping

_RATIOS = ("preemptions_per_request", "kv_cache_usage_mean", "kv_cache_usage_max")
_GOODPUT_LIMITS = tuple(f"{each.key}_ms" for each in OF_REQUESTS)
_LATENCY = re.compile(
    rf"(?P<statistic>mean|median|p\d{{1,2}}(\.\d+)?)_(?P<of>{'|'.join(LATENCIES)})_ms"
)
_USAGE = re.compile(r"(?P<statistic>p\d{1,2}(\.\d+)?)_kv_cache_usage")

_FAR_BELOW = -20.0
"""Margin of nothing at all, such as no preemption: no slope leads there."""

EXAMPLES = (
    "p95_ttft_ms",
    "p99_ttft_ms",
    "mean_ttft_ms",
    "p95_tpot_ms",
    "p99_itl_ms",
    "p90_e2el_ms",
    "goodput",
    *_RATIOS,
    "p95_kv_cache_usage",
)


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound on one number of a run."""

    name: str
    """As in the plan: ``p95_ttft_ms``, ``goodput``, ``preemptions_per_request``."""
    limit: float
    """The number it must not exceed; of goodput, must not fall below."""
    of: str
    """A latency of `LATENCIES`, ``kv_cache_usage``, ``preemptions`` or ``goodput``."""
    percent: float | None = None
    """Percentile; None for a mean, ``inf`` for the maximum."""
    limits_ms: tuple[tuple[str, float], ...] = ()
    """Of goodput: limits that a good request keeps, by latency."""

    @property
    def is_floor(self) -> bool:
        return self.of == "goodput"

    @property
    def unit(self) -> str:
        """Unit of the limit, for axes and messages; empty for shares."""
        return "ms" if self.of in LATENCIES else ""

    def margin(self, value: float | None) -> float:
        """Return how far a value is from the limit: 0 on it, above 0 if it misses.

        The logarithm of their ratio; ``inf`` where nothing was measured.
        """
        if value is None:
            return inf
        if self.is_floor:
            return log(self.limit / value) if value > 0 else inf
        return log(value / self.limit) if value > 0 else _FAR_BELOW

    def label(self) -> str:
        """Return the rule, for axes: ``p95_ttft_ms <= 2,000``."""
        return f"{self.name} {'>=' if self.is_floor else '<='} {self.limit:,g}"


def parse_objectives(table: Mapping[str, Any]) -> tuple[Objective, ...]:
    """Return the objectives of a plan or a run, in their order."""
    if not table:
        raise ConfigError("objectives: give at least one, such as p95_ttft_ms: 2000")
    objectives = tuple(_parse(name, value) for name, value in table.items())
    _check_order(objectives)
    return objectives


def _parse(name: str, value: Any) -> Objective:
    if name == "goodput":
        return _goodput(value)
    limit = _number(f"objectives.{name}", value)
    if found := _LATENCY.fullmatch(name):
        return Objective(name, limit, found["of"], _percent(found["statistic"]))
    if found := _USAGE.fullmatch(name):
        percent = _percent(found["statistic"])
        return Objective(name, _share(name, limit), "kv_cache_usage", percent)
    if name == "preemptions_per_request":
        return Objective(name, limit, "preemptions")
    if name in _RATIOS:
        percent = inf if name.endswith("_max") else None
        return Objective(name, _share(name, limit), "kv_cache_usage", percent)
    raise ConfigError(
        f"objectives.{name}: unknown objective{_meant(name)} (there "
        f"are mean, median and pNN of ttft_ms, tpot_ms, itl_ms and e2el_ms, goodput, "
        f"{', '.join(_RATIOS)} and pNN_kv_cache_usage)"
    )


def _meant(name: str) -> str:
    """Return the objective that has the same words in another order, or a near one."""
    words = name.lower().split("_")
    statistic = next((w for w in words if re.fullmatch(r"p\d+|mean|median", w)), None)
    of = next((word for word in words if word in LATENCIES), None)
    if re.fullmatch(r"p\d{3,}", statistic or ""):
        return "; percentiles are below 100"
    if statistic and of:
        return f"; did you mean '{statistic}_{of}_ms'?"
    return did_you_mean(name, EXAMPLES)


def _percent(statistic: str) -> float | None:
    if statistic == "mean":
        return None
    return 50.0 if statistic == "median" else float(statistic.removeprefix("p"))


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{where}: give a number above 0, got {value!r}")
    return float(value)


def _share(name: str, limit: float) -> float:
    if limit > 1:
        raise ConfigError(
            f"objectives.{name}: a share of the cache is at most 1, got {limit:g}; "
            f"write 0.9 for 90 %"
        )
    return limit


def _goodput(value: Any) -> Objective:
    """Read ``goodput: {share: 0.95, ttft_ms: 2000, tpot_ms: 60}``."""
    where = "objectives.goodput"
    example = "give {share: 0.95, ttft_ms: 2000, tpot_ms: 60}"
    if not isinstance(value, dict) or "share" not in value:
        raise ConfigError(f"{where}: a table with a share; got {value!r}; {example}")
    share = _number(f"{where}.share", value["share"])
    if share > 1:
        raise ConfigError(f"{where}.share: at most 1, got {share:g}; {example}")
    limits = []
    for key, limit in value.items():
        if key == "share":
            continue
        if key not in _GOODPUT_LIMITS:
            raise ConfigError(
                f"{where}.{key}: unknown key{did_you_mean(key, _GOODPUT_LIMITS)} "
                f"(there are share, {', '.join(_GOODPUT_LIMITS)})"
            )
        limits.append((key.removesuffix("_ms"), _number(f"{where}.{key}", limit)))
    if not limits:
        raise ConfigError(f"{where}: says no latency; {example}")
    return Objective("goodput", share, "goodput", None, tuple(limits))


def _check_order(objectives: tuple[Objective, ...]) -> None:
    """Refuse a percentile with a looser limit than one above it, which implies it."""
    ranked = [each for each in objectives if each.percent is not None]
    for low in ranked:
        for high in ranked:
            if low.of != high.of or not low.percent < high.percent:  # type: ignore[operator]
                continue
            if low.limit >= high.limit:
                raise ConfigError(
                    f"objectives.{low.name}: {low.limit:g} says nothing beside "
                    f"{high.name} of {high.limit:g}, which implies it; lower it or "
                    f"remove it"
                )
