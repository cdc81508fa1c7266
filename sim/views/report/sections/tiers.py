"""The section on tiers behind the pool: what they hold, move and spare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sim.results.recording.transfers import LOADS
from sim.views.plots.run.tiers import by_source, is_apart, moved_bytes
from sim.views.report.charts import Axis, Chart, Line, Panel
from sim.views.report.html import (
    Markup,
    count,
    data,
    datum,
    decimal,
    milliseconds,
    paragraph,
    percent,
    table,
)
from sim.views.report.looks import Clock, colour, dash, name, symbol, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.results.tables.memory import ResultTable
    from sim.views.plots.binning import Floats
    from sim.views.report.charts import Dash
    from sim.views.report.source import Run

_NUM_BINS: Final = 200
_LEAST_IN_OCTAVE: Final = 5
"""Copies or prompts of about one length, of which a median is shown."""
_REQUESTS: Final = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_loaded_tokens",
    "first_scheduled_s",
    "first_token_s",
    "ttft_s",
)


class _Tiers(NamedTuple):
    """A run with something behind its pool."""

    run: Run
    copies: ResultTable
    held: ResultTable
    requests: Mapping[str, Any]


def has_tiers(runs: Sequence[Run]) -> bool:
    """Whether any of the runs has a tier behind its pool."""
    return any(run.folder.tier_table is not None for run in runs)


def show_tiers(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return contents, hits and copies of tiers over time, and the gain of loads."""
    shown: list[_Tiers] = []
    for run in runs:
        copies, held = run.folder.transfer_table, run.folder.tier_table
        if copies is None or held is None:
            yield paragraph(f"{run.label}: nothing behind the pool", class_="note")
        else:
            more = ("num_transferred_tokens",) if "ttft_split" in run.summary else ()
            requests = run.folder.columns("requests", (*_REQUESTS, *more))
            shown.append(_Tiers(run, copies, held, requests))
    clock = Clock.of(runs)
    usage = tuple(line for each in shown for line in _usage(runs, each, clock))
    moved = tuple(line for each in shown for line in _moved(runs, each, clock))
    found = tuple(_found(runs, each, clock) for each in shown)
    yield Chart(
        "tiers",
        "Chunks that each tier holds, as a share of its room; bytes that are copied to "
        "the GPU and to the host; and the share of prompt tokens that were loaded, by "
        "when prompts were first scheduled.",
        (
            Panel(Axis("used (%)", low=0.0), usage),
            Panel(Axis("GB/s", low=0.0), moved),
            Panel(Axis("loaded (%)", low=0.0), found),
        ),
        x=clock.axis(),
        height_px=620,
    )
    lines = tuple(line for each in shown for line in _lengths(runs, each))
    if lines:
        yield Chart(
            "load-or-compute",
            "How long it takes to load so many tokens, from the copy's begin until the "
            "scheduler hears of it, and to compute so many of a prompt, from its first "
            "step to its first token: medians by length, as busy as the run was. "
            "Where the lines cross, one overtakes the other.",
            (Panel(Axis("ms", "log"), lines),),
            x=Axis("tokens", "log"),
            height_px=380,
        )
    yield _by_source(shown)
    yield _numbers(shown)
    yield from _behind(shown)


def _usage(runs: Sequence[Run], tiers: _Tiers, clock: Clock) -> Iterator[Line]:
    """Yield the share of its room that each tier uses, thinned to bins of time."""
    run, held = tiers.run, tiers.held
    behind = run.summary.get("secondary_tiers", {})
    rooms = {"num_used_chunks": ("host", run.summary["num_tier_chunks"])} | {
        f"num_{each}_chunks": (each, own["num_chunks"]) for each, own in behind.items()
    }
    edges_s = np.linspace(0.0, run.steps.stop_s, _NUM_BINS + 1)
    at = np.searchsorted(held["time_s"], edges_s, side="right")
    for column, (tier, room) in rooms.items():
        values = np.append(0, held[column])[at] / room
        yield Line(
            name(runs, run, tier),
            colour(run) if tier == "host" else "ink",
            edges_s / clock.seconds,
            100.0 * values,
            dash(run) if tier == "host" else "dot",
            is_stepped=True,
        )


def _moved(runs: Sequence[Run], tiers: _Tiers, clock: Clock) -> Iterator[Line]:
    run, copies = tiers.run, tiers.copies
    edges_s = np.linspace(0.0, run.steps.stop_s, _NUM_BINS + 1)
    kinds = np.asarray(copies["kind"])
    ways: tuple[tuple[str, tuple[str, ...], Dash], ...] = (
        ("to the GPU", LOADS, dash(run)),
        ("to the host", ("store",), "dot"),
    )
    for what, of, looks in ways:
        own = np.isin(kinds, of)
        rate = moved_bytes(
            copies["begin_s"][own],
            copies["end_s"][own],
            copies["num_bytes"][own],
            edges_s,
        ) / np.diff(edges_s)
        yield Line(
            name(runs, run, what),
            colour(run) if of == LOADS else "ink",
            edges_s[:-1] / clock.seconds,
            rate / 1e9,
            looks,
        )


def _found(runs: Sequence[Run], tiers: _Tiers, clock: Clock) -> Line:
    """Return the share of prompt tokens that were loaded over time."""
    run = tiers.run
    parts = by_source(tiers.requests)
    at_s = tiers.requests["first_scheduled_s"]
    served = np.isfinite(at_s)
    edges_s = np.linspace(0.0, run.steps.stop_s, _NUM_BINS // 4 + 1)
    places = np.clip(np.searchsorted(edges_s, at_s[served]) - 1, 0, len(edges_s) - 2)
    sums = [
        np.bincount(places, each[served], len(edges_s) - 1)
        for each in (parts["loaded from the host"], np.sum([*parts.values()], axis=0))
    ]
    share = np.where(sums[1] > 0, sums[0] / np.maximum(sums[1], 1.0), np.nan)
    return Line(
        name(runs, run, "loaded"),
        colour(run),
        edges_s[:-1] / clock.seconds,
        100.0 * share,
        dash(run),
    )


def _lengths(runs: Sequence[Run], tiers: _Tiers) -> Iterator[Line]:
    """Yield milliseconds by length, of loads and of computed tokens."""
    run, copies, requests = tiers.run, tiers.copies, tiers.requests
    own = np.isin(np.asarray(copies["kind"]), LOADS)
    computed = by_source(requests).get("computed")
    if computed is None:  # elsewhere, where no row tells how long it took
        computed = np.zeros(len(requests["num_prompt_tokens"]))
    whole = computed >= 0.5 * requests["num_prompt_tokens"]
    for what, tokens, seconds, looks in (
        (
            "load",
            copies["num_tokens"][own],
            (copies["reported_s"] - copies["begin_s"])[own],
            colour(run),
        ),
        (
            "compute",
            computed[whole],
            (requests["first_token_s"] - requests["first_scheduled_s"])[whole],
            "ink",
        ),
    ):
        x, y = medians(tokens, seconds)
        if len(x):
            label = name(runs, run, what)
            yield Line(label, looks, x, 1e3 * y, dash(run), symbol=symbol(run))


def medians(tokens: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return lengths, half an octave apart, and the median seconds of each."""
    known = (tokens > 0) & np.isfinite(seconds) & (seconds > 0)
    places = np.round(2 * np.log2(np.maximum(tokens[known], 1))).astype(int)
    kept = [
        place
        for place in np.unique(places)
        if np.count_nonzero(places == place) >= _LEAST_IN_OCTAVE
    ]
    middles = [float(np.median(seconds[known][places == place])) for place in kept]
    return 2.0 ** (np.array(kept) / 2), np.array(middles)


def _by_source(shown: Sequence[_Tiers]) -> Markup:
    """Return TTFT by where most of a prompt came from."""
    rows = []
    for each in shown:
        sources = by_source(each.requests)
        parts = np.array([*sources.values()])
        ttft_s = np.asarray(each.requests["ttft_s"])
        most = np.argmax(parts, axis=0)
        for place, source in enumerate(sources):
            own = ttft_s[(most == place) & np.isfinite(ttft_s)]
            middle, high = (
                (float(np.quantile(own, q)) * 1e3 for q in (0.5, 0.9))
                if len(own)
                else (None, None)
            )
            rows.append(
                [
                    tag(each.run),
                    source,
                    count(len(own)),
                    milliseconds(middle),
                    milliseconds(high),
                    count(float(parts[place].sum())),
                ]
            )
    head = [
        "run",
        "mostly",
        "requests",
        "TTFT p50",
        "TTFT p90",
        "prompt tokens by source",
    ]
    return table(
        "Time to the first token, by where a prompt came from", head, rows, left=(1,)
    )


def _numbers(shown: Sequence[_Tiers]) -> Markup:
    keys = {
        "cpu_cache_usage_mean": percent,
        "num_tier_evictions": count,
        "external_prefix_cache_hits": count,
        "loaded_bytes": lambda number: f"{decimal(number / 1e9)} GB",
        "stored_bytes": lambda number: f"{decimal(number / 1e9)} GB",
        "loaded_link_utilisation": percent,
        "stored_link_utilisation": percent,
    }
    head = ["run", "host used, mean", "chunks evicted", "prompt tokens loaded"]
    head += ["loaded", "stored", "link busy with loads", "with stores"]
    rows = [
        [
            tag(each.run),
            *(
                # without what decoders read of prefillers, which are hits, too
                count(float(by_source(each.requests)["loaded from the host"].sum()))
                if key == "external_prefix_cache_hits" and is_apart(each.requests)
                else datum(each.run, key, said(each.run.summary[key]))
                for key, said in keys.items()
            ),
        ]
        for each in shown
    ]
    return table("The host's tier and its link", head, rows)


def _behind(shown: Sequence[_Tiers]) -> Iterator[Markup]:
    """Yield a table of the tiers behind the host, where there are some."""
    keys = ("num_loaded_tokens", "num_used_chunks", "num_chunks", "num_evictions")
    rows = []
    for run in (each.run for each in shown):
        for tier, told in run.summary.get("secondary_tiers", {}).items():
            numbers = [
                data(
                    count(told[key]),
                    told[key],
                    f"secondary_tiers.{tier}.{key}",
                    run.number,
                )
                for key in keys
            ]
            busy = told["busy_s"] / max(run.summary["duration"], 1e-300)
            rows.append([tag(run), tier, *numbers, percent(busy)])
    if rows:
        head = [
            "run",
            "tier",
            "prompt tokens from it",
            "chunks",
            "room",
            "evicted",
            "busy",
        ]
        yield table("Tiers behind the host", head, rows, left=(1,))
        yield paragraph(
            "No log of a release proves what tiers behind the host keep.", class_="note"
        )
