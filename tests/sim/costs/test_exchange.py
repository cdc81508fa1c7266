"""Tokens on their way to experts of other ranks: bytes by hand, seconds as measured."""

from __future__ import annotations

import pandas as pd
import pytest

from sim.costs import RooflineCost
from sim.costs.experts.exchange import Exchange, Nodes, token_bytes
from sim.costs.linear import LinearCost
from sim.costs.steps.lock_step import DUMMY, steps_together
from sim.costs.steps.speculative import FixedDrafter, ModelDrafter, SpeculativeCost
from sim.hardware.interconnects import INTERCONNECTS, Interconnect
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import EMPTY_SHAPE, BatchShape
from tests.shared import shared
from tests.sim.costs.test_costs import BARE, H200, MOE, ROUND, decodes

DEEPSEEK = load_model("deepseek-ai/DeepSeek-V3")
NDR = INTERCONNECTS["infiniband_ndr"]
H800 = Interconnect("h800", 200e9, is_switched=True, hop_s=1e-6, max_gpus=8)


def test_bytes_by_hand() -> None:
    # 7,168 values of a byte, and a scale of 4 bytes for each 128; back in bfloat16
    assert token_bytes(DEEPSEEK) == (7168 + 4 * 56, 2 * 7168)
    two_nodes = Nodes(16, INTERCONNECTS["nvlink4"], NDR)
    gather = Exchange(two_nodes, 1, 8, *token_bytes(DEEPSEEK))
    # of 1,600 tokens all but its own hundred, and half of them over eight ports
    assert gather.tokens_moved(1600, 300) == (1500.0, 100.0)
    gathered_s = 1500 / (0.7 * 450e9), 100 / (0.8 * 50e9)
    around_s = 4e-6 + 7 * 1e-6 + 5e-6
    assert gather.seconds(1600, 300) == pytest.approx(
        2 * around_s + (7392 + 14336) * max(gathered_s)
    )


def test_gpus_of_a_rank_that_hold_parts_of_experts_share_its_tokens() -> None:
    two_nodes = Nodes(16, INTERCONNECTS["nvlink4"], NDR)
    parts = Exchange(two_nodes, 2, 8, *token_bytes(DEEPSEEK), are_whole=False)
    # eight ranks of two GPUs: of 1,600 tokens all but a rank's own two hundred
    assert parts.tokens_moved(1600, 300) == (1400.0, 100.0)


def test_deep_ep_sends_tokens_where_their_experts_are() -> None:
    two_nodes = Nodes(16, INTERCONNECTS["nvlink4"], NDR)
    sizes = token_bytes(DEEPSEEK)
    each = Exchange(two_nodes, 1, 8, *sizes, backend="deepep_low_latency")
    # eight copies, half of which are for the other node
    assert each.tokens_moved(1600, 300) == (300 * 8 * 7 / 16, 300 * 4)
    once = Exchange(two_nodes, 1, 8, *sizes, backend="deepep_high_throughput")
    beside, between = once.tokens_moved(1600, 300)
    reached = 1 - (15 / 16) ** 8
    assert beside == pytest.approx(300 * reached * 7 * 2)
    assert between == pytest.approx(300 * (1 - 0.5**8))


@pytest.mark.parametrize(
    ("gpus", "dispatch_us", "combine_us"),
    [
        (8, 77, 114),
        (16, 118, 195),
        (32, 155, 273),
        (64, 173, 314),
        (128, 192, 369),
        (256, 194, 360),
    ],
)
def test_published_low_latency_kernels(
    gpus: int, dispatch_us: float, combine_us: float
) -> None:
    # DeepEP's own tables: 128 tokens a GPU, 7,168 hidden, top 8, H800 with 400 Gb/s
    nodes = Nodes(gpus, H800, NDR)
    for size, measured_us in zip(
        token_bytes(DEEPSEEK), (dispatch_us, combine_us), strict=True
    ):
        one_way = Exchange(nodes, 1, 8, size, 0.0, "deepep_low_latency")
        back = Exchange(nodes, 1, 8, 0.0, 0.0, "deepep_low_latency")
        found_s = one_way.seconds(128 * gpus, 128) - back.seconds(0, 0) / 2
        assert found_s * 1e6 == pytest.approx(measured_us, rel=0.17)


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm"])
def test_published_gathers(system: str) -> None:
    folder = shared(f"profiles/aiconfigurator/{system}/comm")
    (path,) = folder.glob("nccl-*/nccl_perf.parquet")
    table = pd.read_parquet(path)
    rows = table[
        table["op_name"].isin(["all_gather", "reduce_scatter"])
        & (table["nccl_dtype"] == "half")
        & (table["num_gpus"] == 8)
    ]
    nodes = Nodes(8, INTERCONNECTS["nvlink4"], NDR)
    found_ms = [
        Exchange(nodes, 1, 8, 2.0 * size, 0.0).seconds(1, 1) * 1e3
        - (4e-6 + nodes.around_s) * 1e3
        for size in rows["message_size"]
    ]
    off = (pd.Series(found_ms, rows.index) / rows["latency"] - 1).abs()
    assert off.median() < 0.12
    assert off.quantile(0.9) < 0.25


def test_a_step_of_all_ranks_takes_the_longest_and_what_they_do_together() -> None:
    model = RooflineCost(
        model=MOE, gpu=ROUND, data_parallel_size=3, enable_expert_parallel=True, **BARE
    )
    shapes = [decodes(4, 4000), EMPTY_SHAPE, decodes(1, 10)]
    steps = steps_together(model)(shapes)
    alone = [model.step(shape).total_s for shape in (shapes[0], DUMMY, shapes[2])]
    experts_s, exchange_s = model.together((shapes[0], DUMMY, shapes[2]))
    assert max(alone) == alone[0]
    for step, own_s in zip(steps, alone, strict=True):
        assert step.cost.total_s == alone[0] + experts_s + exchange_s
        assert step.wait_s == alone[0] - own_s
        assert sum(step.cost.parts) == pytest.approx(step.cost.total_s)
    assert experts_s > 0 < exchange_s


def test_experts_over_more_gpus_are_read_faster() -> None:
    def experts_s(dp: int, tokens: int) -> float:
        model = RooflineCost(
            model=DEEPSEEK,
            gpu=H200,
            data_parallel_size=dp,
            enable_expert_parallel=True,
            moe_layer_latency_s=0.0,
        )
        return model.together([decodes(tokens // dp, tokens)] * dp)[0]

    # 44 MB an expert, 58 layers, 32 on each of eight GPUs, at 0.84 of 4.8 TB/s
    all_read_s = 32 * 58 * 3 * 7168 * 2048 / (0.84 * 4.8e12)
    assert experts_s(8, 600) == pytest.approx(all_read_s, rel=0.1)
    assert experts_s(16, 600) < 0.6 * experts_s(8, 600)


def test_alone_it_says_what_it_said() -> None:
    plain = RooflineCost(model=MOE, gpu=ROUND, **BARE)
    assert "data_parallel_size" not in plain.describe()
    many = RooflineCost(model=MOE, gpu=ROUND, data_parallel_size=2, **BARE)
    assert many.describe()["all2all_backend"] == "allgather_reducescatter"
    assert many.step(decodes(4, 400)).gemm_s < plain.step(decodes(4, 400)).gemm_s


def test_ranks_share_the_experts_of_a_drafter() -> None:
    ranks = {"data_parallel_size": 3, "enable_expert_parallel": True}
    target = RooflineCost(model=MOE, gpu=ROUND, **ranks, **BARE)
    drafter = ModelDrafter(target, 2)
    shapes = [decodes(4, 4000), DUMMY, BatchShape(1, 10, 1, 7, 7, 28)]
    experts_s, exchange_s = target.together(shapes)
    rows = [decodes(4, 4004), decodes(1, 2), decodes(2, 19)]
    more_s = [target.together(each) for each in (shapes, rows)]
    model = SpeculativeCost(target, drafter)
    assert model.together(shapes) == (
        experts_s + sum(each[0] for each in more_s),
        exchange_s + sum(each[1] for each in more_s),
    )
    fixed = SpeculativeCost(target, FixedDrafter(0.001))
    assert fixed.together(shapes) == (experts_s, exchange_s)
    assert not hasattr(SpeculativeCost(LinearCost(0.01), drafter), "together")
