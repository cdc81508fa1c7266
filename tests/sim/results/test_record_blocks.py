"""``--record blocks``: how long blocks keep content, are held, and wait for a hit."""

from __future__ import annotations

import json
from bisect import bisect_right
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.results.recording import blocks
from sim.results.recording.blocks import (
    BIN_EDGES_S,
    NUM_BINS,
    BlockTimes,
    DurationHistogram,
)
from sim.simulation.extras import recording
from sim.simulation.run import Simulation
from tests.identity.random_configs import draw_case
from tests.sim.cli.test_run_command import pressed
from tests.sim.recordings import (
    RANDOM_RUNS,
    Recorded,
    lines_of,
    listed,
    random_runs,
    record,
    traffic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KINDS = ("residency", "time_held", "reuse_gap")


def tiers_of(recorded: Recorded) -> dict[str, Any]:
    tiers: dict[str, Any] = json.loads(recorded.blocks)["tiers"]
    return tiers


def gpu_of(recorded: Recorded) -> dict[str, Any]:
    tier: dict[str, Any] = tiers_of(recorded)["gpu"]
    return tier


# -- the bins -------------------------------------------------------------------


def plain_histogram(durations_ns: Sequence[int]) -> dict[str, Any]:
    """Return a histogram, computed from all durations at once."""
    counts = [0] * NUM_BINS
    for duration_ns in durations_ns:
        counts[bisect_right(BIN_EDGES_S, duration_ns / 10**9)] += 1
    num = len(durations_ns)
    return {
        "count": num,
        "mean_s": float(Fraction(sum(durations_ns), num * 10**9)) if num else None,
        "min_s": min(durations_ns) / 10**9 if num else None,
        "max_s": max(durations_ns) / 10**9 if num else None,
        "counts": counts,
    }


def test_ten_bins_a_decade_and_one_at_either_end() -> None:
    assert BIN_EDGES_S[0] == 0.0001
    assert BIN_EDGES_S[-1] == 1e6
    assert BIN_EDGES_S[40::10][:2] == (1.0, 10.0)
    assert len(BIN_EDGES_S) == NUM_BINS - 1 == 101
    histogram = DurationHistogram()
    for duration_ns in (0, 99_999, 100_000, 10**9, 10**15 - 1, 10**15, 10**17):
        histogram.add(duration_ns)
    filled = {i: n for i, n in enumerate(histogram.counts()) if n}
    assert filled == {0: 2, 1: 1, 41: 1, 100: 1, 101: 2}


@given(st.lists(st.integers(0, 9 * 10**18), max_size=60), st.data())
def test_a_histogram_in_parts_equals_one_of_all(
    durations_ns: list[int], data: st.DataObject
) -> None:
    histogram = DurationHistogram()
    rest = durations_ns
    while rest:
        num = data.draw(st.integers(1, len(rest)))
        if num == 1:
            histogram.add(rest[0])
        else:
            histogram.add_all(np.array(rest[:num]))
        rest = rest[num:]
    assert histogram.to_dict() == plain_histogram(durations_ns)


# -- against a model of dictionaries --------------------------------------------


class PlainTimes:
    """The same observer, without arrays and bins: a dictionary and lists."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.content: dict[int, dict[str, int]] = {}
        self.durations: dict[str, list[int]] = {
            kind: [] for kind in (*KINDS, "idle_before_eviction")
        }

    def _now(self) -> int:
        return round(self.clock.now * 1e9)

    def taken(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            old = self.content.pop(block_id, None)
            if old is not None:
                self.durations["residency"].append(old["freed"] - old["taken"])
            self.content[block_id] = {"taken": self._now(), "held": self._now()}

    def released(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            held = self.content[block_id].pop("held")
            self.content[block_id]["freed"] = self._now()
            self.durations["time_held"].append(self._now() - held)

    def revived(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            freed = self.content[block_id].pop("freed")
            self.content[block_id]["held"] = self._now()
            self.durations["reuse_gap"].append(self._now() - freed)

    def evicted(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            old = self.content.pop(block_id)
            self.durations["residency"].append(self._now() - old["taken"])
            self.durations["idle_before_eviction"].append(self._now() - old["freed"])

    def compare(self, seen: dict[str, Any], cached_ids: set[int]) -> None:
        """Hold the counts and histograms of the observer against these."""
        censored: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for block_id, content in self.content.items():
            if "held" in content:
                censored["time_held"].append(self._now() - content["held"])
            elif block_id in cached_ids:
                censored["reuse_gap"].append(self._now() - content["freed"])
            else:
                ended = content["freed"] - content["taken"]
                self.durations["residency"].append(ended)
                continue
            censored["residency"].append(self._now() - content["taken"])
        for kind, durations_ns in self.durations.items():
            expected = plain_histogram(durations_ns)
            if kind in KINDS:
                expected["censored"] = plain_histogram(censored[kind])
            assert seen[kind] == expected, kind


class Both:
    """Tells two observers."""

    def __init__(self, *observers: Any) -> None:
        self.observers = observers

    def __getattr__(self, name: str) -> Any:
        def tell(block_ids: Sequence[int]) -> None:
            assert len(block_ids)
            for observer in self.observers:
                getattr(observer, name)(block_ids)

        return tell


class Hands:
    """A clock that is set by hand."""

    now = 0.0


@pytest.mark.parametrize("few", [0, 2, 100])
@settings(max_examples=40)
@given(data=st.data())
def test_observer_against_a_dictionary(few: int, data: st.DataObject) -> None:
    clock = Hands()
    times, plain = BlockTimes(clock, 8), PlainTimes(clock)
    observer = Both(times, plain)
    held: set[int] = set()
    cached: set[int] = set()  # free ones among them
    free = set(range(8))
    before, blocks._FEW = blocks._FEW, few
    try:
        for _ in range(data.draw(st.integers(0, 20))):
            clock.now += data.draw(st.sampled_from([0.0, 1e-5, 0.1, 0.3, 20.0, 5e6]))
            kind = data.draw(st.sampled_from(["take", "release", "revive"]))
            pool = {"take": free, "release": held, "revive": free & cached}[kind]
            if not pool:
                continue
            ids = data.draw(st.lists(st.sampled_from(sorted(pool)), unique=True))
            if not ids:
                continue
            if kind == "take":
                lost = [block_id for block_id in ids if block_id in cached]
                if lost:
                    observer.evicted(lost)
                observer.taken(ids)
                cached -= set(ids)
            elif kind == "release":
                observer.released(ids)
                hashed = data.draw(st.sets(st.sampled_from(ids)))
                cached |= hashed
            else:
                observer.revived(ids)
            (held, free) = (
                (held - set(ids), free | set(ids))
                if kind == "release"
                else (held | set(ids), free - set(ids))
            )
        times.close(cached)
    finally:
        blocks._FEW = before
    plain.compare(times.to_dict(), cached)


# -- whole runs -----------------------------------------------------------------


@RANDOM_RUNS
@pytest.mark.slow
def test_both_paths_time_the_same_blocks(seeds: range) -> None:
    num_evicted = num_revived = 0
    for seed in seeds:
        chosen, stepwise = random_runs(seed)
        assert chosen.blocks == stepwise.blocks, f"seed {seed}"
        if chosen.results is None:
            continue
        tier = check_identities(chosen)
        # The reader knows neither null blocks behind a window, nor steps in flight, nor
        # a block that a call gives to a request which it preempts later on.
        engine = draw_case(seed).config.engine
        takes_back = engine.preemption_victim == "lowest_priority"
        if not (engine.sliding_window or engine.async_scheduling or takes_back):
            check_against_schedule(chosen)
            num_evicted += tier["evicted"]
            num_revived += tier["revived"]
    assert num_evicted > 50
    assert num_revived > 50


@pytest.mark.parametrize(
    "trace", ["azure", pytest.param("mooncake", marks=pytest.mark.slow)]
)
def test_recorded_traffic_times_the_same_blocks_on_both_paths(trace: str) -> None:
    chosen, stepwise = traffic(trace)
    assert chosen.blocks == stepwise.blocks
    tier = check_identities(chosen)
    check_against_schedule(chosen)
    if trace == "azure":
        # Without prefix caching, content ends with the request that wrote it.
        assert tier["residency"] == tier["time_held"]
        assert tier["evicted"] == tier["revived"] == tier["cached_at_end"] == 0
    else:
        assert tier["evicted"] > 0
        assert tier["reuse_gap"]["count"] == tier["revived"] > 0
        assert tier["residency"]["mean_s"] > tier["time_held"]["mean_s"]


@pytest.mark.parametrize("generation", ["cacheflow", "v0_2", "v0"])
def test_blocks_alone_are_timed_alike_on_both_paths(
    generation: str, tmp_path: Path
) -> None:
    """Without a schedule to write, decodes of earlier generations stand on a clock."""
    config = parse_config(pressed({}, scheduler=generation))
    found = []
    for stepwise in (False, True):
        simulation = Simulation(config, stepwise=stepwise)
        with recording(simulation, ["blocks"], tmp_path):
            simulation.run()
        assert (simulation.path == "fast") is not stepwise
        found.append((tmp_path / "blocks.json").read_bytes())
    assert found[0] == found[1]


def check_identities(recorded: Recorded) -> dict[str, Any]:
    """Check the counts that must add up, and those of the summary as well."""
    assert recorded.results is not None
    tier = gpu_of(recorded)
    count = {kind: tier[kind]["count"] for kind in KINDS}
    cut = {kind: tier[kind]["censored"]["count"] for kind in KINDS}
    assert count["time_held"] == tier["released"]
    assert count["reuse_gap"] == tier["revived"]
    assert tier["idle_before_eviction"]["count"] == tier["evicted"]
    assert count["residency"] + cut["residency"] == tier["taken"]
    assert tier["taken"] + tier["revived"] == tier["released"] + cut["time_held"]
    assert cut["time_held"] == tier["held_at_end"]
    assert cut["reuse_gap"] == tier["cached_at_end"]
    summary = recorded.results.summary
    assert tier["evicted"] == summary["num_evictions"]
    num_hits = summary["prefix_cache_hits"] + summary["prefix_cache_preempted_hits"]
    block_size = json.loads(recorded.blocks)["block_size"]
    assert tier["revived"] <= num_hits // block_size
    return tier


def check_against_schedule(recorded: Recorded) -> None:
    """Counts, times held and reuse gaps, read off the lines of the schedule."""
    header, lines = lines_of(recorded.schedule)
    reader = ScheduleReader(header["block_size"])
    for line in lines:
        reader.read(line)
    tier = gpu_of(recorded)
    assert (tier["taken"], tier["revived"]) == (reader.num_taken, reader.num_revived)
    assert tier["held_at_end"] == len(reader.held)
    for kind, durations_ns in reader.durations.items():
        expected = plain_histogram(durations_ns)
        assert {key: tier[kind][key] for key in expected} == expected, kind


class ScheduleReader:
    """Blocks held, and since when, read off the lines of a v1 schedule alone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tables: dict[str, list[int]] = {}
        self.references: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        self.num_taken = self.num_revived = 0
        self.durations: dict[str, list[int]] = {"time_held": [], "reuse_gap": []}
        self.logged: dict[str, list[int]] = {}

    def read(self, line: dict[str, Any]) -> None:
        start_ns, end_ns = round(line["start_s"] * 1e9), round(line["end_s"] * 1e9)
        for name, _ in line.get("preempt", ()):
            self.release(name, start_ns)
        num_hits = {
            name: num_tokens // self.block_size
            for name, num_tokens in line.get("cached", {}).items()
        }
        entries = {entry[0]: entry for entry in line["sched"]}
        changes = line.get("bt", {})
        for name, entry in entries.items():
            if name in changes:
                keep, ids = changes[name]
                self.logged[name] = self.logged.get(name, [])[:keep] + ids
            if name in changes or entry[2] != "r":
                self.hold(name, num_hits.get(name, 0), start_ns)
        for name in line.get("fin", ()):
            self.release(name, end_ns)

    def hold(self, name: str, num_hits: int, now_ns: int) -> None:
        """Let the request hold its table as of the last line."""
        table = self.tables.setdefault(name, [])
        for index in range(len(table), len(self.logged[name])):
            block_id = self.logged[name][index]
            table.append(block_id)
            references = self.references.get(block_id, 0)
            self.references[block_id] = references + 1
            if references:
                assert index < num_hits
                continue
            self.held[block_id] = now_ns
            if index < num_hits:
                self.num_revived += 1
                self.durations["reuse_gap"].append(now_ns - self.freed[block_id])
            else:
                self.num_taken += 1

    def release(self, name: str, now_ns: int) -> None:
        for block_id in self.tables.pop(name):
            self.references[block_id] -= 1
            if not self.references[block_id]:
                self.freed[block_id] = now_ns
                self.durations["time_held"].append(now_ns - self.held.pop(block_id))


def test_one_prompt_after_another_in_every_detail() -> None:
    # Steps of a second; block 1 is the only full one of each prompt, and is hit.
    requests = [
        {"at": float(at), "prompt": [[7, 6]], "out": 2, "seg": 9} for at in (0, 5, 10)
    ]
    recorded = record(listed(requests, num_gpu_blocks_override=10, max_model_len=16))
    assert recorded.results is not None
    tier = gpu_of(recorded)
    assert (tier["taken"], tier["revived"], tier["released"]) == (4, 2, 6)
    assert tier["evicted"] == tier["held_at_end"] == 0
    assert tier["cached_at_end"] == 1
    # Each prompt takes two steps; the full block waits three seconds for its hit.
    assert tier["time_held"]["count"] == 6
    assert tier["time_held"]["min_s"] == tier["time_held"]["max_s"] == 2.0
    assert tier["reuse_gap"]["count"] == 2
    assert tier["reuse_gap"]["mean_s"] == tier["reuse_gap"]["max_s"] == 3.0
    assert tier["residency"]["count"] == 3
    assert tier["residency"]["mean_s"] == 2.0
    assert tier["residency"]["censored"]["mean_s"] == 12.0
    # Served one by one, every hit revives a block.
    assert recorded.results.summary["prefix_cache_hits"] == 4 * tier["revived"]


@pytest.mark.parametrize(
    ("generation", "engine"),
    [
        ("cacheflow", {}),
        ("v0_2", {}),
        ("v0_2", {"sliding_window": 64}),
        ("v0", {}),
        ("v0", {"enable_prefix_caching": True}),
        ("v0", {"sliding_window": 64}),
        ("v1", {"num_gpu_blocks_override": 20}),
        ("v1", {"num_gpu_blocks_override": 20, "sliding_window": 50}),
    ],
)
def test_every_generation_times_its_tiers(
    generation: str, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {} if "sliding_window" in engine else {"best_of": {1: 0.5, 2: 0.5}}
    config = parse_config(pressed(shares, scheduler=generation, **engine))
    made: list[tuple[BlockTimes, PlainTimes]] = []
    cached: list[set[int]] = []
    close = BlockTimes.close

    def told_twice(clock: Any, num_ids: int) -> Any:
        times, plain = BlockTimes(clock, num_ids), PlainTimes(clock)
        made.append((times, plain))
        both = Both(times, plain)
        both.close = lambda ids: (cached.append(set(ids)), close(times, ids))  # type: ignore[attr-defined]
        both.to_dict = times.to_dict  # type: ignore[attr-defined]
        return both

    monkeypatch.setattr("sim.simulation.extras.BlockTimes", told_twice)
    recorded = record(config, stepwise=True)
    assert recorded.results is not None
    tiers = tiers_of(recorded)
    assert list(tiers) == (["gpu"] if generation == "v1" else ["gpu", "cpu"])
    for (_, plain), ids, seen in zip(made, cached, tiers.values(), strict=True):
        plain.compare(seen, ids)
    summary = recorded.results.summary
    gpu = tiers["gpu"]
    has_null_block = generation == "v0" and "sliding_window" in engine
    assert gpu["held_at_end"] == has_null_block
    assert gpu["taken"] + gpu["revived"] == gpu["released"] + has_null_block > 0
    assert gpu["evicted"] == summary.get("num_evictions", 0)
    assert summary["num_preemptions"] > 0
    if "cpu" in tiers and not engine.get("enable_prefix_caching"):
        cpu = tiers["cpu"]
        assert cpu["taken"] == summary["swapped_out_blocks"]
        assert cpu["released"] == summary["swapped_in_blocks"]
        assert cpu["held_at_end"] == 0
