"""Pipelines: stages of layers, their pool, and the steps that go through them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.costs.constant import ConstantCost
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.at_bound import AtBound
from sim.costs.steps.pipeline import PipelineCost, StageLinks
from sim.engine.pipeline import BatchQueue
from sim.errors import CapacityError, ConfigError
from sim.hardware.capacity import estimate_capacity, format_capacity
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.hardware.models.stages import layers_of_stages, model_of_stage
from sim.hardware.models.weights import count_parameters
from sim.results.recording.recorder import Recorder
from sim.results.recording.schedule import SCHEDULE_FILE
from sim.scheduler.base import SchedulerOutput
from sim.scheduler.batch import EMPTY_SHAPE, BatchShape
from sim.scheduler.generation import SCHEDULE_REQUEST_S
from sim.scheduler.log.files import read_log
from sim.simulation.extras import recording
from sim.simulation.run import Simulation
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    from pathlib import Path

    from sim.costs.base import StepCost
    from sim.results.run import Results

MODEL = "meta-llama/Llama-3.1-8B"
STEP_S = 0.04


def simulation(
    pipeline_parallel_size: int,
    *,
    num_requests: int = 40,
    rate: float = 1e4,
    prompt_tokens: int = 500,
    output_tokens: int = 20,
    cost: dict[str, Any] | None = None,
    **engine: Any,
) -> Simulation:
    traffic = {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": {"kind": "fixed", "tokens": prompt_tokens},
        "output_tokens": {"kind": "fixed", "tokens": output_tokens},
    }
    own = {
        "pipeline_parallel_size": pipeline_parallel_size,
        "async_scheduling": False,
    }
    pool = {"model": MODEL, "gpu": "h100_sxm", "num_gpu_blocks_override": 4000}
    config = {
        "workload": {"synthetic": traffic},
        "engine": pool | own | engine,
        "cost": cost or {"kind": "constant", "step_s": STEP_S},
    }
    return Simulation(parse_config(config))


def run(pipeline_parallel_size: int, **more: Any) -> Results:
    return simulation(pipeline_parallel_size, **more).run(check_every=7)


# -- layers and memory -----------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "layers"),
    [
        (32, 1, (32,)),
        (32, 2, (16, 16)),
        (7, 3, (2, 3, 2)),
        (10, 4, (2, 3, 3, 2)),
        (61, 4, (15, 15, 16, 15)),
        (80, 3, (27, 27, 26)),
        (3, 2, (2, 1)),
    ],
)
def test_layers_are_divided_as_the_release_does(
    num_layers: int, num_stages: int, layers: tuple[int, ...]
) -> None:
    assert layers_of_stages(num_layers, num_stages) == layers


@pytest.mark.parametrize(
    "name", [MODEL, "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3"]
)
def test_stages_have_all_the_layers_once(name: str) -> None:
    model = load_model(name)
    stages = [model_of_stage(model, 4, stage) for stage in range(4)]
    assert sum([stage.layer_kinds for stage in stages], ()) == model.layer_kinds
    assert sum(stage.num_moe_layers for stage in stages) == model.num_moe_layers
    ends = model.vocab_size * model.hidden_size * (2 - model.tie_word_embeddings)
    norm = model.hidden_size  # behind the last layer
    layers = [count_parameters(stage) - ends - norm for stage in stages]
    assert sum(layers) == count_parameters(model) - ends - norm


def test_stages_have_the_indexers_of_their_layers() -> None:
    """Layers that share the choice of one before have no keys of their own."""
    model = load_model("deepseek-ai/DeepSeek-V3.2")
    own = (0, 1, 30, 31, 60)
    shared = replace(model, index_layers=own)
    stages = [model_of_stage(shared, 2, stage) for stage in range(2)]
    assert [each.index_layers for each in stages] == [(0, 1, 30), (0, 29)]
    assert [model_of_stage(model, 2, s).num_index_layers for s in (0, 1)] == [31, 30]
    with pytest.raises(
        CapacityError, match=r"an indexer; .* layers 31 to 60 have none"
    ):
        model_of_stage(replace(model, index_layers=(0, 1)), 2, 1)


def test_stages_divide_experts_over_the_ranks_of_each() -> None:
    def held(**ranks: Any) -> int:
        pool = estimate_capacity("Qwen/Qwen3-30B-A3B", "h100_sxm", **ranks)
        return pool.expert_bytes

    whole = held(data_parallel_size=2, enable_expert_parallel=True)
    halves = held(
        data_parallel_size=2, enable_expert_parallel=True, pipeline_parallel_size=2
    )
    assert 2 * halves == whole == 48 * 64 * 3 * 2048 * 768 * 2


def test_the_pool_is_that_of_the_stage_with_least_room() -> None:
    whole = estimate_capacity(MODEL, "h100_sxm")
    halves = estimate_capacity(MODEL, "h100_sxm", pipeline_parallel_size=2)
    assert halves.block_bytes == whole.block_bytes // 2
    # The last stage samples; embedding and head are one each.
    assert halves.stage == 1
    assert halves.weights_bytes == pytest.approx(whole.weights_bytes / 2, rel=0.01)
    assert halves.num_gpu_blocks > 2 * whole.num_gpu_blocks
    assert "PP 2, stage 2 of 2" in format_capacity(halves)
    assert any("no pipeline" in reason for reason in halves.extrapolated)
    thirds = estimate_capacity(MODEL, "h100_sxm", pipeline_parallel_size=3)
    assert (thirds.stage, thirds.block_bytes) == (0, 11 * whole.block_bytes // 32)
    told = halves.to_dict()
    assert (told["pipeline_parallel_size"], told["stage"]) == (2, 1)
    assert "stage" not in whole.to_dict()


def test_groups_are_those_of_the_whole_model() -> None:
    whole = estimate_capacity("openai/gpt-oss-120b", "h200_sxm")
    stages = estimate_capacity(
        "openai/gpt-oss-120b", "h200_sxm", pipeline_parallel_size=4
    )
    assert whole.plan is not None
    assert stages.plan is not None
    groups = whole.plan.layout.groups
    assert len(stages.plan.layout.groups) == len(groups)
    # Nine layers of a stage: five of one kind, four of the other, where all have 18.
    assert stages.block_bytes * 18 == whole.block_bytes * 5


def test_windows_are_sized_for_the_steps_in_flight_of_the_release() -> None:
    """Two stages and, scheduled ahead as by default, one more."""
    null, ahead, one_by_one = (
        estimate_capacity(
            "openai/gpt-oss-120b",
            "h200_sxm",
            pipeline_parallel_size=2,
            async_scheduling=each,
        ).max_concurrency
        for each in (None, True, False)
    )
    assert null == ahead < one_by_one


def test_pipelines_that_are_not_built_say_so() -> None:
    for engine, words in (
        ({"scheduler": "v0"}, "pipelines are built for v1 only, got 2 with v0"),
        ({"engine_version": "0.31"}, "known from 0.32 on"),
        ({"pipeline_parallel_size": 33}, "at most the 32 layers"),
    ):
        with pytest.raises((ConfigError, CapacityError), match=words):
            simulation(**{"pipeline_parallel_size": 2} | engine)


def test_a_schedule_with_steps_in_flight_has_a_line_a_step(tmp_path: Path) -> None:
    run = simulation(2)
    with recording(run, ["schedule"], tmp_path):
        steps = run.run().recording.steps
    lines = list(read_log(tmp_path / SCHEDULE_FILE))
    assert [line["t"] for line in lines] == steps["step"].tolist()
    assert [line["end_s"] for line in lines] == steps["output_s"].tolist()
    named = [name for line in lines for name in line.get("fin", [])]
    assert sorted(map(int, named)) == list(range(40))


# -- times -----------------------------------------------------------------------


def links(num_stages: int, tensor_parallel_size: int = 1) -> StageLinks:
    model, gpu = load_model(MODEL), load_gpu("h100_sxm")
    return StageLinks(model, gpu, tensor_parallel_size, num_stages)


def test_a_batch_takes_all_stages_and_what_is_sent_between() -> None:
    cost = PipelineCost(
        [(ConstantCost(0.03), 1.0), (ConstantCost(0.02), 0.5)], links(2)
    )
    shape = BatchShape(4, 400, 0, 0, 0, 0)
    (first, second) = cost.stage_times(shape)
    sent_s = links(2).send_s(1, 4)
    assert (first, second) == ((0.0, 0.03), (sent_s, 0.01))
    step = cost.step(shape)
    assert step.total_s == pytest.approx(0.04 + sent_s)
    assert sum(step.parts) == pytest.approx(step.total_s)
    assert step.allreduce_s == sent_s > 10e-6
    assert cost.step(EMPTY_SHAPE).total_s == 0.01


def test_stages_fill_nodes_one_after_the_other() -> None:
    assert {link.name for link in links(2, 4).links} == {"h100_sxm's own"}
    names = [link.name for link in links(4, 4).links]
    assert names == ["h100_sxm's own", "infiniband_ndr", "h100_sxm's own"]
    assert links(4, 4).send_s(2, 1000) > links(4, 4).send_s(1, 1000)


def test_links_of_the_configuration_join_stages() -> None:
    data = minimal(pipeline_parallel_size=2, tensor_parallel_size=8)
    data["engine"] |= {"interconnect": "nvlink3", "network": "infiniband_hdr"}
    data["cost"] = {"kind": "roofline"}
    ahead = Simulation(parse_config(data)).cost_model
    assert isinstance(ahead, HostAhead)
    cost = ahead.model
    assert isinstance(cost, PipelineCost)
    told = cost.describe()
    assert "infiniband_hdr" in str(told)
    assert "infiniband_ndr" not in str(told)


@given(
    times=st.lists(st.lists(st.floats(1e-4, 1.0), min_size=3, max_size=3), min_size=1)
)
@settings(max_examples=50, deadline=None)
def test_batches_never_share_a_stage_nor_overtake(times: list[list[float]]) -> None:
    class Staged(ConstantCost):
        def stage_times(self, shape: BatchShape) -> list[tuple[float, float]]:
            mine = times[shape.num_decode_context_tokens]
            return [(0.001, time_s) for time_s in mine]

    cost = Staged(1.0)
    queue, ends_s = BatchQueue(3, cost, Recorder().steps), []
    for index in range(len(times)):
        shape = BatchShape(1, index, 0, 0, 0, 0)
        ends_s.append(queue.end_s(0.0, shape, cost.step(shape).total_s))
    # A batch without tokens is through with those ahead.
    assert queue.end_s(0.0, EMPTY_SHAPE, cost.step(EMPTY_SHAPE).total_s) == ends_s[-1]
    late_s = ends_s[-1] + 1.0
    assert (
        queue.end_s(late_s, EMPTY_SHAPE, cost.step(EMPTY_SHAPE).total_s) == late_s + 1.0
    )
    assert all(before < after for before, after in pairwise(ends_s))
    assert ends_s[0] == pytest.approx(sum(times[0]) + 0.003)
    for stage in range(3):
        assert ends_s[-1] >= sum(each[stage] for each in times)


def test_the_oldest_output_comes_first() -> None:
    queue = BatchQueue(2, ConstantCost(1.0), Recorder().steps)
    for step, end_s in enumerate((1.0, 2.0)):
        queue.push(step, SchedulerOutput(), end_s)
    assert not queue.computes
    assert queue.pop(0.5).step == 0
    assert queue.pop(2.5)[::2] == (1, 2.5)


# -- runs ------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_one_request_takes_the_sum_of_the_stages(num_stages: int) -> None:
    results = run(num_stages, num_requests=1, output_tokens=5)
    own = links(num_stages)
    sent_s = [
        sum(own.send_s(stage, tokens) for stage in range(1, num_stages))
        for tokens in (500, 1)
    ]
    summary = results.summary
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * (STEP_S + sent_s[0]))
    assert summary["mean_tpot_ms"] == pytest.approx(1e3 * (STEP_S + sent_s[1]))
    # One call in so many finds it; the others take places in the queue.
    assert summary["num_steps"] == 5 * num_stages
    words = f"synchronous scheduling, {num_stages} steps in flight in a pipeline"
    assert summary["scheduling"] == words
    assert summary["path_reason"] == "several steps are in flight"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_ahead_one_request_takes_the_sum_of_the_stages_too(num_stages: int) -> None:
    """Its next token enters the first stage when the last one has left the last."""
    ahead, one_by_one = (
        run(num_stages, num_requests=1, output_tokens=5, async_scheduling=each)
        for each in (True, False)
    )
    for key in ("mean_ttft_ms", "mean_tpot_ms"):
        assert ahead.summary[key] == pytest.approx(one_by_one.summary[key])
    said = ahead.summary["scheduling"]
    assert said.startswith(f"asynchronous scheduling of {num_stages} stages (")


def test_ahead_each_step_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[BatchShape] = []
    price = ConstantCost.step

    def counted(self: ConstantCost, shape: BatchShape) -> StepCost:
        shapes.append(shape)
        return price(self, shape)

    monkeypatch.setattr(ConstantCost, "step", counted)
    config = simulation(1, async_scheduling=True).config
    results = Simulation(config, stepwise=True).run()
    assert len(shapes) == results.summary["num_steps"] > 20


def test_ahead_the_host_is_hidden_behind_the_stages() -> None:
    overhead_s = 0.003
    cost = {"kind": "roofline", "step_overhead_s": overhead_s}
    more = {"cost": cost, "num_requests": 1, "prompt_tokens": 100}
    ahead, one_by_one = (
        run(2, async_scheduling=each, **more).summary for each in (True, False)
    )
    # each of the two stages prepares the batch while the other one computes
    hidden_s = 1e-3 * (one_by_one["mean_tpot_ms"] - ahead["mean_tpot_ms"])
    assert hidden_s == pytest.approx(2 * overhead_s, rel=0.02)
    times = HostAhead(simulation(2, **more).cost_model).stage_times(
        BatchShape(10, 1000, 0, 0, 0, 0)
    )
    assert len(times) == 3
    assert times[0] == (0.0, overhead_s + 10 * SCHEDULE_REQUEST_S)


def test_ahead_stages_are_no_less_busy() -> None:
    more = {"max_num_batched_tokens": 16 * 500, "output_tokens": 50}
    ahead, one_by_one = (
        run(2, async_scheduling=each, num_requests=64, **more).summary
        for each in (True, False)
    )
    ratio = ahead["output_throughput"] / one_by_one["output_throughput"]
    assert ratio == pytest.approx(1.0, abs=0.1)
    assert ahead["num_wasted_tokens"] > 0


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_saturated_pipeline_ends_a_step_in_the_time_of_a_stage(
    num_stages: int,
) -> None:
    # A batch of prompts a stage, so that every stage has decodes of its own.
    more = {"max_num_batched_tokens": 16 * 500, "output_tokens": 50}
    one = run(1, **more, num_requests=16)
    all_ = run(num_stages, **more, num_requests=16 * num_stages)
    ratio = all_.summary["output_throughput"] / one.summary["output_throughput"]
    assert ratio == pytest.approx(num_stages, rel=0.1)


def test_the_outputs_are_those_of_one_stage() -> None:
    one, three = run(1), run(3)
    for key in ("completed", "total_input_tokens", "total_output_tokens"):
        assert one.summary[key] == three.summary[key]


@pytest.mark.slow
@given(
    num_stages=st.integers(2, 4),
    num_blocks=st.integers(60, 120),
    budget=st.sampled_from([64, 200, 1000]),
    rate=st.sampled_from([2.0, 30.0, 1e4]),
    caching=st.booleans(),
    ahead=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_every_request_is_served_under_pressure(
    num_stages: int,
    num_blocks: int,
    budget: int,
    rate: float,
    *,
    caching: bool,
    ahead: bool,
) -> None:
    results = run(
        num_stages,
        num_requests=12,
        rate=rate,
        prompt_tokens=300,
        output_tokens=70,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        enable_prefix_caching=caching,
        async_scheduling=ahead,
        scheduler_reserve_full_isl=False,
    )
    assert results.summary["completed"] == 12
    assert results.summary["total_output_tokens"] == 12 * 70


def test_a_bound_moves_all_stages() -> None:
    class Bounded(ConstantCost):
        def step(self, shape: BatchShape) -> StepCost:
            return super().step(shape)._replace(lo_s=0.5 * STEP_S, hi_s=2.0 * STEP_S)

    cost = PipelineCost([(Bounded(STEP_S), 0.5)] * 2, links(2))
    low = AtBound(cost, "lo")
    shape = BatchShape(4, 400, 0, 0, 0, 0)
    times = low.stage_times(shape)
    assert sum(map(sum, times)) == pytest.approx(low.step(shape).total_s)
    assert low.step(shape).total_s < cost.step(shape).total_s


def test_a_priced_pipeline_is_no_slower_a_stage_than_the_whole() -> None:
    cost = {"kind": "roofline"}
    one, two = (run(n, cost=cost, num_requests=1, rate=1.0) for n in (1, 2))
    # Host time twice, and sending: more than one stage, far less than twice as much.
    ratio = two.summary["mean_tpot_ms"] / one.summary["mean_tpot_ms"]
    assert 1.0 < ratio < 1.5


@pytest.mark.parametrize("chunk_rows", [1, 3, 8192])
def test_a_step_that_ends_requests_has_them_whatever_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    for module in ("step_log", "step_columns"):
        name = f"sim.results.recording.{module}.CHUNK_ROWS"
        monkeypatch.setattr(name, chunk_rows)
    monkeypatch.setattr("sim.results.recording.step_log.BATCH_ROWS", 2 * chunk_rows)
    kept = run(3, rate=10.0).recording
    streaks = kept.streaks
    last = dict(zip(streaks.owner.tolist(), streaks.end.tolist(), strict=True))
    counts = enumerate(kept.steps["num_finished"].tolist())
    assert {step: num for step, num in counts if num} == Counter(last.values())
