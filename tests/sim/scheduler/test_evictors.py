"""``engine.evictor`` of v1: from a configuration to what is evicted."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from cache.v1.block_tables import BlockTables
from cache.v1.policies import CACHE_POLICIES, LRU
from cache.v1.runs.tables import RunTables
from sim.config.tables import load_config, parse_config
from sim.errors import ConfigError
from sim.simulation.evictors import WorkloadReads
from sim.simulation.extras import recording
from sim.simulation.run import Simulation
from tests.sim.build import scheduler, spec
from tests.sim.commands import refused
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path

    from sim.results.run import Results

BLOCK = 16


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Popular prompts between others that come once: a scan for LRU."""
    lines = []
    for i in range(120):
        popular = i % 3 != 2
        start = 10 * (i % 7) if popular else 1000 + 100 * i
        num_blocks = 4 if popular else 9
        lines.append(
            {
                "timestamp": 40 * i,
                "input_length": BLOCK * num_blocks - 5,
                "output_length": 3 + i % 5,
                "hash_ids": [start + depth for depth in range(num_blocks)],
            }
        )
    path = tmp_path / "scan.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def config(trace: Path, **engine: Any) -> dict[str, Any]:
    given = {
        "num_gpu_blocks_override": 41,
        "max_model_len": 400,
        "async_scheduling": False,
    }
    data = minimal(**(given | engine))
    data["workload"] = {
        "trace": {"kind": "mooncake", "path": str(trace), "block_tokens": BLOCK}
    }
    return data


def run(trace: Path, *, stepwise: bool = False, **engine: Any) -> Results:
    made = Simulation(parse_config(config(trace, **engine)), stepwise=stepwise)
    results = made.run(check_every=1)
    assert results.summary["completed"] == 120
    return results


@pytest.mark.parametrize("version", ["0.11", "0.33"])
def test_lru_is_the_engines_own_order_on_both_paths(
    trace: Path, tmp_path: Path, version: str
) -> None:
    schedules = set()
    for number, (evictor, stepwise) in enumerate(
        [(None, False), (None, True), ("lru", False), ({"kind": "lru"}, True)]
    ):
        data = config(trace, evictor=evictor, engine_version=version)
        made = Simulation(parse_config(data), stepwise=stepwise)
        assert made.path == ("stepwise" if stepwise else "fast")
        folder = tmp_path / str(number)
        folder.mkdir()
        with recording(made, ["schedule"], folder):
            results = made.run(check_every=7)
        assert results.summary["num_evictions"] > 100
        schedules.add((folder / "schedule.jsonl.zst").read_bytes())
    assert len(schedules) == 1


@pytest.mark.slow
def test_every_policy_runs_and_most_differ(trace: Path) -> None:
    hits = {}
    for kind in CACHE_POLICIES:
        results = run(trace, evictor=kind)
        hits[kind] = results.summary["prefix_cache_hits"]
        again = run(trace, evictor={"kind": kind})
        assert again.summary["prefix_cache_hits"] == hits[kind]
    assert hits["lru"] == run(trace).summary["prefix_cache_hits"]
    assert max(hits, key=lambda kind: hits[kind]) == "clairvoyant"
    # Scans push the popular prompts out of LRU and FIFO.
    assert min(hits[kind] for kind in ("lfu", "arc", "s3_fifo")) > hits["lru"]
    assert len(set(hits.values())) >= 5


def test_keys_of_a_kind_count(trace: Path) -> None:
    def hits(**keys: Any) -> int:
        return int(run(trace, evictor=keys).summary["prefix_cache_hits"])

    small = hits(kind="s3_fifo")
    assert small != hits(kind="s3_fifo", small=0.9)
    assert small != hits(kind="s3_fifo", ghosts=0.0)
    assert small != hits(kind="s3_fifo", move_to_main=1)
    tiny = hits(kind="tiny_lfu")
    assert tiny != hits(kind="tiny_lfu", window=1.0)
    assert tiny != hits(kind="tiny_lfu", protected=0.0)
    assert tiny != hits(kind="tiny_lfu", sample=1.0)


def test_without_prefix_caching_there_is_nothing_to_evict(trace: Path) -> None:
    idle = Simulation(
        parse_config(config(trace, evictor="arc", enable_prefix_caching=False))
    )
    assert any("evictor does nothing" in line for line in idle.warnings)


def test_a_subclass_of_lru_must_say_that_it_is_exact() -> None:
    class Mine(LRU):
        pass

    class MineToo(LRU):
        exact_on_fast_path = True

    for policy, tables in ((LRU, RunTables), (MineToo, RunTables), (Mine, BlockTables)):
        made = scheduler(enable_prefix_caching=True, evictor=policy)
        assert type(made.tables) is tables


def test_the_oracle_is_said_loudly(trace: Path) -> None:
    warnings = Simulation(parse_config(config(trace, evictor="clairvoyant"))).warnings
    assert any("has read the prompts to come: this is no engine" in w for w in warnings)
    data = config(trace, evictor="clairvoyant")
    data["workload"]["max_concurrent_users"] = 2
    assert any(
        "from which a closed loop departs" in line
        for line in Simulation(parse_config(data)).warnings
    )
    assert not any(
        "no engine" in w for w in run(trace, evictor="lru").summary["warnings"]
    )


def test_the_oracle_knows_who_reads_what() -> None:
    prompts = [((2, 40), (4, 30)), ((2, 40),), ((6, 50),), ((2, 40), (4, 30))]
    specs = [spec(i, float(i), 1, 1, prompt=prompt) for i, prompt in enumerate(prompts)]
    reads = WorkloadReads(specs, BLOCK)
    first = reads.contents(0)
    assert len(first) == 4  # of 70 tokens, whose last one is computed anyway
    assert [list(reads.readers(content)) for content in first] == [
        [0, 1, 3],
        [0, 1, 3],
        [0, 3],
        [0, 3],
    ]
    assert list(reads.contents(1)) == first[:2]
    assert list(reads.contents(2)) == []  # nobody else reads it
    assert list(reads.readers(12345)) == []


@pytest.mark.parametrize("scheduler", ["cacheflow", "v0_2", "hf_fifo"])
def test_generations_without_a_choice_refuse_it(scheduler: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"engine.evictor: the {scheduler} generation has no such key \(v0 and "
        r"v1 have it\); remove it, got 'arc'",
    ):
        parse_config(minimal(scheduler=scheduler, evictor="arc"))


@pytest.mark.parametrize(
    ("evictor", "message"),
    [
        ("ark", r"engine.evictor.kind: 'ark' is not built; did you mean 'arc'"),
        ({"kind": "arc", "size": 3}, r"engine.evictor.size: 'arc' has no such key"),
        ({"kind": "arc", "num_blocks": 3}, r"engine.evictor.num_blocks: 'arc' has no"),
        ({"kind": "s3_fifo", "small": 2.0}, r"engine.evictor: small must be a share"),
        ({"kind": "s3_fifo", "small": "x"}, r"engine.evictor.small: .*got 'x'"),
        ({"kind": "s3_fifo", "move_to_main": 9}, "engine.evictor: move_to_main must"),
        (
            {"kind": "tiny_lfu", "sample": 0.0},
            "engine.evictor: sample must be",
        ),
        ({"size": 3}, "engine.evictor.kind: must name"),
    ],
)
def test_wrong_keys_are_refused_in_a_line(
    trace: Path, evictor: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Simulation(parse_config(config(trace, evictor=evictor)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "class Mine:\n    pass\n",
            "must be a subclass of cache.v1.policies.CachePolicy",
        ),
        ("class Mine(KeyedPolicy):\n    pass\n", "cannot be made: TypeError.*abstract"),
        (
            "class Mine(KeyedPolicy):\n    def key(self, block): return block.size\n",
            "AttributeError: .*size",
        ),
        (
            "class Mine(KeyedPolicy):\n    def key(self, block): return 0\n"
            "    def evict(self, incoming): return 3\n",
            "of three blocks, 3 in use, 1 and 2 must be evicted, got",
        ),
        (  # well while it is tried, and wrong later
            "class Mine(KeyedPolicy):\n    def key(self, block): return 0\n"
            "    def evict(self, incoming):\n"
            "        found = super().evict(incoming)\n"
            "        return found if found < 4 else 99999\n",
            "Mine evicts block 99999, which is no evictable block; .*; mend your class",
        ),
    ],
)
def test_a_users_policy_is_held_to_its_contract(
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    message: str,
) -> None:
    tmp_path = trace.parent
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(
        f"from cache.v1.policies import KeyedPolicy\n{body}"
    )
    path = write(tmp_path, config(trace, evictor="mine.py:Mine"))
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert line.startswith("kvsim: engine.evictor")
    assert re.search(message, line)


def test_a_users_policy_decides(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from cache.v1.policies import KeyedPolicy\n"
        "class Newest(KeyedPolicy):\n"
        "    def __init__(self, num_blocks, keep=0):\n"
        "        super().__init__()\n"
        "        self.most, self.keep = num_blocks, keep\n"
        "    def key(self, block):\n"
        "        assert self.most == 40\n"
        "        return block.depth < self.keep, -block.released_at\n"
    )
    path = write(tmp_path, config(trace, evictor={"kind": "mine.py:Newest", "keep": 2}))
    results = Simulation(load_config(path)).run(check_every=1)
    assert results.summary["prefix_cache_hits"] > 0
    assert (
        results.summary["prefix_cache_hits"] != run(trace).summary["prefix_cache_hits"]
    )
