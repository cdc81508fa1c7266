"""The slowest requests, one a line: waiting, prefill, decode, preempted."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from sim.errors import ResultsError
from sim.views.plots.style import time_unit
from sim.views.report.charts import Axis, Bars, Chart, Panel, Points, Series
from sim.views.report.html import Markup, element, paragraph, plural
from sim.views.report.looks import tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from sim.results.folder import Columns
    from sim.views.plots.binning import Floats
    from sim.views.report.source import Run


SCHEDULE_FILE: Final = "schedule.jsonl.zst"

Resumed = dict[tuple[int, int], float]


def resumed_s(path: Path, preempted: Mapping[int, Sequence[int]]) -> Resumed:
    """Return when preempted requests were scheduled again.

    Only lines that may hold such a request are taken apart: a schedule has a line a
    step, each with the queues.
    """
    due = sorted((t, request) for request, steps in preempted.items() for t in steps)
    waiting: dict[int, int] = {}
    found: Resumed = {}
    try:
        for step, line in enumerate(_step_lines(path)):
            while due and due[0][0] < step:
                t, request = due.pop(0)
                waiting[request] = t
            if waiting:
                _resume(line, waiting, found)
            elif not due:
                break
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise ResultsError(
            f"'{path}' cannot be read: {error}; record it again, or take it away"
        ) from error
    return found


def _step_lines(path: Path) -> Iterator[bytes]:
    with pa.input_stream(str(path), compression="zstd") as stream:
        lines = io.BufferedReader(stream, 1 << 20)
        next(lines, b"")
        yield from lines


def _resume(line: bytes, waiting: dict[int, int], found: Resumed) -> None:
    """Note which of the waiting requests a step computes, and when it starts."""
    if not any(b'["%d",' % request in line for request in waiting):
        return
    step = json.loads(line)
    scheduled = {int(entry[0]) for entry in step["sched"]}
    for request in [each for each in waiting if each in scheduled]:
        found[request, waiting.pop(request)] = float(step["start_s"])


NUM_SLOWEST: Final = 100
_PHASES: Final = {
    "waiting": ("arrival_s", "first_scheduled_s"),
    "prefill": ("first_scheduled_s", "first_token_s"),
    "decode": ("first_token_s", "finish_s"),
}
_PARTS: Final = {
    "waiting": ("waiting", "ttft_queue_s"),
    "prefill": ("prefill", "ttft_prefill_s"),
    "transfer": ("part-2", "ttft_transfer_s"),
}
"""Of requests that one engine prefills and another decodes: look and column."""


def show_waterfall(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return a figure a run: where the time of its slowest requests went."""
    for run in runs:
        if len(runs) > 1:
            yield element("h3", tag(run))
        rows = slowest(run)
        if rows.size:
            yield from _of_run(runs, run, rows)
        else:
            yield paragraph("No request was served to its end.", class_="note")


def slowest(run: Run) -> npt.NDArray[np.intp]:
    e2el_s = np.where(run.served, run.requests["e2el_s"], np.nan)
    order = np.argsort(-e2el_s, kind="stable")[:NUM_SLOWEST]
    return order[np.isfinite(e2el_s[order])]


def _of_run(
    runs: Sequence[Run], run: Run, rows: npt.NDArray[np.intp]
) -> Iterator[Markup | Chart]:
    r = {key: values[rows] for key, values in run.requests.items()}
    slow_s = r["e2el_s"]
    seconds, unit = time_unit(float(slow_s[0]))
    places = np.arange(rows.size, dtype=np.float64)
    series: list[Series] = [
        Bars(
            phase,
            look,
            begin_s / seconds,
            end_s / seconds,
            places,
            is_horizontal=True,
            texts=_texts(r, phase, end_s - begin_s),
        )
        for phase, look, begin_s, end_s in _phases(run, r, rows)
    ]
    victims = _Victims(run, r)
    if victims.place.size:
        series += victims.series(seconds)
    suffix = f"-{run.number}" if len(runs) > 1 else ""
    yield Chart(
        f"slowest-requests{suffix}",
        f"The {plural(rows.size, 'request')} with the longest end-to-end latency "
        f"({slow_s[0]:,.3g} s down to {slow_s[-1]:,.3g} s), slowest on top."
        + " Waiting is that at both engines."
        * ("ttft_split" in run.summary),
        (Panel(Axis("slowest on top", low=rows.size - 0.4, high=-0.6), tuple(series)),),
        x=Axis(
            f"time since arrival ({unit})", low=0.0, high=1.02 * slow_s[0] / seconds
        ),
        height_px=140 + 8 * rows.size,
    )
    if victims.place.size:
        yield victims.note()


def _phases(
    run: Run, r: Columns, rows: npt.NDArray[np.intp]
) -> Iterator[tuple[str, str, Floats, Floats]]:
    """Yield name, look, begin and end of each phase, in seconds since arrival."""
    if "ttft_split" not in run.summary:
        for phase, (begin, end) in _PHASES.items():
            yield phase, phase, r[begin] - r["arrival_s"], r[end] - r["arrival_s"]
        return
    columns = [column for _, column in _PARTS.values()]
    parts = run.folder.columns("requests", columns)
    end_s: Floats = np.zeros(rows.size)
    for phase, (look, column) in _PARTS.items():
        begin_s, end_s = end_s, end_s + parts[column][rows]
        yield phase, look, begin_s, end_s
    yield "decode", "decode", end_s, r["e2el_s"]


def _texts(r: Columns, phase: str, lengths_s: Floats) -> tuple[str, ...]:
    return tuple(
        f"request {request}: {phase} {length:,.4g} s of {total:,.4g} s\n"
        f"{plural(prompt, 'prompt token')}, {plural(output, 'output token')}, "
        f"{plural(preempted, 'preemption')}"
        for request, length, total, prompt, output, preempted in zip(
            r["request_id"].tolist(),
            lengths_s.tolist(),
            r["e2el_s"].tolist(),
            r["num_prompt_tokens"].tolist(),
            r["num_output_tokens"].tolist(),
            r["num_preemptions"].tolist(),
            strict=True,
        )
    )


class _Victims:
    """Preemptions of some requests, and until when each lasted, where it is known."""

    def __init__(self, run: Run, requests: Columns) -> None:
        p = run.preemptions
        request_ids = requests["request_id"]
        held = np.isin(p["request_id"], request_ids)
        self._p = {key: values[held] for key, values in p.items()}
        line = {each: place for place, each in enumerate(request_ids.tolist())}
        owners = self._p["request_id"].tolist()
        self.place: Floats = np.array([line[each] for each in owners], np.float64)
        self._arrival_s = requests["arrival_s"][self.place.astype(np.intp)]
        path = run.path / SCHEDULE_FILE
        self.is_recorded = path.is_file()
        until = resumed_s(path, self._steps()) if self.is_recorded else {}
        self._until_s = self._ends(until)

    def _steps(self) -> dict[int, list[int]]:
        steps: dict[int, list[int]] = {}
        pairs = zip(
            self._p["request_id"].tolist(), self._p["step"].tolist(), strict=True
        )
        for request, step in pairs:
            steps.setdefault(request, []).append(step)
        return steps

    def _ends(self, until: Resumed) -> Floats:
        pairs = zip(
            self._p["request_id"].tolist(), self._p["step"].tolist(), strict=True
        )
        return np.array([until.get(pair, np.nan) for pair in pairs], np.float64)

    def series(self, seconds: float) -> Iterator[Series]:
        """Yield spans where their ends are known, and marks where they are not."""
        begin_s = self._p["time_s"] - self._arrival_s
        end_s = self._until_s - self._arrival_s
        known = np.isfinite(self._until_s)
        if known.any():
            texts = self._texts(known)
            yield Bars(
                "preempted",
                "preempted",
                begin_s[known] / seconds,
                end_s[known] / seconds,
                self.place[known],
                is_horizontal=True,
                is_hatched=True,
                texts=texts,
            )
        if not known.all():
            yield Points(
                "preempted here",
                "preempted",
                begin_s[~known] / seconds,
                self.place[~known],
                symbol="diamond",
                texts=self._texts(~known),
                size=6,
            )

    def _texts(self, held: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        told = []
        for row in np.flatnonzero(held).tolist():
            time_s = self._p["time_s"][row]
            until_s = self._until_s[row] - time_s
            lasted = f" for {until_s:,.4g} s" if np.isfinite(until_s) else ""
            told.append(
                f"request {self._p['request_id'][row]}: preempted{lasted}\n"
                f"at {time_s:,.3f} s for request {self._p['for_request_id'][row]}"
                f"\n{self._p['mode'][row]}: "
                f"{plural(self._p['num_tokens_lost'][row], 'token')} lost"
            )
        return tuple(told)

    def note(self) -> Markup:
        number = plural(self.place.size, "preemption")
        if self.is_recorded:
            return paragraph(
                f"{number} of these requests; hatched from the loss of the blocks to "
                f"the step that computes the request again.",
                class_="note",
            )
        return paragraph(
            f"{number} of these requests, marked where it lost its blocks. How long "
            f"each had to wait is in the schedule: 'kvsim run' with ",
            element("code", "--record schedule"),
            " draws it.",
            class_="note",
        )
