"""The rules of `hf_fifo`, one by one, and what a run makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import load_config, parse_config
from sim.engine.sampling import sample
from sim.errors import ConfigError, SchedulerError
from sim.scheduler.hf_fifo import HF_FIFO
from sim.scheduler.request import RequestStatus
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.shared import ROOT, shared
from tests.sim.build import request_from_spec, spec
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path

    from sim.scheduler.hf_fifo.batch import HfFifoOutput
    from sim.scheduler.request import Request

LONGEST = 1000


class Engine:
    """A scheduler, stepped by hand and proven at every step."""

    def __init__(self, **changes: Any) -> None:
        arguments: dict[str, Any] = {
            "num_gpu_blocks": 10,
            "block_size": 4,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "max_model_len": LONGEST,
            "enable_prefix_caching": False,
            "safety_margin": 0.0,
        }
        self.scheduler = HF_FIFO.make(arguments | changes)
        self.num_added = self.num_steps = 0

    def add(self, num_prompt: int, num_output: int, **more: Any) -> Request:
        each = spec(self.num_added, 0.0, num_prompt, num_output, **more)
        request = request_from_spec(each, LONGEST)
        self.num_added += 1
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[tuple[int, int]]:
        """Take a step, and return its batch: request and tokens."""
        output = self.call()
        return [
            (request.request_id, num_tokens)
            for request, num_tokens in zip(
                output.scheduled, output.num_scheduled_tokens, strict=True
            )
        ]

    def call(self) -> HfFifoOutput:
        output = self.scheduler.schedule(float(self.num_steps))
        self.scheduler.check()
        finished = sample(output, self.num_steps, self.num_steps + 1.0)
        self.scheduler.update(finished)
        self.scheduler.check()
        self.num_steps += 1
        return output


# -- who is in the batch ----------------------------------------------------------


def test_decodes_come_first_then_prompts_in_midway_then_who_waits() -> None:
    engine = Engine(num_gpu_blocks=40, max_num_batched_tokens=10)
    engine.add(4, 9)
    engine.add(20, 9)
    assert engine.step() == [(0, 4), (1, 6)]
    engine.add(3, 9)
    assert engine.step() == [(0, 1), (1, 9)]
    assert engine.step() == [(0, 1), (1, 5), (2, 3)]
    assert engine.step() == [(0, 1), (1, 1), (2, 1)]


def test_a_batch_has_no_more_requests_than_its_budget() -> None:
    engine = Engine(num_gpu_blocks=40, max_num_seqs=2)
    for _ in range(3):
        engine.add(4, 3)
    assert engine.step() == [(0, 4), (1, 4)]
    assert engine.step() == [(0, 1), (1, 1)]
    assert engine.step() == [(0, 1), (1, 1)]
    assert engine.step() == [(2, 4)]


def test_without_sharing_a_batch_has_no_more_requests_than_blocks() -> None:
    assert Engine(num_gpu_blocks=5, max_num_seqs=99).scheduler._most_requests == 5
    shared = Engine(num_gpu_blocks=5, max_num_seqs=99, enable_prefix_caching=True)
    assert shared.scheduler._most_requests == 64  # the tokens of a batch


def test_a_smaller_request_overtakes_one_that_finds_no_block() -> None:
    engine = Engine(num_gpu_blocks=6)
    engine.add(8, 9)
    engine.add(16, 2)
    engine.add(5, 2)
    assert engine.step() == [(0, 8), (2, 5)]
    assert [request.request_id for request in engine.scheduler.waiting] == [1]


def test_short_of_free_blocks_prompts_are_taken_one_a_batch() -> None:
    engine = Engine(safety_margin=0.5)
    engine.add(14, 3)  # holds 4 of 10 blocks
    engine.add(10, 3)
    engine.add(4, 3)
    assert engine.step() == [(0, 14), (1, 10)]  # 6 are free, then 3
    assert engine.step() == [(0, 1), (1, 1)]
    assert engine.step() == [(0, 1), (1, 1)]
    assert engine.step() == [(2, 4)]


def test_the_block_table_lifts_the_budget_of_cached_tokens() -> None:
    """Five requests share their beginning, and soon read more than 80 slots hold."""
    batches = {}
    for most in (0, 5, 9):
        engine = Engine(
            num_gpu_blocks=20, enable_prefix_caching=True, max_blocks_per_request=most
        )
        for i in range(5):
            engine.add(14, 20, prompt=((500, 12), (600 + i, 2)))
            engine.step()
        batches[most] = [len(engine.step()) for _ in range(3)]
    # 18 + 17 + 16 + 15 + 14 cached tokens are 80; then four requests fill the budget.
    assert batches[0] == [5, 4, 4]
    # The first context reaches 20 tokens, five blocks, in the third step.
    assert batches[5] == [5, 5, 4]
    assert batches[9] == [5, 5, 5]


@pytest.mark.parametrize(("most", "num_requests"), [(0, 5), (9, 6)])
def test_a_batch_that_has_read_all_it_may_takes_nobody_else(
    most: int, num_requests: int
) -> None:
    engine = Engine(
        num_gpu_blocks=20, enable_prefix_caching=True, max_blocks_per_request=most
    )
    for i in range(5):
        engine.add(14, 20, prompt=((500, 12), (600 + i, 2)))
        engine.step()
    engine.add(3, 3)  # reads nothing, and comes too late: 80 cached tokens are read
    assert len(engine.step()) == num_requests


# -- evictions ----------------------------------------------------------------------


def test_the_newest_that_lack_a_block_are_evicted_beside_a_batch() -> None:
    engine = Engine(num_gpu_blocks=7)
    requests = [engine.add(5, 20) for _ in range(3)]
    for _ in range(4):
        assert len(engine.step()) == 3
    # One block is left of seven: the first takes it, and the third makes room for the
    # second, whose block it frees comes a step later.
    output = engine.call()
    assert [request.request_id for request in output.scheduled] == [0]
    assert [p.request.request_id for p in output.preemptions] == [2]
    assert output.preemptions[0].for_request is requests[1]
    assert engine.step() == [(0, 1), (1, 1)]
    assert [request.num_preemptions for request in requests] == [0, 0, 1]


def test_eviction_to_the_cpu_and_back() -> None:
    engine = Engine(num_gpu_blocks=4, num_cpu_blocks=2)
    first, second = engine.add(5, 5), engine.add(5, 9)
    for _ in range(4):
        engine.step()  # eight tokens are cached of each; the blocks are full
    output = engine.call()
    # Nobody could be scheduled: the walk was begun again after the eviction.
    (preemption,) = output.preemptions
    assert preemption.request is second
    assert preemption.for_request is first
    assert preemption.mode.value == "swap"
    assert (preemption.num_blocks_freed, preemption.num_blocks_moved) == (2, 2)
    assert preemption.kv_cache_usage_before == 1.0
    assert preemption.kv_cache_usage_after == 0.5
    assert output.blocks_to_swap_out == [(2, 0), (3, 1)]
    assert output.shape.num_swapped_out_blocks == 2
    assert [request.request_id for request in output.scheduled] == [0]
    assert engine.scheduler.cache_usage().cpu_cache_usage == 1.0
    assert second.num_computed_tokens == 8
    assert first.status is RequestStatus.FINISHED_STOPPED
    output = engine.call()
    assert output.blocks_to_swap_in == [(0, 3), (1, 0)]
    assert output.shape.num_swapped_in_blocks == 2
    assert output.num_scheduled_tokens == [1]
    assert output.num_recomputed_tokens == 0
    assert engine.scheduler.cache.cpu_pool.num_free_blocks == 2


def test_what_does_not_fit_the_pool_is_computed_again() -> None:
    engine = Engine(num_gpu_blocks=4, num_cpu_blocks=1)
    engine.add(5, 5), engine.add(5, 9)
    for _ in range(4):
        engine.step()
    output = engine.call()
    assert [p.mode.value for p in output.preemptions] == ["recompute"]
    assert output.preemptions[0].num_tokens_lost == 8
    assert output.blocks_to_swap_out == []
    output = engine.call()
    assert output.num_scheduled_tokens == [9]
    assert output.num_recomputed_tokens == 8


def test_recompute_can_be_forced_and_swap_cannot() -> None:
    engine = Engine(num_cpu_blocks=5, preemption_mode="recompute")
    assert engine.scheduler.cache.cpu_pool.num_blocks == 0
    with pytest.raises(SchedulerError, match="preemption_mode must be recompute"):
        Engine(preemption_mode="swap")


def test_nobody_is_admitted_from_an_eviction_to_the_next_end() -> None:
    engine = Engine(num_gpu_blocks=4, num_cpu_blocks=4)
    engine.add(5, 9), engine.add(5, 9)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.block_new_requests
    engine.add(1, 1)  # a block is free
    assert engine.scheduler.cache.num_free_blocks == 1
    while engine.scheduler.block_new_requests:
        assert engine.step() == [(0, 1)]
    assert engine.step() == [(1, 1), (2, 1)]


def test_the_last_active_request_is_never_evicted() -> None:
    """The release gives up all requests instead, and a log ends there."""
    engine = Engine(num_gpu_blocks=4, max_num_batched_tokens=8, num_cpu_blocks=9)
    too_long = engine.add(30, 1)
    assert engine.scheduler.admission_error(too_long) is not None
    assert engine.step() == [(0, 8)]
    output = engine.call()
    assert output.gives_up
    assert output.stuck
    assert not output.preemptions
    assert too_long.status is RequestStatus.RUNNING


def test_who_is_on_the_cpu_takes_turns_with_the_others() -> None:
    engine = Engine()
    requests = [engine.add(4, 2) for _ in range(5)]
    scheduler = engine.scheduler
    scheduler.waiting.clear()
    scheduler.waiting.extend(requests[:3])
    scheduler.swapped.extend(requests[3:])
    order = [request.request_id for request in scheduler._candidates()]
    assert order == [3, 0, 4, 1, 2]


def test_withdrawing_the_last_active_request_blocks_the_queue_for_good() -> None:
    """As in the release: only a request that finishes lets others in again."""
    engine = Engine(num_gpu_blocks=4)
    first, second = engine.add(5, 9), engine.add(5, 9)
    for _ in range(5):
        engine.step()
    engine.scheduler.abort(first)
    engine.add(1, 1)
    output = engine.call()
    assert output.stuck
    assert not output.scheduled
    assert second.status is RequestStatus.PREEMPTED


def test_requests_are_withdrawn_wherever_they_stand() -> None:
    engine = Engine(num_gpu_blocks=4, num_cpu_blocks=2)
    running, swapped = engine.add(5, 9), engine.add(5, 9)
    for _ in range(5):
        engine.step()
    waiting = engine.add(3, 3)
    assert swapped.status is RequestStatus.SWAPPED
    for request in (waiting, swapped, running):
        engine.scheduler.abort(request)
        engine.scheduler.check()
        assert request.status is RequestStatus.FINISHED_ABORTED
    assert engine.scheduler.cache_usage() == (0, 0, 0, 0, 0.0, 0.0)


# -- sharing ----------------------------------------------------------------------


def test_a_request_that_ends_leaves_its_last_blocks_unshared() -> None:
    engine = Engine(enable_prefix_caching=True)
    engine.add(8, 1, prompt=((500, 8),))
    engine.step()
    assert engine.scheduler.cache.block_manager.num_cached_blocks == 0
    engine.add(8, 2, prompt=((500, 8),))
    engine.step(), engine.step()
    assert engine.scheduler.cache.block_manager.num_cached_blocks == 2


def test_a_prompt_that_is_found_whole_computes_its_last_token() -> None:
    engine = Engine(enable_prefix_caching=True)
    engine.add(8, 5, prompt=((500, 8),))
    engine.step()
    second = engine.add(8, 2, prompt=((500, 8),))
    assert engine.step() == [(0, 1), (1, 1)]
    assert second.num_cached_tokens == 7
    assert engine.scheduler.summary()["prefix_cache_hits"] == 7


def test_who_finds_a_prefix_is_active_even_if_blocks_are_short() -> None:
    engine = Engine(num_gpu_blocks=6, enable_prefix_caching=True)
    engine.add(8, 9, prompt=((500, 8),))
    engine.step()
    late = engine.add(22, 1, prompt=((500, 8), (501, 14)))
    assert engine.step() == [(0, 1)]
    # It holds the two blocks, found too few others, and was evicted again.
    assert late.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
    assert late.num_tokens == 22


# -- runs -------------------------------------------------------------------------


def traffic(**engine: Any) -> dict[str, Any]:
    data = minimal(
        scheduler="hf_fifo",
        **{"block_size": 16, "max_model_len": 400, "num_gpu_blocks_override": 40}
        | engine,
    )
    data["workload"]["synthetic"] |= {
        "num_requests": 60,
        "arrivals": {"kind": "poisson", "rate": 200.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 120},
        "output_tokens": {"kind": "uniform", "low": 20, "high": 90},
    }
    return data


@pytest.mark.parametrize(
    ("engine", "swaps", "recomputes"),
    [
        ({"safety_margin": 0.0}, False, True),
        ({"safety_margin": 0.0, "swap_space": 1.0}, True, False),
        ({"safety_margin": 0.0, "swap_space": 0.03}, True, True),
    ],
)
def test_a_run_ends_with_everybody_served(
    engine: dict[str, Any], *, swaps: bool, recomputes: bool
) -> None:
    summary = simulate(parse_config(traffic(**engine))).summary
    assert summary["completed"] == 60
    assert (summary["num_preemptions_swap"] > 0) == swaps
    assert (summary["num_preemptions_recompute"] > 0) == recomputes
    assert (summary["recomputed_tokens"] > 0) == recomputes
    assert summary["swapped_out_blocks"] == summary["swapped_in_blocks"]
    assert (summary["swapped_in_blocks"] > 0) == swaps
    assert summary["path_reason"] == "the scheduler has no fast path"


def test_the_margin_trades_evictions_for_waiting() -> None:
    runs = [
        simulate(parse_config(traffic(safety_margin=margin))).summary
        for margin in (0.0, 0.5)
    ]
    assert runs[0]["num_preemptions"] > runs[1]["num_preemptions"]


def test_requests_that_never_fit_are_rejected_and_the_others_served() -> None:
    data = traffic()
    data["workload"]["synthetic"]["prompt_tokens"] |= {"high": 900}
    results = simulate(parse_config(data))
    rejected = results.requests[results.requests["status"] == "finished_rejected"]
    assert 0 < len(rejected) < 60
    assert results.summary["completed"] == 60 - len(rejected)


def test_the_longest_sequence_is_what_the_pool_holds() -> None:
    """638 computed tokens need all forty blocks, 639 may need one more."""
    scheduler = Engine(num_gpu_blocks=40, block_size=16).scheduler
    assert scheduler.max_servable_tokens == 639
    longest = request_from_spec(spec(0, 0.0, 600, 39), LONGEST)
    longest.max_num_tokens = 639
    assert scheduler.admission_error(longest) is None
    longest.max_num_tokens = 640
    assert scheduler.admission_error(longest) == (
        "a prompt and its longest output of 640 tokens may need 41 blocks; the cache "
        "has 40"
    )
    longest.num_prompt_tokens = LONGEST
    assert "leaves no room for output" in str(scheduler.admission_error(longest))


def test_without_the_check_a_run_stalls_where_the_release_gives_up() -> None:
    data = traffic(admission_check=False, max_model_len=2000)
    data["workload"]["synthetic"] |= {
        "num_requests": 1,
        "prompt_tokens": {"kind": "fixed", "tokens": 700},
    }
    results = simulate(parse_config(data))
    assert results.summary["stalled"]
    assert results.summary["completed"] == 0


# -- configuration ----------------------------------------------------------------


def test_defaults_are_the_releases() -> None:
    engine = minimal(scheduler="hf_fifo")
    engine["engine"].pop("block_size", None)
    config = parse_config(engine).engine
    assert (config.block_size, config.swap_space, config.version) == (256, 0.0, "5.17")
    assert config.prefix_caching
    given = minimal(scheduler="hf_fifo", block_size=32, swap_space=2.0)
    config = parse_config(given).engine
    assert (config.block_size, config.swap_space) == (32, 2.0)
    # Those of the other generations stay what they are.
    assert parse_config(minimal(scheduler="v0")).engine.swap_space == 4.0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"block_size": 2}, "block_size must be at least 4"),
        ({"safety_margin": 1.5}, "engine.safety_margin"),
        ({"max_blocks_per_request": -1}, "engine.max_blocks_per_request"),
        ({"preemption_mode": "swap"}, "preemption_mode must be recompute or null"),
        ({"watermark": 0.1}, "watermark: the hf_fifo generation has no such key"),
        ({"engine_version": "5.16"}, "covers transformers 5.17, got '5.16'"),
        ({"model": "google/gemma-2-2b"}, "must have full attention in all layers"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    engine: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, traffic(**engine))
    assert kvsim(["run", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_class_of_ones_own_gets_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from sim.scheduler.hf_fifo.scheduler import FIFOScheduler\n"
        "class Mine(FIFOScheduler):\n"
        "    def __init__(self, *args, patience: int, **more):\n"
        "        super().__init__(*args, **more)\n"
        "        assert patience == 3\n"
        "        assert self.cache.cpu_pool.num_blocks > 0\n"
    )
    data = traffic(engine_version="5.17", swap_space=1.0)
    data["engine"]["scheduler"] = {
        "kind": str(tmp_path / "mine.py:Mine"),
        "patience": 3,
    }
    assert simulate(parse_config(data)).summary["completed"] == 60
    data["engine"]["preemption_mode"] = "swap"
    with pytest.raises(ConfigError, match="preemption_mode must be recompute"):
        simulate(parse_config(data))


# -- real traffic -----------------------------------------------------------------


@pytest.mark.parametrize("swap_space", [0, 4])
def test_the_azure_trace_under_pressure_loses_nobody(swap_space: int) -> None:
    trace = shared("traces/azure_llm_2023_conv.csv")
    config = load_config(
        ROOT / "examples/azure_conv_transformers.yaml",
        [
            f"workload.trace.path={trace}",
            "workload.trace.limit=1500",
            f"engine.swap_space={swap_space}",
        ],
    )
    results = Simulation(config).run(check_every=500)
    summary, steps = results.summary, results.steps
    assert summary["completed"] == 1500
    assert summary["num_preemptions"] > 50
    assert (summary["num_preemptions_recompute"] == 0) == (swap_space > 0)
    assert summary["swapped_out_blocks"] == summary["swapped_in_blocks"]
    # Every token is computed once, but for those that evictions threw away; the last
    # token of an answer is never computed.
    once = summary["total_input_tokens"] + summary["total_output_tokens"] - 1500
    assert steps["num_batched_tokens"].sum() == once + summary["recomputed_tokens"]
    assert (steps["num_physical_tokens"] <= steps["num_physical_blocks"] * 256).all()
    requests = results.requests
    sojourn_s = (requests["finish_s"] - requests["arrival_s"]).mean()
    rate = len(requests) / summary["duration"]
    assert summary["num_in_system_mean"] == pytest.approx(rate * sojourn_s, rel=1e-9)


@pytest.mark.slow
def test_prompts_of_a_real_trace_share_blocks() -> None:
    trace = {"kind": "mooncake", "limit": 400}
    trace["path"] = str(shared("traces/mooncake_fast25_conversation.jsonl"))
    data = minimal(scheduler="hf_fifo", block_size=256, num_gpu_blocks_override=3000)
    data["workload"] = {"trace": trace}
    summaries = []
    for caching in (True, False):
        data["engine"] |= {"enable_prefix_caching": caching, "max_model_len": 131072}
        summaries.append(Simulation(parse_config(data)).run(check_every=500).summary)
    shared_summary, plain = summaries
    assert shared_summary["completed"] == plain["completed"] == 400
    assert shared_summary["prefix_cache_hits"] > 0
    assert plain["prefix_cache_hits"] == 0
    assert shared_summary["num_evictions"] > 0
