"""Swaps, copies, launches and their interference, as tables of a whole profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.estimators.points import aggregated
from calibrate.measurement import median
from calibrate.points import Points, estimator_of
from calibrate.tables.fits import UNKNOWN, nodes, octaves, predicted, product, rounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from calibrate.tables.fits import Fits
    from sim.costs.measured.profile import OpTable, Profile

Table = dict[str, Any]
_DESCRIPTORS: Final = 2 ** np.arange(17)
_BLOCKS: Final = 2 ** np.arange(13)
_DIRECTIONS: Final = ("h2d", "d2h")
_MOST_PAGES: Final = 16


def transfer_tables(fits: Fits, profile: Profile) -> dict[str, Any]:
    """Return ``transfers``, ``copy``, ``launch`` and ``interference``, as measured."""
    found: dict[str, Any] = {}
    for name, memory in (("transfers", "pinned"), ("transfers_pageable", "pageable")):
        if tables := _swaps(fits, profile, memory):
            found[name] = tables
    more = {
        "copy": _copy(fits),
        "launch": _launch(profile),
        "interference": _interference(profile),
    }
    return found | {name: table for name, table in more.items() if table}


def _swaps(fits: Fits, profile: Profile, memory: str) -> dict[str, dict[str, Table]]:
    """Return variant to direction to table."""
    found: dict[str, dict[str, Table]] = {}
    for name, points in fits.points.items():
        parts = name.split(".")
        if parts[0] != "swap" or parts[2:] not in ([d, memory] for d in _DIRECTIONS):
            continue
        pages = nodes(points.columns["block_bytes"], most=_MOST_PAGES)
        counts = nodes(points.columns["num_descriptors"], _DESCRIPTORS)
        axes = product(block_bytes=pages, num_blocks=counts)
        axes["num_descriptors"] = axes["num_blocks"]
        shape = len(pages), len(counts)
        table = predicted(fits.estimators[name], axes, *shape)
        table["time_s"] = _rising(table["time_s"])
        host = _host_points(profile, points, parts)
        if host is not None:
            estimator = estimator_of(host, fits.device)
            estimator.fit(*aggregated(host.columns, host.time_s))
            # the host submits; no bytes bound it
            table["host_s"] = _rising(rounded(estimator.near(axes).reshape(shape)))
        found.setdefault(parts[1], {})[parts[2]] = {
            "page_bytes": pages,
            "num_descriptors": counts,
            **table,
            "interval": list(fits.intervals.get(name, UNKNOWN)),
        }
    return found


def _rising(rows: list[list[float]]) -> list[list[float]]:
    """Return seconds that fall neither along descriptors nor along page sizes."""
    grid = np.maximum.accumulate(np.array(rows), axis=0)
    found: list[list[float]] = np.maximum.accumulate(grid, axis=1).tolist()
    return found


def _host_points(profile: Profile, device: Points, parts: list[str]) -> Points | None:
    """Return the host's seconds of a swap's points, as points of a swap."""
    tables = [
        table
        for table in profile.tables("swap.host")
        if [table.variant, *_way(table)] == parts[1:]
    ]
    if not tables:
        return None
    columns = {
        key: np.concatenate([np.array(table.axes[key]) for table in tables])
        for key in device.columns
    }
    seconds = np.concatenate([table.quantiles["p50_s"] for table in tables])
    return Points(
        name="swap.host",
        operation="swap",
        columns=columns,
        time_s=seconds,
        codes={},
        variants=(parts[1],),
    )


def _way(table: OpTable) -> Iterator[str]:
    return (str(table.constants.get(key)) for key in ("direction", "memory"))


def _copy(fits: Fits) -> Table | None:
    names = [name for name in fits.points if name.split(".")[0] == "copy"]
    if not names:
        return None

    def typical_s(name: str) -> float:
        columns = fits.points[name].columns
        middle = {key: values[[len(values) // 2]] for key, values in columns.items()}
        return float(fits.estimators[name].predict(middle)[0])

    name = min(sorted(names), key=typical_s)
    points = fits.points[name]
    sizes = octaves(points.columns["block_bytes"])
    counts = nodes(points.columns["num_blocks"], _BLOCKS)
    axes = product(block_bytes=sizes, num_blocks=counts)
    # pieces a block: the same for all blocks of a size
    each = points.columns["num_descriptors"] // points.columns["num_blocks"]
    by_size = dict(
        zip(points.columns["block_bytes"].tolist(), each.tolist(), strict=True)
    )
    pieces = np.array([by_size[size] for size in axes["block_bytes"].tolist()])
    axes["num_descriptors"] = pieces * axes["num_blocks"]
    table = predicted(fits.estimators[name], axes, len(sizes), len(counts))
    table["time_s"] = _rising(table["time_s"])
    return {
        "variant": name.partition(".")[2],
        "block_bytes": sizes,
        "num_blocks": counts,
        **table,
        "interval": list(fits.intervals.get(name, UNKNOWN)),
    }


def _launch(profile: Profile) -> Table | None:
    """Return seconds a launch: of the host one by one, of the device in a graph."""
    found = {}
    for key, metric in (("eager_s", "launch.host"), ("graph_s", "launch")):
        rows = [
            (count, seconds)
            for table in profile.tables(metric)
            for count, seconds in zip(
                table.axes["num_launches"], table.quantiles["p50_s"], strict=True
            )
        ]
        if len({count for count, _ in rows}) > 1:
            counts, seconds = np.array(sorted(rows)).T
            slope = float(np.polyfit(counts, seconds, 1)[0])
            found[key] = float(f"{max(slope, 0.0):.6g}")
    return found or None


def _interference(profile: Profile) -> Table | None:
    """Return how much a step and a transfer slow each other, medians of the points."""
    points: list[Mapping[str, Any]] = list(profile.interference.get("points", ()))
    if not points:
        return None
    step, transfer = (
        max(1.0, median([float(point[key]) for point in points]))
        for key in ("step_slowdown", "transfer_slowdown")
    )
    return {
        "step_factor": step,
        "transfer_factor": transfer,
        "variant": str(points[0]["transfer"]["variant"]),
    }
