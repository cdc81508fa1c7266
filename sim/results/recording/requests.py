"""Rows of requests and of preemptions, collected as columns."""

from __future__ import annotations

from itertools import starmap
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import schema
from sim.results.recording.tokens import Streaks
from sim.results.tables.columns import Columns, Texts
from sim.results.tables.memory import ResultTable
from sim.scheduler.request import RequestStatus
from workloads.requests.long_arrays import Collector, chosen, parts_of, spilled, taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.results.tables.columns import Array
    from sim.scheduler.base import Preemption
    from sim.scheduler.request import Request

_CHUNK_ROWS = 2048
_LEAST_CHUNK_ROWS = 64
_NUM_SORTED = 1 << 18
_SERVED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

_READ = (
    "request_id",
    "arrival_s",
    "num_prompt_tokens",
    "num_tokens",
    "num_sequences",
    "num_generated_tokens",
    "parent_id",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "num_preemptions",
    "num_cached_tokens",
    "num_recomputed_tokens",
)
"""Attributes that are read of a request that leaves."""
_REQUEST_FACTS = {name: schema.REQUESTS.get(name, "int64") for name in _READ}
_PREEMPTION_FACTS = {
    name: kind for name, kind in schema.PREEMPTIONS.items() if kind != "str"
}
_CODES = {"int64": "q", "float64": "d"}


class _Packer:
    """From tuples of exact integers and floats to columns, at 10 ns a value."""

    def __init__(self, kinds: dict[str, str]) -> None:
        codes = "".join(_CODES[kind] for kind in kinds.values())
        self.pack = Struct("=" + codes).pack
        self._dtype = np.dtype(list(kinds.items()))

    def columns(self, packed: Iterable[bytes]) -> dict[str, Array]:
        """Return the columns of packed rows."""
        table = np.frombuffer(b"".join(packed), self._dtype)
        return {name: table[name] for name in table.dtype.names or ()}


class RequestRows:
    """Requests that have left, as rows of `sim.results.schema.REQUESTS`.

    A request is read at once and let go: keeping it for a while would cost more than
    reading it, in memory that is no longer at hand.

    Parameters
    ----------
    front_end_s
        Seconds from the client to the queue and from a token to the client, which
        latencies have besides.
    num_recorders
        How many collect rows at a time; of many, each turns fewer into columns at once.

    Attributes
    ----------
    streaks
        How the tokens of the served ones followed one another; complete after `table`.
    """

    def __init__(self, front_end_s: float = 0.0, num_recorders: int = 1) -> None:
        self._chunk_rows = max(_LEAST_CHUNK_ROWS, 64 * _CHUNK_ROWS // num_recorders)
        self._chunk_rows = min(_CHUNK_ROWS, self._chunk_rows)
        self.streaks = Streaks()
        self._front_end_s = front_end_s
        self._columns = Columns(_REQUEST_FACTS | {"status": "int8", "reason": "int32"})
        self._reasons = Texts()
        self._reasons.code("")  # _NO_REASON
        self._packed: list[bytes] = []
        self._earlier: list[tuple[int, int, int]] = []

    def add(self, requests: Iterable[Request]) -> None:
        """Take requests that have left."""
        packed, pack = self._packed, _ROWS.pack
        for request in requests:
            status = _STATUSES.index(request.status)
            reason, streaks = request.reason, request.streaks
            first_step = last_step = -1
            # Those that were aborted had their last streak open.
            if streaks and status < len(_SERVED):
                if len(streaks) > 1:
                    streaks = _joined(streaks)
                first_step, last_step = streaks[-1]
                if len(streaks) > 1:
                    self._earlier += [(len(packed), *each) for each in streaks[:-1]]
            packed.append(
                pack(
                    request.request_id,
                    request.arrival_s,
                    request.num_prompt_tokens,
                    request.num_tokens,
                    request.num_sequences,
                    request.num_generated_tokens,
                    request.parent_id,
                    request.first_scheduled_s,
                    request.first_token_s,
                    request.finish_s,
                    request.num_preemptions,
                    request.num_cached_tokens,
                    request.num_recomputed_tokens,
                    status,
                    self._reasons.code(reason) if reason else _NO_REASON,
                    first_step,
                    last_step,
                )
            )
        if len(packed) >= self._chunk_rows:
            self._flush()

    def _flush(self) -> None:
        if not self._packed:
            return
        columns = _ROWS.columns(self._packed)
        self._columns.add(columns)
        rows = np.flatnonzero(columns["first_step"] >= 0)
        streaks = np.stack(
            [rows, columns["first_step"][rows], columns["last_step"][rows]]
        )
        if self._earlier:
            streaks = np.hstack([np.array(self._earlier, np.int64).T, streaks])
            streaks = streaks[:, np.argsort(streaks[0], kind="stable")]
        self.streaks.add(columns["request_id"][streaks[0]], streaks[1], streaks[2])
        self._packed, self._earlier = [], []

    def occupancy_s(self, left_s: Sequence[float], now_s: float) -> float:
        """Return the integral of requests in the system up to `now_s`.

        Parameters
        ----------
        left_s
            When requests left that were not served.
        now_s
            The end; rows of requests that are there still have been added.
        """
        self._flush()
        statuses, finish_s = (
            self._columns.values(name) for name in ("status", "finish_s")
        )
        gone_s = chosen(finish_s, statuses < len(_SERVED))
        if len(left_s):
            gone_s = np.concatenate([gone_s, left_s])
        gone_s = spilled(np.sort(gone_s))
        came_s = spilled(np.sort(self._columns.values("arrival_s")))
        return _occupancy_s(came_s, gone_s, now_s)

    def table(self) -> ResultTable:
        """Return all rows, sorted by id; nothing can be added afterwards."""
        self._flush()
        request_id = self._columns.pop("request_id")
        order = np.argsort(request_id, kind="stable")
        columns: dict[str, Any] = {"request_id": taken(request_id, order)}
        for name in (*list(_REQUEST_FACTS)[1:], "status", "reason"):
            columns[name] = taken(self._columns.pop(name), order)
        columns |= _derived(columns, self._front_end_s)
        columns["status"] = _STATUS_TEXTS.column(columns["status"])
        columns["reason"] = self._reasons.column(columns["reason"])
        return ResultTable(columns, schema.REQUESTS)


def _occupancy_s(came_s: Array, gone_s: Array, now_s: float) -> float:
    """Return the integral of how many are there, of the sorted times of both."""
    num_there, occupancy_s, last_s = 0, 0.0, None
    came, gone = 0, 0
    while came < len(came_s) or gone < len(gone_s):
        # Events up to a time, as many as are sorted at once at the most but for ties.
        until_s = min(
            times_s[min(at + _NUM_SORTED, len(times_s)) - 1]
            for times_s, at in ((came_s, came), (gone_s, gone))
            if at < len(times_s)
        )
        ends = [
            int(np.searchsorted(each, until_s, "right")) for each in (came_s, gone_s)
        ]
        some = came_s[came : ends[0]], gone_s[gone : ends[1]]
        came, gone = ends
        times_s = np.concatenate(some)
        changes = np.repeat([1, -1], [len(some[0]), len(some[1])])
        order = np.argsort(times_s, kind="stable")
        times_s, there = times_s[order], num_there + np.cumsum(changes[order])
        spans_s = np.diff(times_s, prepend=times_s[0] if last_s is None else last_s)
        before = np.concatenate([[num_there], there[:-1]])
        # cumsum adds one by one: an integral as the events of the run would add it up
        occupancy_s = float(np.cumsum(np.append(occupancy_s, before * spans_s))[-1])
        num_there, last_s = int(there[-1]), times_s[-1]
    return occupancy_s if last_s is None else occupancy_s + num_there * (now_s - last_s)


_DERIVED_OF = (
    "arrival_s",
    "num_prompt_tokens",
    "num_tokens",
    "num_generated_tokens",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
)


def _derived(columns: dict[str, Any], front_end_s: float) -> dict[str, Any]:
    """Return the columns that follow from others, worked out part by part."""
    found: dict[str, Collector] = {}
    for some in parts_of(columns, _DERIVED_OF):
        for name, values in _derived_part(some, front_end_s).items():
            found.setdefault(name, Collector(values.dtype)).add(values)
    return {name: collector.kept() for name, collector in found.items()}


def _derived_part(columns: dict[str, Array], front_end_s: float) -> dict[str, Array]:
    num_output = columns["num_tokens"] - columns["num_prompt_tokens"]
    generated = columns["num_generated_tokens"]
    arrival_s = columns["arrival_s"]
    ttft_s = columns["first_token_s"] - arrival_s
    e2el_s = columns["finish_s"] - arrival_s
    tpot_s = np.full(len(arrival_s), np.nan)
    np.divide(e2el_s - ttft_s, num_output - 1, out=tpot_s, where=num_output > 1)
    if front_end_s:
        ttft_s += front_end_s
        e2el_s += front_end_s
    return {
        "num_output_tokens": num_output,
        "num_generated_tokens": np.where(generated == 0, num_output, generated),
        "queue_s": columns["first_scheduled_s"] - arrival_s,
        "ttft_s": ttft_s,
        "e2el_s": e2el_s,
        "tpot_s": tpot_s,
    }


class PreemptionRows:
    """Preemptions, as rows of `sim.results.schema.PREEMPTIONS`."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._reasons: list[str] = []
        self._modes: list[str] = []
        self._texts = {"reason": Texts(), "mode": Texts()}
        self._columns = Columns(_PREEMPTION_FACTS | dict.fromkeys(self._texts, "int32"))

    def add(self, step: int, now_s: float, preemption: Preemption) -> None:
        """Take a preemption; the victim is read at once."""
        victim = preemption.request
        self._reasons.append(preemption.reason)
        self._modes.append(preemption.mode.value)
        self._rows.append(
            (
                now_s,
                step,
                victim.request_id,
                preemption.for_request.request_id,
                preemption.num_tokens_lost,
                victim.num_output_tokens,
                preemption.num_blocks_freed,
                preemption.num_blocks_moved,
                preemption.kv_cache_usage_before,
                preemption.kv_cache_usage_after,
                victim.num_preemptions,
            )
        )
        if len(self._rows) >= _CHUNK_ROWS:
            self._flush()

    def _flush(self) -> None:
        columns = _PREEMPTIONS.columns(starmap(_PREEMPTIONS.pack, self._rows))
        columns["reason"] = self._texts["reason"].encode(self._reasons)
        columns["mode"] = self._texts["mode"].encode(self._modes)
        self._columns.add(columns)
        self._rows, self._reasons, self._modes = [], [], []

    def table(self) -> ResultTable:
        """Return all rows in order; nothing can be added afterwards."""
        self._flush()
        columns: dict[str, Any]
        columns = {name: self._columns.pop(name) for name in schema.PREEMPTIONS}
        for name, texts in self._texts.items():
            columns[name] = texts.column(columns[name])
        return ResultTable(columns, schema.PREEMPTIONS)


_ROWS = _Packer(
    _REQUEST_FACTS
    | dict.fromkeys(("status", "reason", "first_step", "last_step"), "int64")
)
_PREEMPTIONS = _Packer(_PREEMPTION_FACTS)
_NO_REASON = 0
# Served ones first: a list finds by identity, a dictionary would hash in Python.
_STATUSES = [*_SERVED, *(each for each in RequestStatus if each not in _SERVED)]
_STATUS_TEXTS = Texts()
_STATUS_TEXTS.encode([each.value for each in _STATUSES])


def _joined(streaks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return runs of steps, of which none begins right behind another.

    A scheduler may end a run in a call that makes no step (of a hosted engine).
    """
    joined = [streaks[0]]
    for begin, end in streaks[1:]:
        if begin == joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
