"""Our V1 scheduler beside the installed vLLM's own: `make test-hosted` (promise 2)."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pandas.testing import assert_frame_equal

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.errors import SchedulerError
from sim.scheduler.hosted.api import installed_version, nearest_release
from sim.simulation.run import Simulation
from sim.studies.conformance import driver_of, load_workload, write_log
from sim.studies.conformance.conform import compare
from sim.studies.conformance.driver import hosted_scheduler
from sim.studies.conformance.random_v1 import random_workload
from tests.shared import SHARED, shared

if TYPE_CHECKING:
    from pathlib import Path

    from sim.results.run import Results

NUM_WORKLOADS, WORKLOADS_A_TEST = 500, 50
GOLDEN = {
    "0.11": ["v1"],
    "0.32": ["v1_hybrid"],
    "0.33": ["v1_33", "v1_hybrid", "v1_async", "v1_spec", "v1_offload", "v1_pd"],
}
ENDING = ".workload.json"


def why_missing() -> str:
    """Return why no vLLM can be hosted here; empty if one can."""
    try:
        installed_version()
    except SchedulerError as error:
        return f"{error} (make test-hosted)"
    return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # vLLM's own are none of ours
    pytest.mark.skipif(bool(why_missing()), reason=why_missing()),
]


def minor() -> str:
    """The installed release as far as its rules go, such as ``0.33``."""
    return ".".join(installed_version().split(".")[:2])


def golden_names() -> list[str]:
    if why_missing():
        return []
    folder = SHARED / "conformance"
    paths = [
        path
        for name in GOLDEN.get(minor(), [])
        for path in sorted((folder / name).glob(f"*{ENDING}"))
    ]
    return [str(path.relative_to(folder)).removesuffix(ENDING) for path in paths]


@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_random_workloads_go_as_in_the_real_engine(first: int) -> None:
    release = nearest_release(installed_version())
    num_preempting = 0
    for seed in range(first, first + WORKLOADS_A_TEST):
        comparison = compare(random_workload(seed, release))
        assert comparison.difference is None, (
            f"seed {seed}: {comparison.difference.in_words(('vLLM', 'kvsim'))}"
        )
        num_preempting += comparison.num_preemptions > 0
    assert num_preempting >= WORKLOADS_A_TEST // 3


@pytest.mark.parametrize("name", golden_names())
def test_the_hosted_engine_writes_the_golden_logs(name: str, tmp_path: Path) -> None:
    """To the byte: line by line, in our own log form."""
    workload = load_workload(shared(f"conformance/{name}{ENDING}"))
    driver = driver_of(workload, check=True, make=hosted_scheduler)
    log = tmp_path / "hosted.jsonl.gz"
    write_log(driver.lines(), log)
    golden = shared(f"conformance/{name}.golden.jsonl.gz")
    assert gzip.decompress(log.read_bytes()) == gzip.decompress(golden.read_bytes())


def azure(scheduler: str) -> Results:
    trace = shared("traces/azure_llm_2023_conv.csv")
    config = {
        "workload": {"trace": {"kind": "azure", "path": str(trace), "limit": 2000}},
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "num_gpu_blocks_override": 1200,
            "enable_prefix_caching": True,
            "scheduler": scheduler,
            "engine_version": nearest_release(installed_version()),
        },
        "cost": {"kind": "roofline"},
        "seed": 0,
    }
    return Simulation(parse_config(config)).run(check_every=5000)


@pytest.mark.timeout(900)
def test_a_real_trace_takes_the_same_time() -> None:
    hosted, ours = azure("vllm"), azure("v1")
    assert hosted.summary["hosted_vllm"] == installed_version()
    assert hosted.summary["num_preemptions"] >= 20
    assert len(hosted.requests) == 2000
    assert_frame_equal(hosted.requests, ours.requests, check_exact=True)
    assert_frame_equal(hosted.steps, ours.steps, check_exact=True)


def test_a_schedule_is_recorded_as_ours_is(tmp_path: Path) -> None:
    """With prefix hits: conversations in a cache that is short of blocks."""
    read = {}
    for scheduler in ("vllm", "v1"):
        config = tmp_path / f"{scheduler}.yaml"
        config.write_text(json.dumps(sessions(scheduler)))
        out = tmp_path / scheduler
        command = ["run", str(config), "--out", str(out), "--record", "schedule"]
        assert kvsim([*command, "--quiet", "--no-figures"]) == 0
        text = pa.input_stream(str(out / "schedule.jsonl.zst"), compression="zstd")
        read[scheduler] = text.read().splitlines()[1:]
    assert read["vllm"] == read["v1"]
    lines = [json.loads(line) for line in read["v1"]]
    assert sum(len(line.get("preempt", ())) for line in lines) >= 10
    assert sum(any(line.get("cached", {}).values()) for line in lines) >= 10


@pytest.mark.parametrize(("ahead", "drafts"), [(True, 0), (False, 3), (True, 3)])
def test_steps_ahead_and_drafts_take_the_same_time(ahead: bool, drafts: int) -> None:
    if minor() != "0.33":
        pytest.skip("drafts are known of 0.33 only")
    hosted, ours = (
        in_a_small_cache(each, ahead=ahead, drafts=drafts) for each in ("vllm", "v1")
    )
    assert hosted.summary["num_preemptions"] >= 5
    assert_frame_equal(hosted.requests, ours.requests, check_exact=True)
    assert_frame_equal(hosted.steps, ours.steps, check_exact=True)
    for key in ("num_wasted_tokens", "spec_decode_acceptance_length"):
        assert hosted.summary.get(key) == ours.summary.get(key)


def in_a_small_cache(scheduler: str, *, ahead: bool, drafts: int) -> Results:
    engine: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "num_gpu_blocks_override": 80,
        "max_model_len": 600,
        "scheduler": scheduler,
        "engine_version": nearest_release(installed_version()),
        "async_scheduling": ahead,
    }
    if drafts:
        engine["speculative_config"] = {
            "method": "eagle3", "num_speculative_tokens": drafts,
        }  # fmt: skip
    synthetic = {
        "num_requests": 60,
        "arrivals": {"kind": "poisson", "rate": 20.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 300},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 200},
    }
    workload = {"synthetic": synthetic} | (
        {"acceptance": {"kind": "constant", "rate": 0.6}} if drafts else {}
    )
    config = {"workload": workload, "engine": engine, "cost": {"kind": "roofline"}}
    return Simulation(parse_config(config), stepwise=True).run(check_every=50)


def sessions(scheduler: str) -> dict[str, Any]:
    return {
        "workload": {
            "sessions": {
                "kind": "chat",
                "num_sessions": 40,
                "arrivals": {"kind": "burst", "burst_size": 40, "interval_s": 1.0},
                "turns": {"kind": "fixed", "number": 4},
                "first_prompt_tokens": {"kind": "fixed", "tokens": 700},
                "prompt_tokens": {"kind": "fixed", "tokens": 60},
                "output_tokens": {"kind": "uniform", "low": 50, "high": 300},
                "think_s": {"kind": "fixed", "value_s": 2.0},
                "prefixes": {
                    "kind": "system_prompts",
                    "num_groups": 3,
                    "tokens": {"kind": "fixed", "tokens": 200},
                },
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "num_gpu_blocks_override": 700,
            "scheduler": scheduler,
            "engine_version": nearest_release(installed_version()),
        },
        "cost": {"kind": "roofline"},
        "seed": 0,
    }
