"""Our router of Dynamo's kind beside the real one's replay, where that is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from heapq import heappop, heappush
from importlib.util import find_spec
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.engine.clock import Clock
from sim.fleet.routers.block_index import prompt_runs
from sim.fleet.routers.dynamo_kv import DynamoKv
from tests.sim.fleet.test_routers import prompt_hashes, request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sim.scheduler.request import Request

NUM_WORKERS, NUM_REQUESTS = 4, 1500
BLOCK_SIZE, HASHED_TOKENS = 64, 512
REPLAY = """
import json, sys
import dynamo._core as core

trace, report = sys.argv[1:]
engine = {
    "backend": "vllm",
    "timing_model": {"type": "fixed", "prefill_ms": 50.0, "decode_ms": 10.0},
    "num_gpu_blocks": 200000,
    "block_size": 64,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
}
core.run_mocker_trace_replay(
    [trace],
    extra_engine_args={"engine": engine},
    router_mode="kv_router",
    router_config=core.KvRouterConfig(),
    num_workers=4,
    trace_block_size=512,
    report_jsonl_path=report,
)
"""
DECISION = re.compile(
    r"worker_id=(\d+).*?logit=([\d.]+).*?effective_cached_blocks=([\d.]+)"
)


def trace(seed: int, gap_ms: float) -> list[dict[str, Any]]:
    """Return requests of which most begin with a part of an earlier one."""
    generator = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    time_ms = number = 0
    for _ in range(NUM_REQUESTS):
        time_ms += 1 + int(generator.exponential(gap_ms))
        ids: list[int] = []
        if rows and generator.random() < 0.6:
            earlier = rows[generator.integers(len(rows))]["hash_ids"]
            ids = earlier[: generator.integers(1, len(earlier) + 1)]
        own = int(generator.integers(1, 8))
        ids = [*ids, *range(number, number + own)]
        number += own
        rows.append(
            {
                "timestamp": time_ms,
                "input_length": len(ids) * 512 - int(generator.integers(512)),
                "output_length": int(generator.integers(2, 120)),
                "hash_ids": ids,
            }
        )
    return rows


class Caches:
    """Blocks that each worker has computed; none is ever evicted."""

    def __init__(self) -> None:
        self.held: list[set[int]] = [set() for _ in range(NUM_WORKERS)]

    def cached_blocks(self, asked: Request) -> list[int]:
        hashes = prompt_hashes(asked, BLOCK_SIZE)
        return [
            next((i for i, each in enumerate(hashes) if each not in own), len(hashes))
            for own in self.held
        ]


def replayed(directory: Path, rows: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """Return the decisions of the real router, and its report of the requests."""
    if find_spec("dynamo") is None:
        pytest.skip(
            "Dynamo is not installed: pip install --no-deps ai-dynamo-runtime==1.6.1"
        )
    given, report = directory / "trace.jsonl", directory / "report.jsonl"
    given.write_text("\n".join(map(json.dumps, rows)))
    told = subprocess.run(
        [sys.executable, "-c", REPLAY, str(given), str(report)],
        env=os.environ | {"DYN_LOG": "info"},
        capture_output=True,
        text=True,
        check=True,
    )
    log = re.sub(r"\x1b\[[0-9;]*m", "", told.stdout + told.stderr)
    served = [json.loads(line) for line in report.read_text().splitlines()]
    served.sort(key=lambda each: float(each["arrival_time_ms"]))
    return DECISION.findall(log), served


@pytest.mark.parametrize(("seed", "gap_ms"), [(2, 12.0), (4, 100.0)])
def test_costs_and_choices_are_those_of_the_real_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, gap_ms: float
) -> None:
    rows = trace(seed, gap_ms)
    decisions, served = replayed(tmp_path, rows)
    assert len(decisions) == len(served) == NUM_REQUESTS
    caches = Caches()
    router = DynamoKv(
        Clock(2.0),  # first tokens are at 1.0
        NUM_WORKERS,
        np.random.default_rng(0),
        BLOCK_SIZE,
        caches.cached_blocks,
    )
    later: list[tuple[float, int, int, str, Request, int]] = []
    for number, (row, end) in enumerate(zip(rows, served, strict=True)):
        while later and later[0][0] <= end["arrival_time_ms"]:
            *_, what, other, place = heappop(later)
            if what == "first":
                other.note_first_token(1.0)
                caches.held[place].update(prompt_hashes(other, BLOCK_SIZE))
            else:
                router.ended(other, place)
        lengths = [HASHED_TOKENS] * len(row["hash_ids"])
        lengths[-1] -= sum(lengths) - row["input_length"]
        asked = request(
            number, *((i + 1, n) for i, n in zip(row["hash_ids"], lengths, strict=True))
        )
        asked.first_token_s = nan
        overlaps = caches.cached_blocks(asked)
        costs = router.costs(asked, prompt_runs(asked, BLOCK_SIZE), overlaps)
        worker = int(decisions[number][0])
        assert overlaps[worker] == float(decisions[number][2])
        assert costs[worker] == pytest.approx(float(decisions[number][1]), abs=1e-6)
        assert costs[worker] == min(costs)
        monkeypatch.setattr(router, "_drawn", lambda _, place=worker: place)
        router.choose(asked)
        for what, key in (("first", "first_token_ms"), ("end", "last_token_ms")):
            order = what == "end"
            heappush(later, (end[key], order, number, what, asked, worker))
