"""The workload's facts on its requests: sessions, turns and service levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.results import schema
from sim.results.tables.columns import Texts
from workloads.requests.chained import NONE, ChainedRequests
from workloads.requests.columns import RequestColumns, numbers
from workloads.requests.long_arrays import ArrayFile, Collector, parts, spilled, taken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.results.recording.recorder import Recording
    from workloads.spec import RequestSpec

Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Facts of the workload's requests, by `RequestSpec.request_id`."""

    # one a request, or of shape ``(1,)`` where all have the same
    session_id: Integers
    turn: Integers
    priority: Integers
    slo_code: Integers  # the same: index into `slo_classes`
    slo_classes: Texts  # names of service levels

    @classmethod
    def of(cls, specs: Sequence[RequestSpec]) -> Traffic:
        texts = Texts()
        if isinstance(specs, RequestColumns):
            names = specs.slo_class
            listed = [names] if isinstance(names, str) else names.tolist()
            none, zero = np.array([-1]), np.array([0])
            priority = np.atleast_1d(np.asarray(specs.priority, dtype=np.int64))
            return cls(none, zero, priority, texts.encode(listed), texts)
        if isinstance(specs, ChainedRequests):
            codes = texts.encode([manner.slo_class for manner in specs.manners])
            slo_code = spilled(codes[specs.manner])
        else:
            slo_code = texts.encode([spec.slo_class for spec in specs])
        return cls(
            numbers(specs, "session_id"),
            _turns(numbers(specs, "previous_id")),
            numbers(specs, "priority"),
            slo_code,
            texts,
        )

    def joined(self, recording: Recording) -> Recording:
        """Return a recording whose request table has the columns of `schema.TRAFFIC`.

        Rows are joined by ``parent_id``, the workload's request.
        """
        table = recording.request_table
        parents = table["parent_id"]
        columns: dict[str, Any] = {
            name: _taken(_short(getattr(self, name)), parents)
            for name in ("session_id", "turn", "priority")
        }
        codes = _taken(self.slo_code, parents)
        columns["slo_class"] = self.slo_classes.column(codes)
        joined = table.with_columns(columns, schema.TRAFFIC)
        return replace(recording, request_table=joined)


def _turns(previous_ids: Integers) -> Integers:
    """Return how many requests come before each in its chain."""
    turns = np.zeros(len(previous_ids), dtype=np.int32)
    turn = turns.data
    follow_ups = np.flatnonzero(previous_ids != NONE)
    for some in parts(follow_ups):
        both = zip(some.tolist(), previous_ids[some].tolist(), strict=True)
        for request, before in both:
            turn[request] = turn[before] + 1
    return spilled(turns)


def _taken(
    values: npt.NDArray[np.integer[Any]], rows: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.integer[Any]] | ArrayFile:
    if len(values) > 1:
        return taken(values, rows)
    collector = Collector(values.dtype)
    for some in parts(rows):
        collector.add(np.full(len(some), values[0]))
    return collector.kept()


def _short(values: Integers) -> Integers:
    short = values.astype(np.int32)
    return short if (short == values).all() else values
