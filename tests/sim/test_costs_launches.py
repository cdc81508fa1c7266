"""Kernels that are launched one by one."""

from dataclasses import fields, replace

import pytest

from sim.config.tables import parse_config
from sim.costs import RooflineCost
from sim.costs.launches import EagerRooflineCost
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_cost_model
from tests.sim.test_costs import chunk, decodes
from tests.sim.validation.runs import config

LLAMA_8B = load_model("meta-llama/Llama-3.1-8B")
GRAPHS = RooflineCost(model=LLAMA_8B, gpu=load_gpu("h100_sxm"))
EAGER = EagerRooflineCost.of(GRAPHS)


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
    two = EagerRooflineCost.of(replace(GRAPHS, tensor_parallel_size=2))
    assert two.launching_s / EAGER.launching_s == pytest.approx(388 / 324)
    given = EagerRooflineCost.of(replace(GRAPHS, launch_s=10e-6))
    assert given.launching_s == pytest.approx(3.24e-3)
    assert given.describe()["parameters"]["launch_s"]["source"] == "configuration"
    assert "one source" in EAGER.describe()["parameters"]["launch_s"]["source"]
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
    assert type(graphs) is RooflineCost
