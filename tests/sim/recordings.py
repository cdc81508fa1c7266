"""Runs on both paths, and their files read back, for tests of ``--record``."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest

from sim.config.tables import RunConfig, parse_config
from sim.errors import UserError
from sim.simulation.extras import RECORDS, recording
from sim.simulation.run import Simulation
from tests.identity.random_configs import LISTED_TRACE, draw_case
from tests.shared import shared

if TYPE_CHECKING:
    from sim.hardware.capacity import CapacityEstimate
    from sim.results.run import Results


RANDOM_RUNS = pytest.mark.parametrize(
    "seeds",
    [range(12), pytest.param(range(12, 48), marks=pytest.mark.slow)],
    ids=str,
)


class Recorded(NamedTuple):
    """A run and its records; no results where the run was refused."""

    path: str
    capacity: CapacityEstimate
    results: Results | None
    schedule: bytes
    blocks: bytes


def record(config: RunConfig, *, stepwise: bool = False) -> Recorded:
    """Run with all records."""
    simulation = Simulation(config, stepwise=stepwise)
    facts = simulation.path, simulation.capacity
    with TemporaryDirectory() as name:
        directory = Path(name)
        try:
            with recording(simulation, RECORDS, directory):
                results = simulation.run()
        except UserError:
            return Recorded(*facts, None, b"", b"")
        files = [
            (directory / file).read_bytes()
            for file in ("schedule.jsonl.zst", "blocks.json")
        ]
    return Recorded(*facts, results, *files)


def both_paths(config: RunConfig) -> tuple[Recorded, Recorded]:
    """Run on the path that the configuration leads to, and stepwise."""
    return record(config), record(config, stepwise=True)


@cache
def random_runs(seed: int) -> tuple[Recorded, Recorded]:
    """Both runs of a small random configuration, kept for further tests."""
    return both_paths(draw_case(seed).config)


@cache
def traffic(trace: str) -> tuple[Recorded, Recorded]:
    """Both runs of recorded traffic under memory pressure."""
    if trace == "azure":
        return both_paths(
            azure(
                300,
                enable_prefix_caching=False,
                num_gpu_blocks_override=1200,
                async_scheduling=False,
            )
        )
    return both_paths(
        mooncake(100, num_gpu_blocks_override=9000, async_scheduling=False)
    )


def lines_of(schedule: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and lines of a schedule."""
    stream = pa.CompressedInputStream(pa.BufferReader(schedule), "zstd")
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
    header, *lines = map(json.loads, text)
    return header, lines


def listed(requests: list[dict[str, Any]], **engine: Any) -> RunConfig:
    """Requests as `tests.identity.listed_trace` takes them, in steps of a second."""
    is_v1 = engine.get("scheduler", "v1") == "v1"
    one_by_one = {"async_scheduling": False} if is_v1 else {}
    return parse_config(
        {
            "workload": {"trace": {"kind": LISTED_TRACE, "requests": requests}},
            "engine": {
                "model": "meta-llama/Llama-3.1-8B",
                "gpu": "h200_sxm",
                "block_size": 4,
                "max_model_len": 64,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 8,
            }
            | one_by_one
            | engine,
            "cost": {"kind": "constant", "step_s": 1.0},
        }
    )


def azure(limit: int, **engine: Any) -> RunConfig:
    """The first requests of the Azure trace, three times as fast."""
    path = shared("traces/azure_llm_2023_conv.csv")
    trace = {"kind": "azure", "path": str(path), "limit": limit, "rate_scale": 3.0}
    return _traced(trace, engine)


def mooncake(limit: int, **engine: Any) -> RunConfig:
    """The first requests of the Mooncake trace, which share prefixes."""
    path = shared("traces/mooncake_fast25_conversation.jsonl")
    return _traced({"kind": "mooncake", "path": str(path), "limit": limit}, engine)


def _traced(trace: dict[str, Any], engine: dict[str, Any]) -> RunConfig:
    return parse_config(
        {
            "workload": {"trace": trace},
            "engine": {"model": "meta-llama/Llama-3.1-8B", "gpu": "h200_sxm"} | engine,
            "cost": {"kind": "roofline"},
        }
    )
