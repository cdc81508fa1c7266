"""Kernels that are launched one by one."""

from dataclasses import fields, replace
from statistics import mean, median
from typing import Final

import pytest

from sim.config.tables import parse_config
from sim.costs import RooflineCost
from sim.costs.roofline.graphs import rule_of
from sim.costs.roofline.launches import (
    LAUNCH_INTERVAL_S,
    LAUNCH_S,
    LaunchedRooflineCost,
    step_launches,
)
from sim.costs.sources import PIECE_LATENCY_S, pieces_told
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from sim.scheduler.v0 import V0
from sim.scheduler.v1 import V1
from sim.simulation.assemble import make_cost_model
from tests.sim.costs.test_costs import chunk, decodes
from tests.sim.studies.validation.runs import config

LLAMA_8B = load_model("meta-llama/Llama-3.1-8B")
H100 = load_gpu("h100_sxm")
GRAPHS = RooflineCost(model=LLAMA_8B, gpu=H100)
EAGER = LaunchedRooflineCost.of(GRAPHS)


def test_a_short_step_takes_as_long_as_its_launches():
    cost, plain = EAGER.step(decodes(1, 500)), GRAPHS.step(decodes(1, 500))
    # the published step, without what the host does besides
    own_s = GRAPHS.host_part_s(1)
    assert cost.total_s - own_s == pytest.approx(8.4e-3, rel=0.01)
    assert plain.total_s - own_s < 7e-3
    assert sum(cost.parts) == pytest.approx(cost.total_s, rel=1e-12)
    assert cost.parts[:-1] == plain.parts[:-1]


@pytest.mark.parametrize("shape", [chunk(2048), decodes(200, 3000), decodes(0, 0)])
def test_a_long_step_hides_its_launches(shape):
    assert EAGER.step(shape) == GRAPHS.step(shape)


def test_more_ranks_launch_more_and_the_seconds_may_be_given():
    two = LaunchedRooflineCost.of(replace(GRAPHS, tensor_parallel_size=2))
    assert two.launching_s(1, 0) / EAGER.launching_s(1, 0) == pytest.approx(388 / 324)
    given = LaunchedRooflineCost.of(replace(GRAPHS, launch_s=10e-6))
    assert given.launching_s(1, 0) == pytest.approx(3.24e-3)
    assert given.describe()["parameters"]["launch_s"]["source"] == "configuration"
    told = EAGER.describe()["parameters"]["launch_s"]
    assert "of four sources" in told["source"]
    assert told["interval"][0] <= told["value"] <= told["interval"][1]
    assert {f.name for f in fields(EAGER)} == {f.name for f in fields(GRAPHS)}
    with pytest.raises(ConfigError, match="launch_s must be a finite number >= 0"):
        replace(GRAPHS, launch_s=-1.0)


def test_enforce_eager_makes_decodes_longer():
    def made(**engine):
        data = config()
        data["engine"] |= {"gpu": "h100_sxm", "async_scheduling": False} | engine
        return make_cost_model(parse_config(data), LLAMA_8B, load_gpu("h100_sxm"))

    shape = decodes(8, 500)
    graphs, eager = made(), made(enforce_eager=True)
    assert eager.step(shape).total_s > 1.15 * graphs.step(shape).total_s
    assert "launches_s" in eager.describe()
    assert "launches_s" not in graphs.describe()
    assert type(graphs) is RooflineCost  # none of its steps waits
    given = make_cost_model(
        parse_config(config() | {"cost": {"kind": "roofline", "launch_s": 95e-6}}),
        LLAMA_8B,
        load_gpu("h100_sxm"),
    )
    assert given.describe()["piece_launches_s"] == pytest.approx(9.5e-3)


@pytest.mark.parametrize(
    ("graphs", "num_tokens", "num_prefills", "launches"),
    [
        # 32 layers of a graph, a cache write and an attention, and four besides
        (rule_of(V1.graphs, "0.26.0"), 512, 1, 100),
        (rule_of(V1.graphs, "0.26.0"), 512, 0, 0),
        (rule_of(V1.graphs, "0.26.0"), 513, 0, 324),
        (rule_of(V1.graphs, "0.11.0"), 8, 0, 0),
        # graphs of V1 are cut in decodes, too, before 0.11
        (rule_of(V1.graphs, "0.10.2"), 8, 0, 100),
        (rule_of(V1.graphs, "0.8.5"), 8, 1, 100),
        (rule_of(V0.graphs, "0.7.3"), 8, 1, 324),
        (rule_of(V0.graphs, "0.7.3"), 8, 0, 0),
        (rule_of(V1.graphs, "0.26.0"), 0, 0, 0),
    ],
)
def test_what_the_host_launches_follows_from_the_release(
    graphs, num_tokens, num_prefills, launches
):
    asked = step_launches(LLAMA_8B, 1, graphs, num_tokens, num_prefills)
    assert asked == launches


def of_release(version, launch_s=0.0, **keys):
    rule = rule_of(V1.graphs, version)
    return RooflineCost(
        model=LLAMA_8B, gpu=H100, graph_rule=rule, launch_s=launch_s, **keys
    )


@pytest.mark.parametrize(
    ("version", "shape", "is_cut"),
    [
        ("0.10.2", decodes(1, 500), True),
        ("0.8.5", decodes(256, 500), True),
        ("0.10.2", chunk(512), True),
        ("0.10.2", BatchShape(500, 500, 1, 12, 12, 78), True),
        ("0.10.2", chunk(513), False),
        ("0.10.2", decodes(0, 0), False),
        ("0.11.0", decodes(1, 500), False),
        # prompts of these are in pieces, too, which a recording has cost nothing
        ("0.26.0", chunk(512), False),
    ],
)
def test_a_layer_of_graphs_in_pieces_takes_the_gpu_longer(version, shape, is_cut):
    found, without = of_release(version), of_release(version, piece_latency_s=0.0)
    more_s = found.step(shape).total_s - without.step(shape).total_s
    assert more_s == pytest.approx(32 * PIECE_LATENCY_S if is_cut else 0.0)
    twice = of_release(version, piece_latency_s=2 * PIECE_LATENCY_S)
    assert twice.step(shape).total_s - found.step(shape).total_s == pytest.approx(
        more_s
    )


def test_steps_that_wait_for_their_pieces_are_no_longer():
    """GPU time is hidden where launching takes longer."""
    slow = [
        LaunchedRooflineCost.of(of_release("0.10", 200e-6, piece_latency_s=cut_s))
        for cut_s in (0.0, PIECE_LATENCY_S)
    ]
    shape = decodes(1, 500)
    assert slow[0].step(shape).total_s == pytest.approx(slow[1].step(shape).total_s)


def test_pieces_are_told_where_a_release_has_them_and_checked():
    told = of_release("0.10").describe()["parameters"]["piece_latency_s"]
    assert told["interval"][0] <= told["value"] <= told["interval"][1]
    assert "20059" in told["source"]
    assert "piece_latency_s" not in of_release("0.11").describe()["parameters"]
    given = of_release("0.10", piece_latency_s=1e-5).describe()["parameters"]
    assert given["piece_latency_s"] == {
        "value": 1e-5,
        "unit": "s/layer",
        "source": "given",
    }
    with pytest.raises(ConfigError, match="piece_latency_s must be a finite number"):
        of_release("0.10", piece_latency_s=-1e-6)


PIECES: Final = {
    # layers, and ms of a token in pieces and whole
    "16072": (32, [(7.63, 7.10)]),  # Llama-3.1-8B, an H100
    "20050": (28, [(11.09, 10.34)]),  # Qwen2.5-7B in four bits, an A100
    # Qwen2.5-1.5B, an A100, 1 to 20 requests/s
    "20059": (28, [(5.42, 5.02), (5.69, 5.09), (6.12, 5.39), (6.69, 6.14)]),
    # Voxtral 4B with the layers of its encoder, an H200, 1 and 4 requests at once
    "51167": (58, [(1e3 / 170.4, 1e3 / 201.1), (4e3 / 529.3, 4e3 / 655.0)]),
}
"""The same decodes by vLLM's pull requests; of 16072 7 % are told."""


def test_a_layer_of_graphs_in_pieces_takes_what_published_pairs_say():
    each = {
        name: [1e-3 * (cut - whole) / layers for cut, whole in pairs]
        for name, (layers, pairs) in PIECES.items()
    }
    assert median(map(mean, each.values())) == pytest.approx(PIECE_LATENCY_S, rel=0.05)
    low, high = pieces_told(None)["interval"]
    assert all(low <= one_s <= high for found in each.values() for one_s in found)


PUBLISHED: Final = (
    # seconds a step, its launches, whether an engine's other work is in it
    (8.4e-3, 324, False),  # Llama-3.1-8B on an H100
    (1.10 / 128, 324, True),  # the same, vLLM 10058, V0
    (1.26 / 128, 324, True),  # V1
    (0.47 / 128, 112, True),  # OPT-125M there: layers of nine kernels
    (0.41 / 128, 112, True),
    (3.454 / 209, 584, True),  # Voxtral 4B on an H200, vLLM 51167
)
"""In eager mode, where the host binds."""


def test_the_launch_of_an_ordinary_host_is_what_published_steps_say():
    rest_s = GRAPHS.step_overhead_s
    each = [(step_s - rest_s * engine) / num for step_s, num, engine in PUBLISHED]
    assert median(each) == pytest.approx(LAUNCH_S, rel=0.1)
    low, high = LAUNCH_INTERVAL_S
    assert low <= min(each) <= max(each) <= 1.05 * LAUNCH_S <= high


@pytest.mark.parametrize(
    ("engine", "is_launched"),
    [
        ({}, True),
        ({"engine_version": "0.10"}, True),
        ({"scheduler": "v0", "engine_version": "0.7.3"}, False),
        ({"scheduler": "sglang"}, False),
    ],
)
def test_releases_of_graphs_in_pieces_launch_by_default(engine, is_launched):
    """Small models wait for it, those of 8B do not; 0 leaves it out."""

    def made(name, **cost):
        data = config() | {"cost": {"kind": "roofline"} | cost}
        own = {"gpu": "h100_sxm", "async_scheduling": None, "model": name}
        data["engine"] |= own | engine
        return make_cost_model(parse_config(data), load_model(name), H100)

    def told(cost_model):
        return cost_model.describe()["parameters"].get("launch_s")

    small = "Qwen/Qwen3-0.6B"
    found, without = made(small), made(small, launch_s=0.0)
    assert without.step(chunk(600)) == plain_of(without).step(chunk(600))
    assert (told(found) is not None) == is_launched
    waits = found.step(chunk(600)).total_s - without.step(chunk(600)).total_s
    assert (waits > 4e-3) == is_launched
    assert told(made("meta-llama/Llama-3.1-8B")) is None  # none of its steps waits


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize("version", ["0.10", "0.33"])
@pytest.mark.parametrize("launch_s", [8e-6, LAUNCH_S, 60e-6])
def test_a_model_that_may_not_wait_never_does(name, version, launch_s):
    plain = RooflineCost(
        model=load_model(name),
        gpu=H100,
        graph_rule=rule_of(V1.graphs, version),
        launch_s=launch_s,
    )
    cost = LaunchedRooflineCost.of(plain)
    shapes = [chunk(tokens) for tokens in (1, 40, 512, 513, 600, 4096)]
    shapes += [decodes(num, 16) for num in (1, 40, 512, 513, 1000)]
    shapes += [BatchShape(num, num, 1, 1, 1, 1) for num in (1, 511, 512, 700)]
    waits = [cost.step(shape) != plain.step(shape) for shape in shapes]
    assert any(waits) == cost.may_wait


def plain_of(cost_model):
    """Return the roofline behind a step ahead, without launches."""
    own = getattr(cost_model, "model", cost_model)
    own = own if isinstance(own, RooflineCost) else cost_model
    values = {f.name: getattr(own, f.name) for f in fields(own) if f.init}
    return RooflineCost(**values)


@pytest.mark.parametrize("gpu", ["a100_sxm", "h100_sxm", "h200_sxm"])
def test_an_ordinary_host_keeps_ahead_of_prompts_of_an_8b(gpu):
    plain = RooflineCost(model=LLAMA_8B, gpu=load_gpu(gpu), graph_rule=V1.graphs)
    launched = LaunchedRooflineCost.of(replace(plain, launch_s=LAUNCH_S))
    slow = LaunchedRooflineCost.of(replace(plain, launch_s=4 * LAUNCH_S))
    for tokens in (16, 256, 512, 513, 2048):
        assert launched.step(chunk(tokens)) == plain.step(chunk(tokens))
    assert slow.step(chunk(16)).total_s > plain.step(chunk(16)).total_s
    assert slow.step(decodes(64, 900)) == plain.step(decodes(64, 900))


def test_a_mixed_step_may_wait_for_the_host_in_either_clock():
    shape = BatchShape(4, 400, 1, 8, 8, 36)
    plain = RooflineCost(
        model=LLAMA_8B, gpu=load_gpu("h100_sxm"), graph_rule=V1.graphs, launch_s=1e-4
    )
    launched = LaunchedRooflineCost.of(plain)
    late_s = launched.step(shape).total_s - plain.step(shape).total_s
    gpu_s = plain.step(shape).total_s - plain.host_part_s(5)
    assert late_s == pytest.approx(100e-4 - gpu_s, rel=1e-9)


def test_a_step_beyond_the_sizes_that_are_given_is_no_graph():
    data = config() | {"cost": {"kind": "roofline", "launch_s": 95e-6}}
    data["engine"] |= {"cudagraph_capture_sizes": [8, 64], "async_scheduling": False}
    made = make_cost_model(parse_config(data), LLAMA_8B, load_gpu("h100_sxm"))
    within, beyond = (made.launching_s(tokens, 1) for tokens in (64, 65))
    assert within == pytest.approx(9.5e-3)
    assert beyond == pytest.approx(made.describe()["launches_s"])
