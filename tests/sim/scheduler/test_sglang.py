"""Runs of the `sglang` generation: keys, pools, effects of its rules on traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import load_config, parse_config
from sim.errors import ConfigError, SchedulerError, UserError
from sim.hardware.capacity import estimate_capacity
from sim.hardware.gpus import load_gpu
from sim.results import schema
from sim.results.folder import RunFolder
from sim.results.recording.usage import mean_between
from sim.scheduler.sglang.clocked import ClockedSglangScheduler
from sim.scheduler.sglang.requests import ScheduleBatch, SglangOutput
from sim.scheduler.sglang.settings import Disaggregation, Settings
from sim.simulation.pools import pools_of, transfer_settings
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.studies.conformance import driver_of, first_difference
from sim.studies.conformance.conform import Comparison, Coverage
from sim.studies.conformance.random_sglang import random_sglang_workload
from sim.studies.conformance.workload import DecisionWorkload, parse_workload
from sim.studies.planning.answer.configurations import serve_command
from sim.views.plots.run.memory import kv_cache_usage
from sim.views.plots.run.tables import Tables
from tests.shared import ROOT, shared
from tests.sim.commands import refused
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    from pathlib import Path


def data_of(workload: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    data = minimal(
        scheduler="sglang", **{"max_total_tokens": 640, "page_size": 16} | engine
    )
    data["workload"]["synthetic"] |= {
        "num_requests": 60,
        "arrivals": {"kind": "poisson", "rate": 60.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 120},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    data["workload"] |= {"max_tokens": 60} | (workload or {})
    data["cost"] = {"kind": "roofline"}
    return data


def ran(data: dict[str, Any]) -> Any:
    return Simulation(parse_config(data)).run(check_every=1)


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"disable_overlap_schedule": True},
        {"disable_radix_cache": True},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 64},
        {"schedule_policy": "lpm"},
        {"schedule_policy": "dfs-weight"},
        {"enable_priority_scheduling": True, "max_running_requests": 6},
        {"page_size": 1, "engine_version": "0.5.10", "radix_eviction_policy": "slru"},
        {"chunked_prefill_size": -1},
        {"engine_version": "0.5.19", "max_total_tokens": 320},
        {"engine_version": "0.5.20", "max_total_tokens": 320},
        {"engine_version": "0.5.21", "max_total_tokens": 320, "page_size": 1},
        *(
            {"engine_version": "0.5.23", "max_total_tokens": 320} | engine
            for engine in (
                {},
                {"disable_overlap_schedule": True, "schedule_policy": "lpm"},
                {"disable_radix_cache": True, "page_size": 1},
                {"enable_mixed_chunk": True, "chunked_prefill_size": 64},
                {"enable_priority_scheduling": True, "max_running_requests": 6},
                {"page_size": 1, "radix_eviction_policy": "slru"},
                {"chunked_prefill_size": -1, "schedule_policy": "dfs-weight"},
            )
        ),
    ],
)
def test_under_pressure_all_are_served(engine: dict[str, Any]) -> None:
    engine = {"schedule_conservativeness": 0.01} | engine
    priority = {0: 0.5, 20: 0.5}
    results = ran(data_of({"priority": priority}, **engine))
    requests, summary = results.requests, results.summary
    lost = summary.get("num_lost_requests", 0)
    assert (requests["status"] == "finished_stopped").sum() == 60 - lost
    assert summary["num_preemptions"] == len(results.preemptions)
    assert summary["num_preemptions"] > 0
    assert summary["kv_cache_usage_max"] <= 1.0


def drawn(seed: int) -> dict[str, Any]:
    """Return a small random run: all that its clock of decodes knows of."""
    rng = Random(seed)
    page_size = rng.choice([1, 1, 4, 16])
    num_pages = rng.choice([300, 640, 1200, 4000, 20_000]) // page_size
    data = data_of(
        page_size=page_size,
        max_total_tokens=num_pages * page_size,
        schedule_conservativeness=rng.choice([0.01, 0.3, 1.0]),
        disable_overlap_schedule=rng.random() < 0.5,
        disable_radix_cache=rng.random() < 0.4,
        schedule_policy=rng.choice(["fcfs", "fcfs", "lpm", "dfs-weight", "lof"]),
        chunked_prefill_size=rng.choice([-1, 4 * page_size, 64, 8192]),
        max_running_requests=rng.choice([3, 8, 64]),
        radix_eviction_policy=rng.choice(["lru", "lfu", "fifo", "mru"]),
        engine_version=rng.choice(["0.5.9", "0.5.12", "0.5.10"]),
    )
    if seed % 4 == 3:
        data["engine"]["engine_version"] = f"0.5.{20 + seed // 4 % 4}"
    synthetic = data["workload"]["synthetic"]
    synthetic["num_requests"] = rng.choice([20, 60])
    synthetic["arrivals"]["rate"] = rng.choice([2.0, 20.0, 60.0, 300.0])
    if rng.random() < 0.5:
        synthetic["prompt_tokens"] = {"kind": "uniform", "low": 1, "high": 40}
    if rng.random() < 0.5:
        synthetic["output_tokens"] = {"kind": "uniform", "low": 1, "high": 12}
    data["workload"]["output_end"] = rng.choice(["stop", "length"])
    costs: list[dict[str, Any]] = [
        {"kind": "roofline"},
        {"kind": "constant", "step_s": 1},
    ]
    data["cost"] = rng.choice(costs)
    return data | {"seed": seed}


def crowded(seed: int, release: str) -> dict[str, Any]:
    """Return a run whose pool is too small, for clients that are impatient or not."""
    data = drawn(seed)
    size, workload = data["engine"]["page_size"], data["workload"]
    data["engine"] |= {
        "engine_version": release,
        "max_total_tokens": (320, 480, 800)[seed % 3] // size * size,
        "schedule_conservativeness": 0.01,
    }
    workload["output_end"] = ("stop", {"stop": 0.5, "length": 0.5}, "length")[seed % 3]
    if seed % 2:
        workload["client"] = {"timeout_s": (1.5, 0.3, 5.0)[seed % 3]}
    workload["synthetic"] |= {
        "num_requests": 60,
        "arrivals": {"kind": "poisson", "rate": 300.0},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 30},
    }
    return data


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([drawn(seed) for seed in range(12)], id="drawn"),
        # 319: some end with the outputs of before a retraction, which sorts the others
        pytest.param([crowded(seed, "0.5.12") for seed in (14, 41, 319)], id="before"),
        pytest.param([crowded(seed, "0.5.23") for seed in (13, 88, 91)], id="0.5.23"),
        *(
            pytest.param(
                [
                    *(drawn(seed) for seed in range(first, first + 97)),
                    *(crowded(seed, "0.5.12") for seed in range(first, first + 40)),
                    *(crowded(seed, "0.5.23") for seed in range(first, first + 40)),
                ],
                id=f"{first}-",
                marks=pytest.mark.slow,
            )
            for first in range(12, 400, 97)
        ),
    ],
)
def test_decodes_on_the_clock_are_those_looked_at_one_by_one(
    runs: list[dict[str, Any]],
) -> None:
    for seed, data in enumerate(runs):
        config = parse_config(data)
        every_steps = 1 if seed % 3 == 0 else 0
        fast, stepwise = (
            Simulation(config, stepwise=is_stepwise) for is_stepwise in (False, True)
        )
        assert (fast.path, stepwise.path) == ("fast", "stepwise")
        found = fast.run(check_every=every_steps)
        expected = stepwise.run(check_every=every_steps)
        for name in ("requests", "steps", "preemptions"):
            pd.testing.assert_frame_equal(
                getattr(found, name),
                getattr(expected, name),
                check_exact=True,
                obj=f"{name} of run {seed}",
            )
        assert found.recording.tree_table.arrow.equals(
            expected.recording.tree_table.arrow
        ), f"tree of run {seed}"
        own = {"path", "path_reason"}
        assert {
            key: value for key, value in found.summary.items() if key not in own
        } == {key: value for key, value in expected.summary.items() if key not in own}


def test_withdrawn_requests_leave_the_clock_as_they_leave_batches() -> None:
    for seed in (0, 1, 25, 34, 40, 136):  # from 25 on nothing is left for a while
        data = drawn(seed)
        data["workload"]["client"] = {"timeout_s": (1.5, 0.3, 5.0)[seed % 3]}
        config = parse_config(data)
        found, expected = (
            Simulation(config, stepwise=is_stepwise).run(check_every=1)
            for is_stepwise in (False, True)
        )
        for name in ("requests", "steps"):
            pd.testing.assert_frame_equal(
                getattr(found, name), getattr(expected, name), check_exact=True
            )
        # a token that ends a withdrawn request is lost with it, and not wasted
        wasted = [each.summary.get("num_wasted_tokens") for each in (found, expected)]
        assert wasted[0] == wasted[1], seed


def test_the_tree_is_told_beside_the_common_columns(tmp_path: Path) -> None:
    """Tokens of the tree are those that prompts share; the ratio rises and falls."""
    results = ran(data_of(schedule_conservativeness=0.01))
    results.write(tmp_path)
    rows = RunFolder(tmp_path).tree_table
    assert rows is not None
    assert dict(rows.kinds) == schema.PREFIX_TREE
    held = rows["num_evictable_tokens"] + rows["num_protected_tokens"]
    assert held.max() <= 640
    assert (rows["num_tree_nodes"] > 0).tolist() == (held > 0).tolist()
    assert (held % 16 == 0).all()
    ratio = rows["new_token_ratio"]
    assert len(results.preemptions) > 0
    assert ratio.min() < ratio[0] < ratio.max() <= 1.0  # a retraction raises it
    without = ran(data_of(disable_radix_cache=True)).recording.tree_table
    assert not without["num_tree_nodes"].any()
    assert simulate(parse_config(minimal())).recording.tree_table is None


def test_evictable_prefixes_are_drawn_above_what_is_used() -> None:
    results = simulate(parse_config(data_of(max_total_tokens=1600)))
    tables = Tables.of(results)
    edges_s = np.array([0.0, tables.stop_s])
    (kept,) = mean_between(tables.tree, "num_evictable_tokens", edges_s)
    assert 0 < kept < 1600
    labels = kv_cache_usage(tables).axes[0].get_legend_handles_labels()[1]
    assert "with prefixes kept" in labels


def test_of_a_pool_that_holds_no_prompt_no_negative_length_is_told() -> None:
    settings = Settings(max_total_num_tokens=5, context_len=4)
    assert settings.admission_error(3) == (
        "context_len 4 and max_total_num_tokens 5 leave a prompt no token, got 3"
    )
    fits = replace(settings, max_total_num_tokens=50, context_len=40)
    assert "of 34 tokens is longer than 33, what" in (fits.admission_error(34) or "")


@pytest.mark.parametrize("release", ["0.5.9", "0.5.10"])
def test_a_request_is_stopped_two_tokens_before_the_pool_is_full(release: str) -> None:
    """The longest is ``min(context_len, pool) - 1``, and a token of it is kept."""
    data = data_of(engine_version=release)
    del data["workload"]["max_tokens"]
    data["workload"]["synthetic"] |= {
        "num_requests": 1,
        "prompt_tokens": {"kind": "uniform", "low": 500, "high": 500},
        "output_tokens": {"kind": "uniform", "low": 500, "high": 500},
    }
    (row,) = ran(data).requests.itertuples()
    assert row.status == "finished_length_capped"
    assert row.num_prompt_tokens + row.num_output_tokens == 640 - 2


def test_prefill_goes_first() -> None:
    """While prompts are there no request decodes, but in mixed batches."""
    steps = {
        is_mixed: ran(data_of(max_total_tokens=6400, enable_mixed_chunk=is_mixed)).steps
        for is_mixed in (False, True)
    }
    for is_mixed, table in steps.items():
        both = (table["num_prefill_tokens"] > 0) & (table["num_decodes"] > 0)
        assert both.any() == is_mixed


def test_its_own_names_are_the_common_ones() -> None:
    own = data_of(
        max_running_requests=7,
        context_length=500,
        chunked_prefill_size=64,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
    )
    common = data_of(
        max_num_seqs=7,
        max_model_len=500,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    del common["engine"]["max_total_tokens"], common["engine"]["page_size"]
    common["engine"] |= {"num_gpu_blocks_override": 40, "block_size": 16}
    first, second = (parse_config(data) for data in (own, common))
    assert first == second
    assert simulate(first).requests.equals(simulate(second).requests)


def test_a_pool_of_other_pages_has_the_tokens_of_all() -> None:
    own: list[dict[str, Any]] = [
        {},
        {"page_size": 64},
        {"block_size": 32},
        {"page_size": 64, "max_total_tokens": 320},
        {"page_size": 64, "num_gpu_blocks_override": 40},
    ]
    pools = [
        {"name": str(i), "replicas": 1, "engine": each} for i, each in enumerate(own)
    ]
    config = parse_config(data_of() | {"fleet": {"pools": pools}})
    for each in (config, parse_config(config.to_data())):
        assert [engine.num_gpu_blocks_override for engine in each.engines()] == [
            *(40, 10, 20, 5, 40)
        ]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"page_size": 16, "block_size": 16},
            "page_size: SGLang's name for block_size",
        ),
        (
            {"max_total_tokens": 16},
            "max_total_tokens: must be a whole number of tokens",
        ),
        (
            {"max_total_tokens": 640, "num_gpu_blocks_override": 40},
            "max_total_tokens: SGLang's name for num_gpu_blocks_override, in tokens",
        ),
        ({"watermark": 0.1}, "watermark: the sglang generation has no such key"),
        ({"pipeline_parallel_size": 2}, "pipelines are built for v1 only, got 2"),
        (
            {"engine_version": "0.5.18"},
            "covers SGLang 0.5.9 to 0.5.12 and 0.5.19 to 0.5.23, got '0.5.18'",
        ),
        (
            {"schedule_policy": "hrrn", "engine_version": "0.5.23"},
            "hrrn, which SGLang 0.5.23 has, is not built; take one of fcfs, lpm, ",
        ),
        ({"radix_eviction_policy": "lfru"}, "radix_eviction_policy must be one of lru"),
        (
            {"enable_priority_scheduling": True, "schedule_policy": "lpm"},
            "schedule_policy must be one of fcfs, lof with enable_priority_scheduling",
        ),
        (
            {"chunked_prefill_size": 4096, "enable_chunked_prefill": False},
            "max_num_batched_tokens: without chunks SGLang has no such size",
        ),
        (
            {"chunked_prefill_size": -1, "max_num_batched_tokens": 4096},
            "chunked_prefill_size: SGLang's name for max_num_batched_tokens",
        ),
        ({"model": "openai/gpt-oss-120b"}, "full attention in all layers for SGLang"),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
            "drafts",
        ),
    ],
)
def test_mistakes_are_answered_in_a_line(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        Simulation(parse_config(data_of(**engine)))


def test_capacity_is_told_in_its_own_terms(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["capacity", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100_sxm"]
    assert kvsim([*words, "--engine", "sglang"]) == 0
    told = capsys.readouterr().out
    # 81,559 MiB less 1.2 GiB, of which 16.5 % stay free, less the weights
    assert "max_total_num_tokens: 413,817, max_running_requests: 2,048" in told
    assert "0.165 of the rest (1 - mem_fraction_static, the release's default)" in told
    assert "num_cpu_blocks" not in told
    assert kvsim([*words, "--engine-version", "0.5.9", "--quiet"]) == 0
    assert capsys.readouterr().out == "413817\n"
    for release in ("0.5.10", "0.5.23"):  # which make graphs of prompts, too
        assert kvsim([*words, "--engine-version", release, "--quiet"]) == 0
        assert capsys.readouterr().out == "410604\n"
    given = ["--num-gpu-blocks-override", "4096", "--quiet"]
    assert kvsim([*words, "--engine-version", "0.5.23", *given]) == 0
    assert capsys.readouterr().out == "4096\n"
    assert kvsim([*words, "--engine", "sglang", "--engine-version", "0.33"]) == 2
    assert (
        "must be 0.5.9 to 0.5.12, or 0.5.19 to 0.5.23, with --engine sglang"
        in capsys.readouterr().err
    )


def test_a_request_ends_a_step_earlier_where_plans_are_made() -> None:
    """With overlap its last step is the one that its limit ends it with."""
    data = data_of(engine_version="0.5.23", max_total_tokens=1 << 16)
    data["workload"]["synthetic"]["num_requests"] = 1
    data["workload"]["output_end"] = "length"
    before = data | {"engine": data["engine"] | {"engine_version": "0.5.10"}}
    later, earlier = ran(data), ran(before)
    ends, waste = (each.steps["output_s"].iloc[-1] for each in (later, earlier))
    assert ends == later.requests["finish_s"].iloc[0] < waste


def test_prefill_and_decode_apart_are_of_releases_that_are_known() -> None:
    known = r"apart are SGLang 0\.5\.9, 0\.5\.10 or 0\.5\.19 to 0\.5\.23, got engine_"
    with pytest.raises(SchedulerError, match=known):
        Settings(engine_version="0.5.12", kv_transfer=Disaggregation("decode"))


def test_the_command_that_serves_it_has_its_own_options() -> None:
    def command(**engine: Any) -> str:
        run = Simulation(parse_config(data_of(**engine)))
        return serve_command(run.config.engine, run.capacity)

    begin = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B"
    limits = "--context-length 640 --max-running-requests 320"
    assert command() == (
        f"{begin} --tp-size 1 --page-size 16 "
        f"--max-total-tokens 640 {limits} --chunked-prefill-size 8192"
    )
    assert command(
        page_size=1,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        enable_mixed_chunk=True,
        disable_cuda_graph=True,
        chunked_prefill_size=64,
        mem_fraction_static=0.93,
    ) == (
        f"{begin} --tp-size 1 --mem-fraction-static 0.93 --max-total-tokens 640 "
        f"{limits} --chunked-prefill-size 64 --enable-mixed-chunk "
        f"--disable-overlap-schedule --disable-radix-cache --disable-cuda-graph"
    )
    fleet = {
        "pools": [
            {"name": "p", "role": "prefill", "replicas": 1},
            {"name": "d", "role": "decode", "replicas": 1},
        ],
        "links": {"bytes_per_s": 5e10},
        "connector": {"num_reserved_decode_tokens": 64},
    }
    prefill, decode = (
        serve_command(each.engine, each.capacity, transfer_settings(each))
        for each in pools_of(parse_config(data_of() | {"fleet": fleet}))
    )
    assert prefill.endswith("--disaggregation-mode prefill")
    assert decode.endswith(
        "--disaggregation-mode decode --num-reserved-decode-tokens 64"
    )
    whole = command(chunked_prefill_size=-1, schedule_policy="lpm")
    assert whole.endswith("--chunked-prefill-size -1 --schedule-policy lpm")


def test_other_generations_do_not_know_its_keys() -> None:
    with pytest.raises(ConfigError, match=r"schedule_policy.*sglang has it"):
        parse_config(minimal(schedule_policy="lpm"))


@pytest.mark.parametrize(
    ("mib", "ranks", "fraction"),
    [
        (15_360, 1, 0.757),
        (15_360, 8, 0.699),
        (24_564, 1, 0.847),
        (40_960, 8, 0.805),
        (46_068, 1, 0.851),
        (81_559, 1, 0.835),
        (81_559, 8, 0.818),
        (143_771, 1, 0.907),
        (143_771, 8, 0.897),
        (183_359, 1, 0.857),
        (196_592, 8, 0.862),
    ],
)
def test_the_share_of_memory_is_that_of_the_card(
    mib: int, ranks: int, fraction: float
) -> None:
    gpu = replace(load_gpu("h100_sxm"), name="own", memory_bytes=mib * 2**20)
    found = estimate_capacity(
        "meta-llama/Llama-3.1-8B",
        gpu,
        tensor_parallel_size=ranks,
        engine_version="0.5.9",
        num_gpu_blocks_override=64,
    )
    assert found.gpu_memory_utilization == fraction


def test_pages_of_a_small_card() -> None:
    config = parse_config(minimal(scheduler="sglang", gpu="rtx_4090", page_size=16))
    engine = config.engine
    (pool,) = pools_of(config)
    assert (pool.capacity.max_num_batched_tokens, engine.block_size) == (2048, 16)
    assert engine.max_num_batched_tokens is None  # that of the card
    assert engine.gpu_memory_utilization is None
    assert engine.schedules_ahead


def test_pools_of_a_fleet_have_their_own_cards_and_names() -> None:
    """Chunks were those of the first card, and names were said to be given twice."""

    def pools(own: dict[str, Any], **shared: Any) -> list[Any]:
        engine = {"scheduler": "sglang", "gpu": "h100_sxm", "tp_size": 1} | shared
        first, second = ({"name": name, "replicas": 1} for name in "ab")
        fleet = {"pools": [first, second | {"engine": own}]}
        config = parse_config(minimal(**engine) | {"fleet": fleet})
        assert parse_config(config.to_data()) == config
        return pools_of(config)

    both = pools({"gpu": "rtx_4090"})
    assert [each.capacity.max_num_batched_tokens for each in both] == [8192, 2048]
    _, own = pools(
        {
            "page_size": 16,
            "chunked_prefill_size": 512,
            "max_total_tokens": 6400,
            "disable_radix_cache": True,
            "disable_cuda_graph": True,
        },
        chunked_prefill_size=-1,
    )
    engine = own.engine
    assert (engine.block_size, engine.num_gpu_blocks_override) == (16, 400)
    assert own.capacity.max_num_batched_tokens == 512
    assert engine.enforce_eager
    assert not engine.prefix_caching
    _, whole = pools({"chunked_prefill_size": -1, "max_prefill_tokens": 4096})
    assert whole.capacity.max_num_batched_tokens == 4096
    assert whole.capacity.gpu_memory_utilization == 0.874
    with pytest.raises(
        ConfigError, match=r"pools\.1\.engine\.page_size: SGLang's name"
    ):
        pools({"page_size": 16, "block_size": 16})


WORKLOAD = {
    "schema": 1,
    "reference": "sglang 0.5.9",
    "config": {"max_total_num_tokens": 64, "schedule_conservativeness": 0.02},
    "requests": [
        {
            "id": f"r{i}",
            "arrival_step": i,
            "prompt": [[7, 8], [i, 4]],
            "output_len": 30,
            "out_seed": 50 + i,
        }
        for i in range(4)
    ],
}


def lines_of(**config: Any) -> list[dict[str, Any]]:
    data = WORKLOAD | {"config": WORKLOAD["config"] | config}
    workload = DecisionWorkload.model_validate(data)
    return list(driver_of(workload, check=True).lines())


def test_a_small_log_by_hand() -> None:
    lines = lines_of()
    assert lines[0]["batch"] == [["r0", 12, 0, 0]]
    assert lines[0]["kv"] == {"r0": [0, [*range(1, 13)]]}
    # the second finds the first eight tokens, which the first has shared by then
    assert lines[1]["batch"] == [["r1", 4, 8, 1]]
    assert lines[1]["kv"]["r1"][1] == [*range(1, 9), 13, 14, 15, 16]
    assert (lines[1]["nodes"], lines[1]["free"]) == (2, [48, 0, 12])
    retracted = [line["retract"] for line in lines if "retract" in line]
    assert retracted
    ended = [name for line in lines for name in line.get("fin", ())]
    assert sorted(ended) == ["r0", "r1", "r2", "r3"]


def test_overlap_processes_a_result_a_step_later() -> None:
    plain, ahead = (
        lines_of(max_total_num_tokens=640),
        lines_of(max_total_num_tokens=640, overlap=True),
    )
    first = next(line["t"] for line in plain if "fin" in line)
    later = next(line["t"] for line in ahead if "fin" in line)
    assert later == first + 1
    assert first_difference(plain[:first], ahead[:first]) is not None


def decided(config: dict[str, Any], requests: list[dict[str, Any]]) -> list[Any]:
    """Return the lines of a decision workload of a few requests."""
    raw = {
        "schema": 1,
        "reference": "sglang 0.5.9",
        "config": config,
        "requests": [
            {"id": f"r{at}", "arrival_step": 0, "out_seed": at, **request}
            for at, request in enumerate(requests)
        ],
    }
    return list(driver_of(parse_workload(json.dumps(raw), "here"), check=True).lines())


def test_whole_prompts_are_not_mixed_with_decodes() -> None:
    config = {"enable_mixed_chunk": True, "max_prefill_tokens": 16}
    requests = [{"prompt": [[at, 12]], "output_len": 4} for at in (1, 2)]
    for chunk, mode in ((64, "mixed"), (-1, "extend")):
        lines = decided(config | {"chunked_prefill_size": chunk}, requests)
        assert [line["mode"] for line in lines[:2]] == ["extend", mode]


def test_a_prompt_that_leaves_no_room_to_write_never_decodes() -> None:
    config = {"context_len": 28, "overlap": True}
    lines = decided(config, [{"prompt": [[1, 26]], "output_len": 1}])
    assert [line["mode"] for line in lines] == ["extend", "idle"]
    assert lines[1]["fin"] == ["r0"]


def test_one_that_writes_nothing_holds_its_row_and_the_next_finds_none() -> None:
    config = {"context_len": 28, "overlap": True, "max_running_requests": 1}
    config |= {"max_prefill_tokens": 1}
    requests = [{"prompt": [[at, 26]], "output_len": 1} for at in (1, 2)]
    *_, last = decided(config, requests)
    assert last["error"].startswith("alloc_req_slots runs out of memory")


def test_a_model_without_room_is_said_in_its_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["capacity", "--model", "zai-org/GLM-5", "--gpu", "b200_sxm", "--engine"]
    words += ["sglang", "--tensor-parallel-size", "8"]
    said = refused(words, capsys, tmp_path)
    assert "no room for a KV cache: zai-org/GLM-5 on b200_sxm leaves -" in said
    assert said.endswith("or a larger mem_fraction_static")


def test_who_was_turned_away_is_not_withdrawn() -> None:
    config = {"max_queued_requests": 1}
    requests = [{"prompt": [[at, 4]], "output_len": 1} for at in (1, 2)]
    requests[1]["abort_step"] = 0
    first, *_ = decided(config, requests)
    assert first["reject"] == ["r1"]
    assert "abort" not in first


def test_the_token_that_a_withdrawn_request_ends_with_counts() -> None:
    """The rest of its output is set aside for as long as it stands in the batch."""
    config = {"max_total_num_tokens": 40, "page_size": 4, "max_running_requests": 4}
    config |= {"context_len": 34, "chunked_prefill_size": 4, "overlap": True}
    config |= {"schedule_conservativeness": 0.3, "disable_radix_cache": True}
    config |= {"enable_priority_scheduling": True}
    requests = [
        {"prompt": [[2, 1]], "output_len": 30, "ignore_eos": True, "abort_step": 6},
        {"prompt": [[2, 1]], "output_len": 31},
    ]
    lines = decided(config, requests)
    assert lines[7]["batch"] == [["r1", 1, 0, 1]]
    assert "full" not in lines[7]  # 24 tokens x 0.208 beside 35 of 40


def test_a_prompt_that_is_cut_for_good_decodes_behind_its_prompt() -> None:
    config = {"max_total_num_tokens": 244, "page_size": 4, "context_len": 220}
    config |= {"max_running_requests": 16, "chunked_prefill_size": 12}
    config |= {"enable_mixed_chunk": True, "schedule_conservativeness": 0.0}
    config |= {"disable_radix_cache": True, "max_prefill_tokens": 16}
    requests = [
        {"prompt": [[933, 1]], "output_len": 2},
        {"prompt": [[1, 1]], "output_len": 2},
        {"prompt": [[305, 9]], "output_len": 2},
        {"prompt": [[834, 3]], "output_len": 1, "ignore_eos": True},
    ]
    lines = decided(config, requests)
    assert lines[1]["batch"][:2] == [["r2", 8, 0, 2], ["r3", 2, 0, 3]]
    assert lines[2]["batch"] == [["r3", 1, 2, 3], ["r2", 1, 9, 2]]


def test_random_workloads_reach_its_rules() -> None:
    reached = Coverage()
    for seed in range(40):
        workload = random_sglang_workload(seed, "0.5.9")
        ours = list(driver_of(workload, check=True).lines())
        reached.add(workload, Comparison(None, ours))
    assert reached.num_preemptions > 5
    for name in ("overlap", "pages", "evictions", "retractions", "chunks", "aborts"):
        assert reached.workloads_with[name], name


def test_outputs_say_how_many_tokens_of_each_they_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    take = SglangOutput.take

    def taking(output: SglangOutput, batch: ScheduleBatch) -> None:
        take(output, batch)
        assert len(output.num_scheduled_tokens) == len(output.scheduled)
        shape = output.shape
        if len(output.scheduled) == len(batch.entries):  # none has ended meanwhile
            num_tokens = shape.num_decodes + shape.num_prefill_tokens
            assert sum(output.num_scheduled_tokens) == num_tokens
        seen.extend(output.num_scheduled_tokens)

    monkeypatch.setattr(SglangOutput, "take", taking)
    for seed in range(5):
        list(driver_of(random_sglang_workload(seed, "0.5.9")).lines())
    assert len(set(seen)) > 5


def test_batches_of_decodes_have_no_prompts_in_their_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest: set[tuple[int, ...]] = set()
    form = ClockedSglangScheduler.form

    def forming(scheduler: ClockedSglangScheduler, now_s: float) -> tuple[int, ...]:
        shape = form(scheduler, now_s)
        if shape[0] and not shape[2]:
            rest.add(shape[2:])
        return shape

    monkeypatch.setattr(ClockedSglangScheduler, "form", forming)
    assert Simulation(parse_config(data_of())).run().summary["path"] == "fast"
    assert rest == {(0, 0, 0, 0)}


def test_conform_says_that_there_is_no_sglang(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(["conform", "--engine", "sglang"], capsys, tmp_path)
    assert "'make hosted SGLANG=0.5.9'" in said
    said = refused(["conform", "--engine", "sglang", "--offload"], capsys, tmp_path)
    assert "leave other options out" in said


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "lof"])
@pytest.mark.parametrize("trace", ["azure", "mooncake"])
def test_whole_traces_end_with_every_policy(trace: str, policy: str) -> None:
    name, rate_scale, num_tokens, num_requests = {
        "azure": ("azure_llm_2023_conv.csv", 2.0, 40_000, 19_366),
        "mooncake": ("mooncake_fast25_conversation.jsonl", 0.4, 200_000, 12_031),
    }[trace]
    data = minimal(
        scheduler="sglang",
        gpu="h200_sxm",
        max_total_tokens=num_tokens,
        schedule_conservativeness=0.01,
        schedule_policy=policy,
    )
    data["workload"] = {
        "trace": {
            "kind": trace,
            "path": str(shared(f"traces/{name}")),
            "rate_scale": rate_scale,
        },
        "output_end": "length",
    }
    data["cost"] = {"kind": "roofline"}
    summary = Simulation(parse_config(data)).run(check_every=500).summary
    assert summary["completed"] == num_requests
    assert summary["num_preemptions"] > 2


def test_it_dies_in_the_words_of_the_release() -> None:
    """Of single slots it does not say for which kind of a batch there are none."""
    workload = random_sglang_workload(2568, "0.5.9")
    *_, last = driver_of(workload).lines()
    assert last["error"] == "Out of memory. Try to lower your batch size."


def test_each_request_knows_the_prefix_that_was_found() -> None:
    few = ["workload.sessions.num_sessions=12", "engine.scheduler=sglang"]
    config = load_config(ROOT / "examples/chat_sessions.yaml", few)
    results = simulate(config)
    assert results.summary["num_preemptions"] == 0
    found = results.recording.request_table["num_cached_tokens"].sum()
    assert found == results.summary["prefix_cache_hits"] > 100_000
