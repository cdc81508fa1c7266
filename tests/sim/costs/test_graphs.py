"""Steps that fill CUDA graphs up: sizes by release, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.costs.roofline import RooflineCost
from sim.costs.roofline.graphs import padded, release_sizes
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from sim.scheduler.generations import OURS
from sim.simulation.assemble import graph_sizes, link_warnings

V1, V0 = OURS["v1"].graphs, OURS["v0"].graphs
EIGHTS = (1, 2, 4, *range(8, 257, 8))


@pytest.mark.parametrize(
    ("rule", "version", "seqs", "budget", "sizes"),
    [
        (V0, "0.7.3", 20, None, (1, 2, 4, 8, 16, 24)),
        (V0, "0.2.7", None, None, EIGHTS),
        (V0, "0.7.3", 1000, None, EIGHTS),
        (V1, "0.8.5", 64, 8192, (*EIGHTS, *range(264, 513, 8))),
        (V1, "0.9.2", 8, 100, (1, 2, 4, *range(8, 97, 8))),
        (V1, "0.10.0", 64, 8192, (1, 2, 4, *range(8, 129, 8))),
        (V1, "0.11.0", 256, 8192, (*EIGHTS, *range(264, 513, 8))),
        (V1, "0.11.2", 256, 8192, (*EIGHTS, *range(272, 513, 16))),
        (V1, "0.11", 256, 8192, (*EIGHTS, *range(272, 513, 16))),
        (V1, "0.15", 128, 2048, EIGHTS),
        (V1, "0.15", 2, 2048, (1, 2, 4)),
        (V1, "0.11.2", 64, 20, (1, 2, 4, 8, 16)),
        (V1, "0.20", 64, 20, (1, 2, 4, 8, 16)),
        (V1, "0.21", 64, 20, (1, 2, 4, 8, 16, 20)),
        (V1, "0.33", 64, 20, (1, 2, 4, 8, 16, 20)),
        (V1, "0.33", 9, 2048, (1, 2, 4, 8, 9, 16)),
    ],
)
def test_sizes_of_releases(
    rule: Any, version: str, seqs: int | None, budget: int | None, sizes: Any
) -> None:
    assert release_sizes(rule, version, seqs, budget) == sizes


def test_a_step_takes_the_next_size_and_beyond_all_its_own() -> None:
    tokens = [padded((1, 2, 4, 8), count) for count in (1, 3, 5, 8, 9)]
    assert tokens == [1, 4, 8, 8, 9]
    assert padded((), 7) == 7


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"])
def test_what_fills_up_is_computed_but_not_attended_to(model: str) -> None:
    plain = RooflineCost(model=load_model(model), gpu=load_gpu("h100_sxm"))
    filled = replace(plain, graph_sizes=EIGHTS)
    shapes = [BatchShape(n, 500 * n, 0, 0, 0, 0) for n in (9, 16)]
    nine, sixteen = (filled.step(shape) for shape in shapes)
    without = plain.step(shapes[0])
    assert nine.decode_attention_s == without.decode_attention_s
    assert nine.head_s == without.head_s
    assert nine.gemm_s > without.gemm_s
    if not plain.model.num_experts:
        assert nine.gemm_s == sixteen.gemm_s == plain.step(shapes[1]).gemm_s
    else:  # tokens that fill up are all alike
        assert nine.gemm_s < sixteen.gemm_s
    rows = np.array(shapes, dtype=np.int64)
    assert filled.columns(rows)[:, 0].tolist() == [nine.total_s, sixteen.total_s]
    assert filled.describe()["graph_sizes"] == list(EIGHTS)
    assert "graph_sizes" not in plain.describe()


def engine(**keys: Any) -> Any:
    workload = {"preset": {"name": "azure_conv_2023", "num_requests": 3}}
    own = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm", **keys}
    return parse_config({"workload": workload, "engine": own}).engine


def test_where_no_graphs_run_sizes_are_refused() -> None:
    assert graph_sizes(engine()) == ()
    assert graph_sizes(engine(cudagraph_capture_sizes=[16, 8, 8])) == (8, 16)
    key: dict[str, Any] = {"cudagraph_capture_sizes": "release"}
    assert graph_sizes(engine(**key, max_num_seqs=2)) == (1, 2, 4)
    with pytest.raises(ConfigError, match="runs without CUDA graphs"):
        graph_sizes(engine(**key, enforce_eager=True))
    with pytest.raises(ConfigError, match="cacheflow generation has no such key"):
        engine(**key, scheduler="cacheflow")


def test_gpus_without_peer_access_are_named() -> None:
    pair: dict[str, Any] = {"tensor_parallel_size": 2}
    card, model = load_gpu("rtx_4090"), load_model("Qwen/Qwen3-32B")
    (line,) = link_warnings(engine(**pair), card, model)
    assert "rtx_4090 has no peer access" in line
    assert not link_warnings(engine(), card, model)
    assert not link_warnings(engine(**pair, interconnect="pcie4"), card, model)
    assert not link_warnings(engine(**pair), load_gpu("h100_sxm"), model)
    (line,) = link_warnings(engine(**pair), load_gpu("rtx_pro_6000"), model)
    assert "is taken to have no peer access" in line
    assert "(pcie5_x8_no_peer): 1.6 ms for one of 2,048 tokens" in line
    assert "0.61 ms over pcie5, 0.8 ms over pcie5_no_peer, 1.3 ms over" in line
    (line,) = link_warnings(engine(tensor_parallel_size=4), load_gpu("l40s"), model)
    assert "shared" not in line  # one switch joins two
    # no link by name joins as many
    sixteen = engine(tensor_parallel_size=16)
    assert not link_warnings(sixteen, load_gpu("l40s"), model)
