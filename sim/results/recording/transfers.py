"""Copies between the pool and the tier behind it, and the contents of the tier."""

from __future__ import annotations

from array import array
from dataclasses import replace
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import schema
from sim.results.recording.recorder import Recorder, Recording
from sim.results.tables.columns import Texts
from sim.results.tables.memory import ResultTable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cache.tiers import SecondaryTier, TierHierarchy
    from cache.tiers.hierarchy import InFlight
    from sim.results.tables.steps import Batch
    from sim.scheduler.v1.connectors.base import TransferJob

    Floats = npt.NDArray[np.float64]

LOADS = ("load", "sync_load")
"""Kinds of transfers towards the GPU."""


class TransferLog:
    """Copies as they are reported, and the tier's places as they change.

    Parameters
    ----------
    num_chunks
        Places of the tier; 0 for an engine without one beside others that have one.
    block_bytes, block_sizes
        By KV cache group: bytes that a block moves, all GPUs together, and its tokens.
    blocks_per_chunk
        Blocks of a chunk.
    behind
        Tiers behind the host, by name.
    """

    def __init__(
        self,
        num_chunks: int = 0,
        block_bytes: Sequence[int] = (0,),
        block_sizes: Sequence[int] = (1,),
        blocks_per_chunk: int = 1,
        behind: Mapping[str, SecondaryTier] | None = None,
    ) -> None:
        self.num_chunks = num_chunks
        self._block_bytes = block_bytes
        self._block_sizes = block_sizes
        self._kinds, self._codes = Texts(), array("q")
        self._facts = array("q")  # job, request, blocks, tokens, bytes
        self._times_s = array("d")  # begin, end, reported
        self._tier_s = array("d")
        self._tier = array("q")  # used, being written, being read
        self._blocks_per_chunk = blocks_per_chunk
        self._behind = behind or {}
        self._num_places = 3 + len(self._behind)
        self._last = (0,) * self._num_places

    def note(
        self, job: TransferJob, begin_s: float, end_s: float, reported_s: float
    ) -> None:
        """Take note of a copy that has ended and been reported."""
        self._codes.append(self._kinds.code(job.kind.value))
        self._facts.extend((job.job_id, job.request.request_id))
        self._facts.extend(self._amount(job.num_by_group))
        self._times_s.extend((begin_s, end_s, reported_s))

    def _amount(self, num_by_group: Sequence[int]) -> tuple[int, int, int]:
        """Return blocks, tokens of the group that has most of them, and bytes."""
        if len(num_by_group) == 1:  # a call less a copy
            (number,) = num_by_group
            size, num_bytes = self._block_sizes[0], self._block_bytes[0]
            return number, number * size, number * num_bytes
        return (
            sum(num_by_group),
            max(map(mul, num_by_group, self._block_sizes)),
            sum(map(mul, num_by_group, self._block_bytes)),
        )

    def note_behind(self, moved: InFlight) -> None:
        """Take note of a copy between the host and a tier behind it."""
        job = moved.job
        kind = f"{moved.tier}_{'load' if job.is_load else 'store'}"
        num_blocks = len(job.keys) * self._blocks_per_chunk
        self._codes.append(self._kinds.code(kind))
        self._facts.extend((-1, moved.access.request_id))
        self._facts.extend(self._amount([num_blocks]))
        self._times_s.extend((job.begin_s, job.end_s, job.end_s))

    def note_tier(self, now_s: float, used: int, writing: int, reading: int) -> None:
        """Take note of the tier's contents right after a scheduler call."""
        behind = [tier.num_used_chunks for tier in self._behind.values()]
        self._note(now_s, (used, writing, reading, *behind))

    def note_gone(self, now_s: float) -> None:
        """Take note that the host is gone, with all tiers that only this engine has.

        It is no sooner than the latest change.
        """
        tiers = self._behind.values()
        shared = [tier.num_used_chunks * tier.is_shared for tier in tiers]
        latest_s = self._tier_s[-1] if self._tier_s else 0.0
        self._note(max(now_s, latest_s), (0, 0, 0, *shared))

    def _note(self, now_s: float, places: tuple[int, ...]) -> None:
        if places != self._last:
            self._last = places
            self._tier_s.append(now_s)
            self._tier.extend(places)

    def renew(self, behind: TierHierarchy | None) -> None:
        """Take note of the tiers of an engine that takes the place of another."""
        self._behind = {} if behind is None else behind.tiers

    @property
    def shared(self) -> frozenset[str]:
        """Names of the tiers behind the host that other engines have, too."""
        return frozenset(n for n, tier in self._behind.items() if tier.is_shared)

    def transfer_table(self) -> ResultTable:
        """Return a row a copy, in the order in which they began, then by number."""
        facts = np.frombuffer(self._facts, np.int64).reshape(-1, 5)
        times_s = np.frombuffer(self._times_s, np.float64).reshape(-1, 3)
        order = np.lexsort((facts[:, 0], times_s[:, 0]))
        facts, times_s = facts[order], times_s[order]
        columns: dict[str, Any] = {
            "job_id": facts[:, 0],
            "kind": self._kinds.column(np.frombuffer(self._codes, np.int64)[order]),
            "request_id": facts[:, 1],
            "num_blocks": facts[:, 2],
            "num_tokens": facts[:, 3],
            "num_bytes": facts[:, 4],
            "begin_s": times_s[:, 0],
            "end_s": times_s[:, 1],
            "reported_s": times_s[:, 2],
        }
        return ResultTable(columns, schema.TRANSFERS)

    def tier_table(self) -> ResultTable:
        """Return a row a change of the tier's contents, in order of time."""
        places = np.frombuffer(self._tier, np.int64).reshape(-1, self._num_places)
        columns = {
            "time_s": np.frombuffer(self._tier_s, np.float64),
            "num_used_chunks": places[:, 0],
            "num_writing_chunks": places[:, 1],
            "num_reading_chunks": places[:, 2],
        }
        for place, name in enumerate(self._behind, 3):
            columns[f"num_{name}_chunks"] = places[:, place]
        kinds = schema.TIER | dict.fromkeys([*columns][4:], "int64")
        return ResultTable(columns, kinds)

    def usage_at(self, times_s: Floats) -> Floats:
        """Return the share of the tier that was used at these times."""
        at = np.searchsorted(np.frombuffer(self._tier_s), times_s, side="right")
        used = np.frombuffer(self._tier, np.int64).reshape(-1, self._num_places)[:, 0]
        usage: Floats = np.append(0, used)[at] / max(self.num_chunks, 1)
        return usage


def joined_tiers(tables: Sequence[ResultTable], shared: Collection[str]) -> ResultTable:
    """Return the contents of the tiers of a fleet's engines together, in order of time.

    Parameters
    ----------
    tables
        Of the engines.
    shared
        Names of tiers that all have: each engine tells of the same chunks.
    """
    order = np.argsort(np.concatenate([t["time_s"] for t in tables]), kind="stable")
    kinds = dict(tables[0].kinds)
    columns: dict[str, Any] = {}
    for name in kinds:
        told = [table[name] for table in tables]
        if name == "time_s" or name[4:-7] in shared:
            columns[name] = np.concatenate(told)[order]
        else:  # by how much each changes
            changes = [np.diff(each, prepend=0) for each in told]
            columns[name] = np.cumsum(np.concatenate(changes)[order])
    return ResultTable(columns, kinds)


class OffloadRecorder(Recorder):
    """A `Recorder` of an engine with a tier behind its pool.

    Parameters
    ----------
    transfers
        Told of copies.
    more
        As of `Recorder`.
    """

    def __init__(self, transfers: TransferLog, **more: Any) -> None:
        super().__init__(**more)
        self.transfers = transfers

    def _emit(self, batch: Batch) -> None:
        usage = self.transfers.usage_at(batch["start_s"])
        super()._emit(batch | {"cpu_cache_usage": usage})

    def finish(self, now_s: float) -> Recording:
        log = self.transfers
        return with_loads(
            replace(
                super().finish(now_s),
                transfer_table=log.transfer_table(),
                tier_table=log.tier_table() if log.num_chunks else None,
            )
        )


def with_loads(recording: Recording) -> Recording:
    """Return a recording whose requests have the columns of `schema.OFFLOAD_REQUESTS`.

    A request's loads count on whichever engine.
    """
    table, copies = recording.request_table, recording.transfer_table
    assert copies is not None
    ids = table["request_id"]
    is_load = np.isin(copies["kind"], LOADS)
    loaded = copies["request_id"][is_load]
    # Some go on elsewhere, and have no row here.
    most = max(ids.max(initial=-1), loaded.max(initial=-1))
    num_tokens = np.zeros(int(most) + 1, np.int64)
    np.add.at(num_tokens, loaded, copies["num_tokens"][is_load])
    columns = {"num_loaded_tokens": num_tokens[ids]}
    return replace(
        recording, request_table=table.with_columns(columns, schema.OFFLOAD_REQUESTS)
    )


def busy_s(begin_s: Floats, end_s: Floats) -> float:
    """Return how long at least one of these spans lasted."""
    order = np.argsort(begin_s, kind="stable")
    begin_s, end_s = begin_s[order], end_s[order]
    latest_s = np.maximum.accumulate(end_s)
    fresh_s = np.maximum(begin_s, np.append(0.0, latest_s[:-1]))
    return float(np.maximum(end_s - fresh_s, 0.0).sum())


def _mean_busy_s(recording: Recording, kinds: Sequence[str]) -> float:
    """Return for how long something was copied, of a fleet the mean of its engines."""
    parts = getattr(recording, "parts", ()) or (recording,)
    found = []
    for part in parts:
        copies = part.transfer_table
        if copies is None or part.tier_table is None:
            continue  # it has no link
        rows = np.isin(np.asarray(copies["kind"]), kinds)
        found.append(busy_s(copies["begin_s"][rows], copies["end_s"][rows]))
    return sum(found) / len(found)


def transfer_numbers(
    recording: Recording, num_chunks: int, duration_s: float
) -> dict[str, Any]:
    """Return the numbers of copies, how busy the link was, and how full the tier.

    Of a fleet, all engines together, and the mean over their links.
    """
    copies, tier = recording.transfer_table, recording.tier_table
    assert copies is not None
    assert tier is not None
    kinds = np.asarray(copies["kind"])
    until_s = np.append(tier["time_s"], max(duration_s, 1e-300))
    used = tier["num_used_chunks"] / num_chunks
    numbers: dict[str, Any] = {
        "cpu_cache_usage_mean": float((np.diff(until_s) * used).sum() / until_s[-1]),
        "cpu_cache_usage_max": float(used.max(initial=0.0)),
    }
    for name, of in (("stored", ("store",)), ("loaded", LOADS)):
        rows = np.isin(kinds, of)
        seconds = copies["end_s"][rows] - copies["begin_s"][rows]
        numbers |= {
            f"num_{name}_jobs": int(rows.sum()),
            f"{name}_blocks": int(copies["num_blocks"][rows].sum()),
            f"{name}_bytes": int(copies["num_bytes"][rows].sum()),
            f"{name}_bytes_per_s": (
                float(copies["num_bytes"][rows].sum() / seconds.sum())
                if seconds.sum() > 0
                else None
            ),
            f"{name}_link_utilisation": _mean_busy_s(recording, of)
            / max(duration_s, 1e-300),
        }
    return numbers


def transfer_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield hits of the tier and copies, where there is one."""
    if (num_chunks := summary.get("num_tier_chunks")) is None:
        return
    queries, hits = (
        summary[f"external_prefix_cache_{name}"] for name in ("queries", "hits")
    )
    share = hits / queries if queries else 0.0
    found = f"{share:.2%} of {queries:,} prompt tokens that the GPU missed"
    if "ttft_split" in summary:  # what decoders read of prefillers are hits, too
        found = f"{summary['loaded_blocks']:,} blocks loaded"
    yield (
        "CPU tier",
        f"{found}; {num_chunks:,} chunks, "
        f"mean {summary['cpu_cache_usage_mean']:.1%} used; "
        f"{summary['num_tier_evictions']:,} evicted",
    )
    parts = (
        f"{summary[f'{name}_bytes'] / 1e9:,.1f} GB {name} "
        f"({summary[f'{name}_link_utilisation']:.2%} of the time)"
        for name in ("stored", "loaded")
    )
    yield "copied", ", ".join(parts)
    for name, tier in summary.get("secondary_tiers", {}).items():
        yield (
            f"tier {name}",
            f"{tier['num_loaded_tokens']:,} prompt tokens came from it; "
            f"{tier['num_used_chunks']:,} of {tier['num_chunks']:,} chunks, "
            f"{tier['num_evictions'] + tier['num_expired']:,} gone, "
            f"{tier['num_refused']:,} without room; "
            f"{tier['written_bytes'] / 1e9:,.1f} GB written, "
            f"{tier['read_bytes'] / 1e9:,.1f} read (its decisions are in no log of a "
            f"release)",
        )
