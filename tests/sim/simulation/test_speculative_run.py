"""Runs with draft tokens: configuration, prices, and what theory says of them."""

from __future__ import annotations

import json
from itertools import product
from math import sqrt
from typing import Any

import pytest

from sim.config.tables import RunConfig, parse_config
from sim.costs import LinearCost
from sim.costs.base import StepCost
from sim.costs.constant import ConstantCost
from sim.costs.steps.speculative import (
    FixedDrafter,
    ModelDrafter,
    NgramDrafter,
    SpeculativeCost,
)
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.results.folder import RunFolder
from sim.scheduler.batch import BatchShape, VerifyingShape
from sim.simulation.assemble import make_cost_model
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate, with_intervals
from sim.views.plots import FIGURES, Tables, to_png
from sim.views.plots.accessor import figures_of
from sim.views.plots.run.drafts import drafts as drafts_figure
from tests.sim.config.test_config import minimal
from tests.sim.costs.test_costs import LLAMA_8B
from tests.sim.costs.test_measured import entry
from tests.sim.costs.test_measured import write as write_profile

EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}


def config(
    drafts: dict[str, Any] | None = None,
    rate: float = 0.7,
    *,
    cost: dict[str, Any] | None = None,
    num_requests: int = 40,
    **engine: Any,
) -> RunConfig:
    return parse_config(
        {
            "workload": {
                "synthetic": {
                    "num_requests": num_requests,
                    "arrivals": {"kind": "poisson", "rate": 20.0},
                    "prompt_tokens": {"kind": "uniform", "low": 10, "high": 300},
                    "output_tokens": {"kind": "fixed", "tokens": 200},
                },
                "acceptance": {"kind": "constant", "rate": rate},
            },
            "engine": {
                "model": "meta-llama/Llama-3.1-8B",
                "gpu": "h200_sxm",
                "speculative_config": drafts,
                **engine,
            },
            "cost": cost or {"kind": "roofline"},
        }
    )


def test_what_the_traffic_says_of_drafts_in_vain_is_warned_of() -> None:
    def said(drafts: dict[str, Any] | None) -> str:
        run = config(drafts, num_requests=2)
        assert run.workload.acceptance is not None
        run.workload.acceptance["proposal_rate"] = 0.5
        return "; ".join(Simulation(run).warnings)

    assert "acceptance does nothing without engine.speculative_config" in said(None)
    assert "proposal_rate does nothing with eagle3" in said(EAGLE)
    assert "does nothing" not in said({**EAGLE, "method": "ngram"})
    assert "does nothing" not in said({"method": "ngram", "num_speculative_tokens": 0})


QUICK_CASES = [(0.0, 1, False), (0.8, 3, True), (0.4, 5, False), (1.0, 1, True)]
CONSTANT = {"kind": "constant", "step_s": 0.01, "draft_step_s": 0.0}


# -- theory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "num_drafts", "ahead"),
    [
        pytest.param(*case, marks=[] if case in QUICK_CASES else [pytest.mark.slow])
        for case in product((0.0, 0.4, 0.8, 1.0), (1, 3, 5), (False, True))
    ],
)
def test_steps_yield_what_the_geometric_formula_says(
    rate: float, num_drafts: int, ahead: bool
) -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": num_drafts}
    run = config(drafts, rate, cost=CONSTANT, async_scheduling=ahead)
    summary = Simulation(run).run(check_every=50).summary
    assert summary["completed"] == 40
    if rate == 1:
        expected = num_drafts + 1.0
    else:
        expected = (1 - rate ** (num_drafts + 1)) / (1 - rate)
    square = sum(
        (2 * i + 1) * rate**i for i in range(num_drafts + 1)
    )  # of 1 + accepted, by its tail
    error = sqrt(max(square - expected**2, 0) / summary["spec_decode_num_drafts"])
    mean = summary["spec_decode_acceptance_length"]
    assert abs(mean - expected) <= 4 * error + 1e-12


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("num_batch_tokens", [130, 512])
def test_a_prompt_beyond_the_model_gets_slots_up_to_it(
    num_batch_tokens: int, *, caches: bool
) -> None:
    limits = {"max_model_len": 128, "admission_check": False}
    limits |= {
        "max_num_batched_tokens": num_batch_tokens,
        "num_gpu_blocks_override": 99,
    }
    limits |= {"num_requests": 10, "enable_prefix_caching": caches}
    run = config(EAGLE, cost=CONSTANT, **limits)
    checked = Simulation(run).run(check_every=1).summary
    assert checked["length_capped"] + checked["unfinished"] > 0
    assert checked == Simulation(run).run().summary


def test_a_sure_drafter_divides_the_steps_of_a_request() -> None:
    lone = {"cost": CONSTANT, "num_requests": 1, "async_scheduling": False}
    plain = simulate(config(None, **lone)).summary
    sure = simulate(config({"method": "mtp", "num_speculative_tokens": 3}, 1.0, **lone))
    # the first token comes of the prompt, the others four at a time
    assert plain["num_steps"] == 200
    assert sure.summary["num_steps"] == 1 + 50
    useless = simulate(
        config({"method": "mtp", "num_speculative_tokens": 3}, 0.0, **lone)
    )
    assert useless.summary["num_steps"] == 200


def test_no_drafts_are_the_same_as_no_table() -> None:
    none = {"method": "mtp", "num_speculative_tokens": 0}
    plain, without = simulate(config(None)), simulate(config(none))
    assert plain.requests.equals(without.requests)
    assert plain.steps.equals(without.steps)
    assert without.summary["path"] == "fast"


@pytest.mark.parametrize("found", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_ahead_of_looked_up_drafts_steps_verify_what_is_not_found(found: float) -> None:
    """Tokens a step are as one at a time; what is verified is not."""
    told = {}
    for is_ahead in (False, True):
        run = config(
            {"method": "ngram", "num_speculative_tokens": 3},
            num_requests=150,
            async_scheduling=is_ahead,
        )
        assert run.workload.acceptance is not None
        run.workload.acceptance["proposal_rate"] = found
        simulation = Simulation(run)
        told[is_ahead] = simulation.run().summary
    ahead, one_by_one = told[True], told[False]
    key = "spec_decode_accepted_tokens"
    assert ahead[key] == one_by_one[key]
    key = "spec_decode_draft_tokens"
    assert ahead[key] == pytest.approx(one_by_one[key] / found, rel=0.02)
    # the text is scanned on the GPU, where it takes next to nothing
    assert ahead["mean_tpot_ms"] < one_by_one["mean_tpot_ms"]


# -- prices --------------------------------------------------------------------------


def verifying(queries: list[tuple[int, int]], decodes: int = 0) -> VerifyingShape:
    tokens = sum(num for num, _ in queries)
    context = sum(context for _, context in queries)
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for n, c in queries)
    shape = BatchShape(decodes, 100 * decodes, len(queries), tokens, context, pairs)
    return VerifyingShape.of(shape, queries)


def test_a_shape_counts_its_verifications() -> None:
    shape = verifying([(4, 104), (2, 50)], decodes=3)
    assert shape == (3, 300, 2, 6, 154, 4 * 100 + 10 + 2 * 48 + 3, 0, 0, 0)
    assert shape.num_verifications == 2
    assert shape.num_verified_tokens == 6
    assert shape.num_verified_context_tokens == 154
    assert shape.num_verified_attention_pairs == shape.num_prefill_attention_pairs


def test_a_linear_verification_is_a_chunk_that_attends_as_a_decode() -> None:
    target = LinearCost(
        0.001, prefill_s=0.1, prefill_token_s=1.0, decode_context_token_s=0.01
    )
    cost = SpeculativeCost(target, FixedDrafter(0.5)).step(verifying([(4, 104)]))
    assert cost.gemm_s == pytest.approx(0.1 + 4.0)
    assert cost.decode_attention_s == pytest.approx(1.04)
    assert cost.prefill_attention_s == 0
    assert cost.host_s == pytest.approx(0.501)
    assert cost.total_s == pytest.approx(sum(cost.parts))


def test_a_constant_step_is_longer_by_its_drafter() -> None:
    cost = SpeculativeCost(ConstantCost(0.01), FixedDrafter(0.002))
    assert cost.step(verifying([(4, 104)])).total_s == pytest.approx(0.012)
    # nothing is drafted behind an empty step
    assert cost.step(BatchShape(0, 0, 0, 0, 0, 0)).total_s == 0.01


def test_a_model_without_parts_prices_chunks() -> None:
    class Whole:
        def step(self, shape: BatchShape) -> StepCost:
            return StepCost(0.001 * shape.num_prefill_tokens + 0.01)

        def describe(self) -> dict[str, Any]:
            return {}

    cost = SpeculativeCost(Whole(), FixedDrafter(0.0)).step(verifying([(4, 104)]))
    assert cost.total_s == pytest.approx(0.014)


def test_a_drafter_runs_once_for_each_draft() -> None:
    target = LinearCost(1e-9, decode_s=1.0, prefill_token_s=10.0)
    drafter = ModelDrafter(target, 3)
    # four tokens of one request, then one of it, twice
    assert drafter.step(verifying([(4, 104)])).total_s == pytest.approx(40 + 1 + 1)


def test_look_up_passes_over_the_text_of_each_request() -> None:
    cost = NgramDrafter(token_s=1e-9, request_s=1e-6).step(verifying([(4, 1000)], 2))
    assert cost.host_s == pytest.approx(1200e-9 + 3e-6)


def made(**more: Any) -> Any:
    run = config(**more)
    model = load_model(run.engine.model)
    return make_cost_model(run, model, load_gpu(run.engine.gpu))


def test_verifying_costs_little_while_memory_bounds_a_step() -> None:
    plain, drafting = made(), made(drafts=EAGLE)
    lone = plain.step(BatchShape(1, 1000, 0, 0, 0, 0)).total_s
    verified = drafting.step(verifying([(4, 1000)]))
    # three passes of a layer of 32, each with the output projection
    assert 1.15 * lone < verified.total_s < 1.6 * lone
    many = plain.step(BatchShape(256, 256_000, 0, 0, 0, 0)).total_s
    assert drafting.step(verifying([(4, 1000)] * 256)).total_s > 1.5 * many
    # keys are read once for all tokens of a verification
    attended = drafting.step(verifying([(4, 1000)] * 256)).decode_attention_s
    read = plain.step(BatchShape(256, 256_000, 0, 0, 0, 0)).decode_attention_s
    assert read <= attended < 1.2 * read


@pytest.mark.parametrize(
    ("drafts", "low", "high"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, 0, 1e-4),
        ({"method": "mtp", "num_speculative_tokens": 1}, 2e-4, 2e-3),
        (
            {
                "method": "draft_model",
                "num_speculative_tokens": 3,
                "model": "meta-llama/Llama-3.2-1B",
            },
            2e-3,
            8e-3,
        ),
    ],
)
def test_each_drafter_has_its_price(
    drafts: dict[str, Any], low: float, high: float
) -> None:
    shape = verifying([(4, 1000)])
    free = {"kind": "roofline", "draft_step_s": 0.0}
    without = made(drafts=drafts, cost=free).step(shape).total_s
    assert low < made(drafts=drafts).step(shape).total_s - without < high


# -- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"scheduler": "v0"}, "drafts are built for the v1 generation, got v0"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size above 1"),
        (
            {"speculative_config": EAGLE | {"model": "x"}},
            "drafts of eagle3 have no model of their own",
        ),
        (
            {"speculative_config": EAGLE | {"method": "draft_model"}},
            "engine.speculative_config.model: a draft_model is a model of its own",
        ),
    ],
)
def test_engines_without_drafts_refuse_them(
    engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        config(**{"speculative_config": EAGLE} | engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cost": {"kind": "constant", "step_s": 0.01}},
            r"cost\.draft_step_s: 'constant' does not know what a drafter takes",
        ),
        (
            {"cost": {"kind": "roofline", "draft_step_s": "much"}},
            r"cost\.draft_step_s: must be seconds a step, got 'much'",
        ),
        (
            {"drafts": EAGLE | {"method": "draft_model", "model": "Qwen/Qwen2.5-0.5B"}},
            "the same vocabulary",
        ),
        ({"engine_version": "0.32"}, "known of 0.33 only"),
    ],
)
def test_drafts_need_what_prices_and_shares_them(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulation(config(**{"drafts": EAGLE} | changes))


def test_traffic_says_how_many_are_accepted() -> None:
    data = config(EAGLE).to_data()
    del data["workload"]["acceptance"]
    with pytest.raises(ConfigError, match=r"workload\.acceptance: how many drafts"):
        Simulation(parse_config(data))
    data["workload"]["acceptance"] = {"kind": "profile", "name": "nothing"}
    with pytest.raises(ConfigError, match="name must be one of deepseek"):
        Simulation(parse_config(data))
    data["workload"]["acceptance"] = {"kind": "constant", "rate": 0.5, "rates": 1}
    with pytest.raises(ConfigError, match=r"workload\.acceptance\.rates: 'constant'"):
        Simulation(parse_config(data))


# -- results -------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_what_became_of_drafts_is_recorded(ahead: bool) -> None:
    results = simulate(config(EAGLE, 0.6, async_scheduling=ahead))
    steps, requests, summary = results.steps, results.requests, results.summary
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        # ahead, those of requests that had ended are the steps' alone
        in_vain = steps[name].sum() - requests[name].sum()
        assert in_vain > 0 if ahead else in_vain == 0
    total = requests[["num_drafts", "num_draft_tokens", "num_accepted_tokens"]].sum()
    assert summary["spec_decode_num_drafts"] == total["num_drafts"]
    assert summary["spec_decode_draft_tokens"] == total["num_draft_tokens"]
    assert summary["spec_decode_accepted_tokens"] == total["num_accepted_tokens"]
    assert summary["spec_decode_acceptance_length"] == pytest.approx(
        1 + total["num_accepted_tokens"] / total["num_drafts"]
    )
    rates = summary["spec_decode_per_position_acceptance_rates"]
    assert rates == pytest.approx([0.6, 0.36, 0.216], abs=0.03)
    # outputs: one of the prompt, and those of verifications but for what was cut
    num_outputs = 1 + requests["num_drafts"] + requests["num_accepted_tokens"]
    cut = num_outputs - requests["num_output_tokens"]
    assert cut.between(0, 3).all()
    # a step's verifications are decodes: a token each, and the drafts
    assert summary["path_reason"] == "steps verify drafts"
    assert (steps["num_drafts"] <= steps["num_decodes"]).all()
    of_decodes = steps["num_batched_tokens"] - steps["num_prefill_tokens"]
    assert (of_decodes == steps["num_decodes"] + steps["num_draft_tokens"]).all()
    assert steps["num_prefill_tokens"].sum() == requests["num_prompt_tokens"].sum()
    assert steps["num_prefills"].sum() == len(requests)
    assert steps["num_draft_blocks"].max() > 0
    assert 0 < summary["kv_cache_usage_drafts_mean"] < summary["kv_cache_usage_mean"]


def test_drafts_are_reproducible_and_their_tables_are_written(tmp_path: Any) -> None:
    results = simulate(config(EAGLE))
    again = simulate(config(EAGLE))
    assert results.steps.equals(again.steps)
    assert results.requests.equals(again.requests)
    results.write(tmp_path)
    loaded = RunFolder(tmp_path)
    (batch,) = loaded.step_table.batches(["num_draft_tokens"])
    assert (batch["num_draft_tokens"] == results.steps["num_draft_tokens"]).all()


def test_runs_without_drafts_have_no_columns_of_them() -> None:
    results = simulate(config(None))
    assert not [name for name in results.steps.columns if "draft" in name]
    assert not [key for key in results.summary if "spec_decode" in key]


def test_a_run_with_drafts_has_a_figure_more() -> None:
    plain, drafting = (
        simulate(config(drafts, num_requests=4)) for drafts in (None, EAGLE)
    )
    figures, tables = figures_of(drafting)
    assert set(figures) == {*FIGURES, "drafts"}
    assert to_png(figures["drafts"](tables)) == to_png(drafts_figure(tables))
    assert list(figures_of(plain)[0]) == list(FIGURES)
    # of a run without, it says so
    axes = drafts_figure(Tables.of(plain)).axes[0]
    assert "No step of this run verifies drafts" in axes.texts[0].get_text()


def test_measured_targets_keep_their_bounds(tmp_path: Any) -> None:
    cost = {
        "kind": "measured",
        "profile": write_profile(tmp_path / "p.json", entry(LLAMA_8B)),
    }
    model = made(drafts=EAGLE, cost=cost)
    for shape in (verifying([(4, 1000)] * 8), verifying([(4, 900)], decodes=5)):
        step = model.step(shape)
        assert 0 < step.lo_s < step.total_s < step.hi_s
        assert step.total_s == pytest.approx(sum(step.parts))
    run = config(EAGLE, cost=cost, num_requests=6)
    summary = with_intervals(simulation := Simulation(run), simulation.run()).summary
    low, high = summary["mean_tpot_ms_interval"]
    assert low < summary["mean_tpot_ms"] < high


def test_a_step_ahead_moves_requests_with_drafts_and_changes_none() -> None:
    ahead, one_by_one = (
        simulate(config(EAGLE, 0.6, cost=CONSTANT, async_scheduling=each)).requests
        for each in (True, False)
    )
    shift = ((ahead["first_token_s"] - one_by_one["first_token_s"]) / 0.01).round(6)
    # One step later where others run; both clocks begin anew where all have ended.
    assert shift.between(-1, 2).all()
    assert (shift - 1).abs().lt(0.01).sum() > 20
    # What is accepted depends on the text alone: from there on all take as long.
    lasted_s, expected_s = (
        (each["finish_s"] - each["first_token_s"]).to_numpy()
        for each in (ahead, one_by_one)
    )
    assert lasted_s == pytest.approx(expected_s)


def test_recorded_counts_of_each_request_are_served_as_they_were(tmp_path: Any) -> None:
    counts = [(3, 0, 2, 1), (0, 0, 0), (3, 3)]
    lines = [{"kvsim_requests": 1}] + [
        {
            "arrival_s": 0.5 * i,
            "prompt": 40,
            "num_output_tokens": 1 + sum(each) + len(each),
            "accepted_drafts": each,
        }
        for i, each in enumerate(counts)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    data = config(EAGLE, cost=CONSTANT).to_data()
    data["workload"] = {
        "trace": {"kind": "kvsim", "path": str(path)},
        "acceptance": {"kind": "by_request"},
        "output_end": "length",
    }
    requests = simulate(parse_config(data)).requests
    assert requests["num_drafts"].tolist() == [len(each) for each in counts]
    assert requests["num_accepted_tokens"].tolist() == [sum(each) for each in counts]


def test_a_hit_that_a_budget_below_a_step_with_drafts_blocks_is_told() -> None:
    """One token is left of the second prompt; the release waits for ever, too."""
    fixed = {"kind": "fixed"}
    sessions = {
        "kind": "chat",
        "num_sessions": 2,
        "arrivals": {"kind": "poisson", "rate": 1.0},
        "turns": fixed | {"number": 1},
        "first_prompt_tokens": fixed | {"tokens": 1},
        "prompt_tokens": fixed | {"tokens": 16},
        "output_tokens": fixed | {"tokens": 4},
        "think_s": fixed | {"value_s": 1.0},
        "prefixes": {
            "kind": "system_prompts",
            "num_groups": 1,
            "tokens": fixed | {"tokens": 32},
            "zipf": 1.0,
        },
    }
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    engine = {"max_num_scheduled_tokens": 3, "speculative_config": drafts}
    data = minimal(max_model_len=64, enable_prefix_caching=True, **engine)
    data["cost"] |= {"draft_step_s": 0.001}
    acceptance = {"kind": "constant", "rate": 0.5}
    data["workload"] = {"sessions": sessions, "acceptance": acceptance}
    told = simulate(parse_config(data)).summary
    assert (told["completed"], told["unfinished"]) == (1, 1)
    assert told["stalled"]
    assert (
        "the queue stalled: 1 request waits: the last token of a loaded or cached "
        "prompt is computed with empty drafts, 4 tokens in all; a step has 3 (raise "
        "max_num_scheduled_tokens or max_num_batched_tokens)"
    ) in told["warnings"]
