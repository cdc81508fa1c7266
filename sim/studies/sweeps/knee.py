"""Where the knee of a sweep over load is: the load with the most power.

Power is throughput over latency (Kleinrock, 1979): up to its maximum, throughput grows
by a larger share than latency; beyond, latency does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

THROUGHPUT, LATENCY = "request_throughput", "mean_e2el_ms"
"""Columns of the runs that power is made of."""

_LOADS = ("rate_scale", "rate", "max_concurrent_users")
_FEWEST = 3


def load_key(keys: Sequence[str]) -> str | None:
    """Return the key of a sweep that is its load, if there is one."""
    return next((key for key in keys if key.rpartition(".")[2] in _LOADS), None)


def knees(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on each curve over load: where its knee is, or that it has none.

    `rows` are the runs that are done, `keys` what was varied. Repeats are averaged.
    """
    load = load_key(keys)
    if load is None:
        return
    others = [key for key in keys if key != load]
    curves: dict[tuple[Any, ...], dict[float, list[tuple[float, float]]]] = {}
    for row in rows:
        if row.get(THROUGHPUT) and row.get(LATENCY):
            curve = curves.setdefault(tuple(row[key] for key in others), {})
            point = (float(row[THROUGHPUT]), float(row[LATENCY]))
            curve.setdefault(float(row[load]), []).append(point)
    for setting, curve in curves.items():
        if len(curve) >= _FEWEST:
            told = ", ".join(f"{k} = {v}" for k, v in zip(others, setting, strict=True))
            yield f"{told}: {_knee(load, curve)}" if told else _knee(load, curve)


def _knee(load: str, curve: Mapping[float, Sequence[tuple[float, float]]]) -> str:
    means = {
        at: tuple(added(column) / len(points) for column in zip(*points, strict=True))
        for at, points in sorted(curve.items())
    }
    at = max(means, key=lambda load: means[load][0] / means[load][1])
    rate, latency_ms = means[at]
    name, loads = load.rpartition(".")[2], list(means)
    if at == loads[-1]:
        return (
            f"no knee up to {name} {at:g}: throughput still grows by more than latency"
        )
    if at == loads[0]:
        return f"{name} {at:g}, the least, is at the knee or beyond: try less load"
    return (
        f"the knee is at {name} {at:g}: {rate:.4g} requests/s in {latency_ms:,.0f} ms "
        f"on average; beyond, latency grows by more than throughput"
    )
