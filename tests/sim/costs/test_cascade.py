"""A prefix that all requests of a step share, read once: when, and at which price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.costs.base import StepCost
from sim.costs.roofline import RooflineCost
from sim.costs.roofline.cascade import rule_of
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.slowed import Slowed
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape, SharingShape
from sim.simulation.assemble import make_cost_model
from sim.simulation.run import Simulation

MODEL = "meta-llama/Llama-3.1-8B"
NUM_TOKENS = 1_024


def cost_of(model: str = MODEL, gpu: str = "a100_sxm", **keys: Any) -> Any:
    """Return the cost model of an engine of 0.17, which reads prefixes once."""
    told = {"model": model, "gpu": gpu, "engine_version": "0.17"} | keys
    workload = {"synthetic": {"num_requests": 1, "arrivals": RATE} | LENGTHS}
    config = parse_config({"workload": workload, "engine": told})
    own = load_model(config.engine.model)
    return make_cost_model(config, own, load_gpu(config.engine.gpu))


RATE = {"kind": "poisson", "rate": 1.0}
LENGTHS = {
    f"{kind}_tokens": {"kind": "fixed", "tokens": 10} for kind in ("prompt", "output")
}


def reads(model: Any) -> bool:
    return bool(getattr(model, "reads_prefixes_once", False))


@pytest.mark.parametrize(
    ("keys", "is_read"),
    [
        ({}, True),
        ({"engine_version": "0.8"}, True),
        ({"engine_version": "0.18"}, False),
        ({"engine_version": "0.33"}, False),
        ({"engine_version": "0.31", "disable_cascade_attn": False}, True),
        ({"disable_cascade_attn": True}, False),
        ({"enable_prefix_caching": False}, False),
        ({"sliding_window": 512}, False),
        ({"data_parallel_size": 2}, False),
        ({"gpu": "b200_sxm"}, False),
        ({"gpu": "h100_sxm", "kv_cache_dtype": "fp8"}, True),
        ({"gpu": "rtx_4090", "kv_cache_dtype": "fp8"}, False),
        ({"model": "deepseek-ai/DeepSeek-V2-Lite"}, False),
        ({"engine_version": "0.33", "disable_cascade_attn": True}, False),
    ],
)
def test_which_engines_read_prefixes_once(keys: dict[str, Any], is_read: bool) -> None:
    assert reads(cost_of(**keys)) == is_read


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"engine_version": "0.32"}, "0.32 removed"),
        ({"engine_version": "0.33"}, "0.32 removed"),
        ({"engine_version": "0.17", "data_parallel_size": 2}, "data_parallel_size"),
        ({"engine_version": "0.30", "kv_offloading_size": 4}, "kv_offloading_size"),
        ({"scheduler": "v0"}, "no such key"),
    ],
)
def test_what_cannot_be_asked_for(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        cost_of(**keys | {"disable_cascade_attn": False})


def shapes(num_common: int = NUM_TOKENS) -> list[SharingShape]:
    return [
        SharingShape.of(shape, num_common)
        for shape in (
            BatchShape(64, 64 * 1_300, 0, 0, 0, 0),
            BatchShape(600, 600 * 1_300, 0, 0, 0, 0),
            BatchShape(20, 20 * 1_300, 2, 300, 2_500, 300 * 1_100),
            BatchShape(0, 0, 9, 900, 9 * 1_200, 900 * 1_100),
        )
    ]


@pytest.mark.parametrize("gpu", ["a100_sxm", "h100_sxm", "rtx_pro_6000_server"])
@pytest.mark.parametrize("launch_s", [0.0, None, 3e-4])
def test_all_prices_of_a_model_are_the_same(gpu: str, launch_s: float | None) -> None:
    """Those of one step, of many, and of decodes in a row; see also tests/identity."""
    model, own = load_model(MODEL), load_gpu(gpu)
    cost = RooflineCost(
        model=model, gpu=own, launch_s=launch_s, cascade_rule=rule_of(model, own, 1, "")
    )
    once = cost.reading_once(NUM_TOKENS)
    assert once is cost.reading_once(NUM_TOKENS)
    assert cost.reading_once(0) is cost
    rows = np.array([tuple(shape) for shape in shapes()], np.int64)
    for shape, row in zip(shapes(), once.columns(rows), strict=True):
        step = cost.step(shape)
        assert step == StepCost._make(row.tolist())
        assert step == once.step(BatchShape(*shape))
        assert sum(step.parts) == pytest.approx(step.total_s, rel=1e-12)


def test_a_prefix_read_once_is_priced_as_a_chunk_of_all_and_a_merge() -> None:
    cost = cost_of()
    plain = cost.model if isinstance(cost, HostAhead) else cost
    decodes = shapes()[0]
    each, once = plain.step(BatchShape(*decodes)), plain.step(decodes)
    saved = once.total_s - each.total_s
    assert saved < 0.0
    own = plain.step(BatchShape(64, 64 * 276, 0, 0, 0, 0)).decode_attention_s
    chunk = plain.step(BatchShape(0, 0, 1, 64, NUM_TOKENS, 64 * NUM_TOKENS))
    more = once.decode_attention_s - own - chunk.prefill_attention_s
    layers = 32 * 16.4e-6
    assert layers < more < 1.1 * layers
    # the same below what the rule asks for
    for few in (
        SharingShape.of(decodes, 240),
        SharingShape.of((7, 7 * 1_300, 0, 0, 0, 0), NUM_TOKENS),
        SharingShape.of((12, 12 * 1_300, 0, 0, 0, 0), NUM_TOKENS),
    ):
        assert plain.step(few) == plain.step(BatchShape(*few))


def test_the_start_of_its_kernels_may_be_given() -> None:
    model, own = load_model(MODEL), load_gpu("a100_sxm")
    rule = rule_of(model, own, 1, "auto")
    free, slow = (
        RooflineCost(
            model=model, gpu=own, cascade_rule=rule, cascade_layer_latency_s=each
        )
        for each in (0.0, 1e-3)
    )
    apart = slow.step(shapes()[0]).total_s - free.step(shapes()[0]).total_s
    assert apart == pytest.approx(32e-3)
    told = slow.describe()
    assert told["parameters"]["cascade_layer_latency_s"]["source"] == "given"
    assert told["cascade"]["num_sms"] == 108


def test_decodes_that_read_a_prefix_once_are_no_whole_graph() -> None:
    """Attention is launched between pieces of graphs: slow hosts let steps wait."""
    plain = cost_of(gpu="h100_sxm")
    plain = plain.model if isinstance(plain, HostAhead) else plain
    slow = replace(plain, launch_s=3e-4)
    decodes = shapes()[0]
    assert slow.step(BatchShape(*decodes)) == plain.step(BatchShape(*decodes))
    assert slow.reading_once(NUM_TOKENS).launching_s(64, 0) == pytest.approx(
        3e-4 * (5 * 32 + 4)
    )
    assert slow.step(decodes).total_s > 3e-4 * 5 * 32


def test_whole_graphs_of_0_11_0_read_no_prefix_once() -> None:
    decodes, _, mixed, _ = shapes()
    for release, is_read in (("0.11.0", False), ("0.11.2", True), ("0.11", True)):
        cost = cost_of(engine_version=release)
        assert (cost.step(decodes) != cost.step(BatchShape(*decodes))) == is_read
        assert cost.step(mixed) != cost.step(BatchShape(*mixed))


def test_a_slower_engine_reads_as_much_once() -> None:
    slowed = Slowed(cost_of())
    whole = slowed.step(shapes()[0]).total_s
    slowed.factor = 2.0
    assert slowed.step(shapes()[0]).total_s == 2.0 * whole
    once = slowed.reading_once(NUM_TOKENS)
    assert once.step(BatchShape(*shapes()[0])).total_s == 2.0 * whole
    slowed.factor = 3.0
    assert once.factor == 3.0


def run(**engine: Any) -> Any:
    prefixes = {
        "kind": "system_prompts",
        "num_groups": engine.pop("num_groups", 1),
        "tokens": {"kind": "fixed", "tokens": 2_000},
    }
    synthetic = {
        "num_requests": 200,
        "arrivals": {"kind": "poisson", "rate": 60.0},
        "prompt_tokens": {"kind": "fixed", "tokens": 20},
        "output_tokens": {"kind": "fixed", "tokens": 100},
        "prefixes": prefixes,
    }
    told = {"model": MODEL, "gpu": "a100_sxm", "engine_version": "0.13"}
    config = {"workload": {"synthetic": synthetic}, "engine": told | engine}
    return Simulation(parse_config(config)).run()


def test_one_system_prompt_is_read_once_and_several_are_not() -> None:
    each, once = (
        run(disable_cascade_attn=each).summary["mean_tpot_ms"] for each in (True, False)
    )
    assert once < 0.9 * each
    of_two = (
        run(num_groups=2, disable_cascade_attn=each).steps["latency_s"]
        for each in (True, False)
    )
    first, second = of_two
    # but while only one of both runs
    assert (first == second).mean() > 0.9


def test_later_releases_take_as_long_as_without() -> None:
    told = run(engine_version="0.33"), run(engine_version="0.13")
    assert ["cascade" in each.summary["cost"] for each in told] == [False, True]
