"""Prompts that one engine computes for another: pulls, and the parts of a TTFT."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from sim.results import schema
from sim.results.metrics import SERVED, distribution_ms, in_words
from sim.results.recording.drafts import DraftRecorder
from sim.results.recording.recorder import Recorder
from sim.results.recording.transfers import OffloadRecorder, busy_s, with_loads
from sim.results.tables.columns import Texts
from sim.results.tables.memory import ResultTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from sim.results.recording.recorder import Recording
    from sim.scheduler.request import Request

PARTS: Final = ("queue", "prefill", "transfer", "decode")
"""Of a TTFT, in the order in which a request goes through them."""

KINDS: Final = ("pull", "failed_pull")
"""Of transfers that are pulls."""

_NUM_FACTS: Final = 7


class PromptRecorder(Recorder):
    """A `Recorder` of an engine whose requests go on to another one.

    Attributes
    ----------
    num_prompts, num_computed_tokens
        Prompts for others, and tokens of them that were neither found nor loaded.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.num_prompts = 0
        self.num_computed_tokens = 0

    def finished(self, requests: Sequence[Request], num_later_steps: int = 0) -> None:
        """Take note of prompts that were computed; another engine has their rows."""
        for request in requests:
            self.moved(request)
            num_hits = request.num_cached_tokens
            self.num_computed_tokens += request.num_prompt_tokens - num_hits
        self.num_prompts += len(requests)
        row = len(self.steps.ends_s) - 1 - num_later_steps
        self.steps.finished.extend((row, len(requests)))


class OffloadPromptRecorder(PromptRecorder, OffloadRecorder):
    """A `PromptRecorder` of a fleet in which some engines have a tier."""


class DraftPromptRecorder(PromptRecorder, DraftRecorder):
    """A `PromptRecorder` of a fleet in which some engines verify drafts."""


class Prompt(Protocol):
    """A prompt at a producer."""

    first_scheduled_s: float
    finish_s: float


class Moved(Protocol):
    """Blocks that were moved, and the tokens and bytes that they stand for."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> float: ...


class Read(Protocol):
    """A pull, or a prompt sent, that has ended."""

    request: Request
    begin_s: float
    end_s: float
    has_failed: bool

    @property
    def lot(self) -> Moved:
        """Blocks of the prompt that it moved."""
        ...

    @property
    def source(self) -> Any:
        """The producer's side of the link; it has a place."""
        ...

    @property
    def prompt(self) -> Prompt:
        """The prompt whose blocks were read."""
        ...


class PullLog:
    """Pulls as decoders report them.

    Attributes
    ----------
    num_expired
        Leases that ended before the blocks were read.
    """

    def __init__(self) -> None:
        self.num_expired = 0
        # request, source, target, blocks, failed, bytes, tokens
        self._facts = array("q")
        self._times_s = array("d")  # prompt began and ended; pull began, ended, told

    def note(self, read: Read, place: int, reported_s: float) -> None:
        """Take note of a pull that has ended and is reported now."""
        prompt, lot = read.prompt, read.lot
        self._facts.extend(
            (
                read.request.request_id,
                read.source.place,
                place,
                lot.num_blocks,
                read.has_failed,
                round(lot.num_bytes),
                lot.num_tokens,
            )
        )
        self._times_s.extend(
            (
                prompt.first_scheduled_s,
                prompt.finish_s,
                read.begin_s,
                read.end_s,
                reported_s,
            )
        )

    def joined(self, recording: Recording) -> Recording:
        """Return a recording whose requests have the columns of `schema.PAIRS`."""
        facts = np.frombuffer(self._facts, np.int64).reshape(-1, _NUM_FACTS)
        times_s = np.frombuffer(self._times_s, np.float64).reshape(-1, 5)
        table, copies = recording.request_table, recording.transfer_table
        columns = _split(table, facts, times_s)
        pulls = self._table(facts, times_s)
        found = replace(
            recording,
            request_table=table.with_columns(columns, schema.PAIRS),
            transfer_table=pulls if copies is None else _beside(copies, pulls),
        )
        return found if copies is None else with_loads(found)

    def _table(
        self, facts: npt.NDArray[np.int64], times_s: npt.NDArray[np.float64]
    ) -> ResultTable:
        order = np.argsort(times_s[:, 2], kind="stable")
        facts, times_s = facts[order], times_s[order]
        kinds = Texts()
        names = ["failed_pull" if failed else "pull" for failed in facts[:, 4]]
        columns: dict[str, Any] = {
            "job_id": np.arange(len(facts)),
            "kind": kinds.column(kinds.encode(names)),
            "request_id": facts[:, 0],
            "num_blocks": facts[:, 3],
            "num_tokens": facts[:, 6],
            "num_bytes": facts[:, 5],
            "begin_s": times_s[:, 2],
            "end_s": times_s[:, 3],
            "reported_s": times_s[:, 4],
            "prefill_engine": facts[:, 1],
            "engine": facts[:, 2],
        }
        schema_of = schema.TRANSFERS | schema.PULLS
        return ResultTable(columns, schema_of)


def _beside(copies: ResultTable, pulls: ResultTable) -> ResultTable:
    """Return copies to tiers and back and pulls, in the order in which they began."""
    nowhere = {"prefill_engine": np.full(copies.num_rows, -1)}
    tables = copies.with_columns(nowhere, {"prefill_engine": "int64"}), pulls
    columns: dict[str, Any] = {
        name: np.concatenate([table[name] for table in tables]) for name in pulls.kinds
    }
    kinds = Texts()
    columns["kind"] = kinds.column(kinds.encode(columns["kind"].tolist()))
    order = np.argsort(columns["begin_s"], kind="stable")
    return ResultTable(columns, pulls.kinds).taken(order)


def pulls_of(transfers: ResultTable) -> ResultTable:
    """Return the pulls among transfers, without copies to tiers and back."""
    is_pull = transfers.is_one_of("kind", KINDS)
    return transfers if is_pull.all() else transfers.taken(is_pull)


def _split(
    table: ResultTable,
    facts: npt.NDArray[np.int64],
    times_s: npt.NDArray[np.float64],
) -> dict[str, Any]:
    """Return the columns of `schema.PAIRS`: the latest pull of a request counts."""
    ids = table["request_id"]
    latest = np.full(int(max(ids.max(initial=-1), facts[:, 0].max(initial=-1))) + 1, -1)
    latest[facts[:, 0]] = np.arange(len(facts))
    row = latest[ids]
    is_read = row >= 0
    arrival_s, first_s = table["arrival_s"], table["first_scheduled_s"]
    token_s = table["first_token_s"]
    queue_s, prefill_s = first_s - arrival_s, token_s - first_s
    transfer_s, decode_s = np.zeros(len(ids)), np.zeros(len(ids))
    began_s, ended_s, pull_s, pulled_s, _ = times_s[row[is_read]].T
    pull_s = np.maximum(pull_s, ended_s)  # chunks may have gone before
    queue_s[is_read] = (began_s - arrival_s[is_read]) + (pull_s - ended_s)
    prefill_s[is_read] = ended_s - began_s
    transfer_s[is_read] = pulled_s - pull_s
    decode_s[is_read] = token_s[is_read] - pulled_s
    is_served = ~np.isnan(token_s)
    columns: dict[str, Any] = {
        "prefill_engine": np.full(len(ids), -1),
        "num_transferred_tokens": np.zeros(len(ids), np.int64),
    }
    columns["prefill_engine"][is_read] = facts[row[is_read], 1]
    columns["num_transferred_tokens"][is_read] = np.where(
        facts[row[is_read], 4], 0, facts[row[is_read], 6]
    )
    for name, values in zip(
        PARTS, (queue_s, prefill_s, transfer_s, decode_s), strict=True
    ):
        columns[f"ttft_{name}_s"] = np.where(is_served, values, np.nan)
    return columns


def pull_numbers(recording: Recording, duration_s: float) -> dict[str, Any]:
    """Return the parts of TTFTs, and the numbers of transfers.

    Returns
    -------
    dict
        ``ttft_split``: statistics of each of `PARTS` in milliseconds; ``transfers``:
        numbers of pulls, seconds of each, and how many were under way. Bytes, tokens
        and seconds are of those that did not fail, as in vLLM 0.33's log
        (``NixlKVConnectorStats``).
    """
    requests, transfers = recording.request_table, recording.transfer_table
    assert transfers is not None
    pulls = pulls_of(transfers)
    is_served = requests.is_one_of("status", SERVED)  # as of all latencies
    split = {
        part: distribution_ms(part, requests[f"ttft_{part}_s"], is_served)
        for part in PARTS
    }
    begin_s, end_s = pulls["begin_s"], pulls["end_s"]
    spans_s = end_s - begin_s
    has_failed = pulls.is_one_of("kind", ["failed_pull"])
    duration_s = max(duration_s, 1e-300)
    return {
        "ttft_split": split,
        "transfers": {
            "num_transfers": pulls.num_rows,
            "num_failed": int(np.count_nonzero(has_failed)),
            "num_bytes": int(pulls["num_bytes"][~has_failed].sum()),
            "num_tokens": int(pulls["num_tokens"][~has_failed].sum()),
            **distribution_ms("transfer", spans_s[~has_failed]),
            "num_in_flight_mean": float(spans_s.sum() / duration_s),
            "num_in_flight_max": int(in_flight(begin_s, end_s)[1].max(initial=0)),
            "busy_share": busy_s(begin_s, end_s) / duration_s,
        },
    }


def in_flight(
    begin_s: npt.NDArray[np.float64], end_s: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return times at which the number of transfers under way changes, and numbers."""
    times_s = np.concatenate([end_s, begin_s])  # at equal times they end first
    changes = np.repeat([-1, 1], [len(end_s), len(begin_s)])
    order = np.argsort(times_s, kind="stable")
    return times_s[order], np.cumsum(changes[order])


def pull_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the parts of TTFTs, where prefill and decode are apart."""
    if (split := summary.get("ttft_split")) is None:
        return
    means_ms = [split[part][f"mean_{part}_ms"] for part in PARTS]
    if None not in means_ms:  # a request had a first token
        front, ways = summary["front_end"], ("client_to_queue_s", "token_to_client_s")
        beyond_ms = 1e3 * sum(front[way] for way in ways)
        texts, unit = in_words([*means_ms, beyond_ms], 0)
        parts = map(" ".join, zip(PARTS, texts, strict=False))
        told = f", and {texts[-1]} {unit} in the front end" if beyond_ms else ""
        yield "mean TTFT of", f"{', '.join(parts)} {unit}{told}"
    moved = summary["transfers"]
    if moved["num_transfers"]:
        (mean,), unit = in_words([moved["mean_transfer_ms"]], 1)
        yield (
            "transfers",
            f"{moved['num_transfers']:,}, {moved['num_bytes'] / 1e9:,.1f} GB, mean "
            f"{mean} {unit}; {moved['num_in_flight_mean']:.2f} under way, "
            f"{moved['num_in_flight_max']:,} at most; "
            f"{moved['num_failed']:,} failed"
            + (
                f", {moved['num_expired']:,} leases ended"
                if "num_expired" in moved
                else ""
            ),
        )
