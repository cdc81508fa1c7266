"""All-reduces by size, ranks and link; experts that ranks divide."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.costs import RooflineCost
from sim.costs.experts.routed import busiest_rank
from sim.costs.rates.collectives import all_reduce_s, reaching
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.interconnects import (
    INTERCONNECTS,
    described,
    link_of,
    load_interconnect,
)
from sim.simulation.run import Simulation
from tests.shared import shared
from tests.sim.config.test_config import minimal
from tests.sim.costs.test_costs import BARE, H200, LLAMA_8B, MOE, ROUND, chunk, decodes

LINKS = st.sampled_from(sorted(INTERCONNECTS))


@pytest.mark.parametrize(
    ("system", "name", "median", "ninth"),
    [
        ("a100_sxm", "nvlink3", 0.13, 0.32),
        ("h100_sxm", "nvlink4", 0.07, 0.20),
        ("h200_sxm", "nvlink4", 0.07, 0.20),
    ],
)
def test_published_all_reduces(system, name, median, ninth):
    folder = shared(f"profiles/aiconfigurator/{system}/comm")
    (path,) = folder.glob("vllm-*/custom_allreduce_perf.parquet")
    rows = pd.read_parquet(path)
    rows = rows[rows["backend"] == "vllm_graph"]
    link = load_interconnect(name)
    errors = [
        abs(
            all_reduce_s(link, row.num_gpus, 2 * row.message_size) * 1e3 / row.latency
            - 1
        )
        for row in rows.itertuples()
        if 2 * row.message_size <= 64 << 20
    ]
    assert len(errors) >= 50
    assert np.median(errors) <= median
    assert np.quantile(errors, 0.9) <= ninth


# Published sweeps of NCCL without peer access, microseconds of float32 sums by bytes.
# Four RTX 4090 of PCIe 4 (tinygrad/open-gpu-kernel-modules, pull request 22), two V100
# of PCIe 3 in a virtual machine (notes on an Azure NC12s_v3, NCCL_P2P_LEVEL=NVL), two
# RTX 2080 Ti behind one switch of PCIe 3 (Anthony-Hoo.github.io, June 2025) and four
# RTX 5090 of PCIe 5 (NVIDIA/nccl-tests, issue 287). Four RTX PRO 6000 of a server of
# PCIe 5 with NCCL_P2P_DISABLE=1 (gardenlinux/gardenlinux, issue 4556).
SIZES = [1 << exponent for exponent in range(15, 27)]
SWEEPS = {
    "4090": [
        *(18.78, 25.80, 42.44, 66.25, 94.11, 152.7),
        *(271.8, 510.6, 1000.9, 1993.2, 3966.7, 7888.2),
    ],
    "v100": [
        *(22.45, 34.72, 50.87, 71.13, 110.4, 187.0),
        *(339.7, 690.1, 1264.0, 2506.6, 4998.0, 9966.8),
    ],
    "2080ti": [
        *(24.62, 40.10, 56.90, 86.04, 150.2, 279.5),
        *(539.6, 1065.1, 2113.2, 4209.7, 8399.7, 16801.0),
    ],
    "5090": [
        *(31.64, 32.58, 35.19, 45.84, 70.24, 93.45),
        *(152.9, 261.4, 490.3, 935.7, 1860.0, 3708.9),
    ],
    "pro6000": [
        *(16.65, 18.45, 27.31, 45.85, 84.93, 102.1),
        *(192.3, 385.4, 717.6, 1396.0, 2762.6, 5484.4),
    ],
}


def ring_errors(link, num_ranks, name):
    return [
        all_reduce_s(link, num_ranks, size) * 1e6 / us - 1
        for size, us in zip(SIZES, SWEEPS[name], strict=True)
    ]


@pytest.mark.parametrize(("rate", "worst"), [(12.75e9, 0.13), (None, 0.13)])
def test_rings_without_peer_access(rate, worst):
    link = load_interconnect("pcie4_no_peer")
    if rate is not None:
        link = replace(link, bytes_per_s=rate)
    errors = ring_errors(link, 4, "4090")
    assert max(map(abs, errors)) < worst
    assert np.median(np.abs(errors)) < 0.06


@pytest.mark.parametrize(
    ("name", "sweep"),
    [("pcie3_no_peer", "v100"), ("pcie3_shared_no_peer", "2080ti")],
)
def test_pairs_without_peer_access(name, sweep):
    errors = ring_errors(load_interconnect(name), 2, sweep)
    assert max(map(abs, errors)) < 0.17
    assert np.median(np.abs(errors)) < 0.05


def test_rings_of_cards_that_had_no_part_in_the_fit():
    errors = ring_errors(load_interconnect("pcie5_no_peer"), 4, "5090")
    of_long = [e for e, size in zip(errors, SIZES, strict=True) if size >= 256 << 10]
    assert max(map(abs, of_long)) < 0.14
    assert np.median(np.abs(of_long)) < 0.03


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # GB/s of copies both ways at once, halved: pairs of GPUs without peer access
        ("pcie3_no_peer", [5.7, 7.8]),
        ("pcie4_no_peer", [10.6, 15.3, 15.4, 10.1, 14.8]),
        ("pcie5_no_peer", [21.5, 28.3, 22.8, 26.4]),
        # two RTX 4090 at 8 lanes each (gist of muellerzr, April 2024) and two RTX 5090
        # (Panchovix, September 2025, who gives both 8 lanes), which had no part in it
        ("pcie4_x8_no_peer", [6.7, 8.4]),
        ("pcie5_x8_no_peer", [13.4, 15.0]),
    ],
)
def test_link_classes_lie_within_published_copies(name, published):
    rate = load_interconnect(name).bytes_per_s / 1e9
    assert min(published) <= rate <= max(published)
    assert rate == pytest.approx(float(np.median(published)), rel=0.15)


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        # Two RTX 4090 (muellerzr's gist, April 2024: 12 GB/s one way, as 8 lanes have)
        # and two RTX 5090 (Panchovix, 2025, who says 8 lanes each), GB/s as above
        ("pcie4_x8_no_peer", 8.4),
        ("pcie5_x8_no_peer", 15.0),
    ],
)
def test_pairs_of_desktops_had_no_part_in_the_share_of_their_lanes(name, copies):
    told = described(load_interconnect(name))
    assert told["value"] == pytest.approx(copies * 1e9, rel=0.21)
    least, most = told["interval"]
    assert least <= copies * 1e9 <= most


def test_a_host_whose_rings_are_slower_lies_in_the_interval():
    """Four RTX PRO 6000 of PCIe 5 fit at their own rate, two thirds of the class's."""
    link = load_interconnect("pcie5_no_peer")
    least, _ = described(link)["interval"]
    reached = SIZES[-1] * 1.5 / (SWEEPS["pro6000"][-1] * 1e-6)
    assert least < reached < 0.7 * link.bytes_per_s
    own = replace(link, bytes_per_s=reached)
    errors = ring_errors(own, 4, "pro6000")
    assert max(map(abs, errors)) < 0.28
    assert np.median(np.abs(errors)) < 0.08


def test_a_link_without_peer_access_is_slower_and_consumer_cards_have_none():
    for tokens in (1, 64, 2048):
        message = tokens * 8192
        slow_s, fast_s = (
            all_reduce_s(load_interconnect(name), 2, message)
            for name in ("pcie5_no_peer", "pcie5")
        )
        assert slow_s > 1.2 * fast_s
    assert not link_of(load_gpu("rtx_4090")).has_peer_access
    assert link_of(load_gpu("rtx_5090"), 4).name == "pcie5_no_peer"
    # two in a desktop divide its lanes, and no more fit
    assert link_of(load_gpu("rtx_pro_6000"), 2).name == "pcie5_x8_no_peer"
    assert link_of(load_gpu("rtx_3090"), 2).name == "pcie4_x8_no_peer"
    assert link_of(load_gpu("rtx_5090"), 4).name == "pcie5_no_peer"
    assert link_of(load_gpu("rtx_pro_6000_server"), 2).name == "pcie5_no_peer"
    assert link_of(load_gpu("l40s"), 2).name == "pcie4_no_peer"
    # of others NCCL uses none across host bridges
    assert link_of(load_gpu("l40s")).name == "pcie4_no_peer"
    assert link_of(load_gpu("t4")).name == "pcie3_no_peer"
    assert link_of(load_gpu("h100_sxm")).has_peer_access


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["pcie3", "pcie4", "pcie5"])
def test_the_way_through_the_host_is_never_the_faster_one(name, num_ranks):
    with_access, without = load_interconnect(name), load_interconnect(f"{name}_no_peer")
    relaxed = replace(without, bytes_per_s=1.1 * without.bytes_per_s)
    for size in 2 ** np.arange(12, 31):
        fast_s, slow_s, relaxed_s = (
            all_reduce_s(link, num_ranks, int(size))
            for link in (with_access, without, relaxed)
        )
        assert slow_s >= fast_s
        assert slow_s / 1.1 <= relaxed_s <= slow_s  # as `size` asks of a faster link
    # a rate that rings were seen to reach is what they reach
    reached_s = all_reduce_s(reaching(without, 1e10), num_ranks, 1 << 30)
    sent = 2 * (num_ranks - 1) / num_ranks * (1 << 30)
    assert reached_s == pytest.approx(sent / 1e10, rel=0.01)


def test_a_rate_that_was_fitted_replaces_that_of_the_link():
    prompts = chunk(2048)
    for gpu in (load_gpu("rtx_pro_6000"), H200):
        cost = RooflineCost(model=LLAMA_8B, gpu=gpu, tensor_parallel_size=2)
        slow, slower = (replace(cost, link_bytes_per_s=rate) for rate in (12e9, 6e9))
        times = [one.step(prompts).allreduce_s for one in (cost, slow, slower)]
        assert times[0] < times[1] < times[2]
        sent = 64 * 2048 * LLAMA_8B.hidden_size * 2  # two ranks: once around is whole
        assert times[2] - times[1] == pytest.approx(sent / 12e9, rel=0.01)
        assert slow.describe()["link_bytes_per_s"] == 12e9
    with pytest.raises(ConfigError, match="link_bytes_per_s must be a finite"):
        RooflineCost(model=LLAMA_8B, gpu=H200, link_bytes_per_s=0.0)


@given(
    LINKS, st.sampled_from([2, 4, 8]), st.integers(1, 1 << 30), st.integers(0, 1 << 20)
)
def test_more_bytes_take_no_less(name, num_ranks, num_bytes, more):
    link = INTERCONNECTS[name]
    few_s = all_reduce_s(link, num_ranks, num_bytes)
    assert 0.0 < few_s <= all_reduce_s(link, num_ranks, num_bytes + more)
    # no rank sends less than its share of the message, twice
    sent = 2 * (num_ranks - 1) / num_ranks * num_bytes
    assert few_s >= sent / link.bytes_per_s


def test_one_rank_waits_for_nobody():
    link = load_interconnect("NVLink4")
    assert all_reduce_s(link, 1, 1 << 20) == 0.0
    assert all_reduce_s(link, 8, 0) == 0.0


def test_a_slower_link_is_named_in_the_configuration():
    fast, slow = (
        RooflineCost(
            model=LLAMA_8B, gpu=H200, tensor_parallel_size=4, interconnect=name
        )
        for name in ("nvlink4", "pcie5")
    )
    step = decodes(64, 1000)
    message = 64 * 4096 * 2
    expected = 64 * all_reduce_s(load_interconnect("pcie5"), 4, message)
    assert slow.step(step).allreduce_s == pytest.approx(expected)
    assert fast.step(step).allreduce_s < 0.3 * expected
    assert slow.step(step).gemm_s == fast.step(step).gemm_s
    assert slow.describe()["interconnect"] == "pcie5"
    assert slow.describe()["link"]["value"] == 64e9
    assert {"interconnect", "link"}.isdisjoint(
        RooflineCost(model=LLAMA_8B, gpu=H200).describe()
    )


def test_a_link_without_peer_access_says_its_interval():
    card = RooflineCost(
        model=LLAMA_8B, gpu=load_gpu("rtx_4090"), tensor_parallel_size=2
    )
    link = card.describe()["link"]
    low, high = link["interval"]
    assert low < link["value"] < high
    assert "published for 8 machines" in link["source"]
    assert replace(card, link_bytes_per_s=9e9).describe()["link"]["source"] == "given"


def test_links_that_are_not_known_or_too_small_are_refused():
    with pytest.raises(ConfigError, match="did you mean nvlink"):
        load_interconnect("nvlink9")
    many = replace(LLAMA_8B, num_attention_heads=64)
    with pytest.raises(ConfigError, match="nvlink4 connects 8 GPUs; got tensor_par"):
        RooflineCost(
            model=many, gpu=H200, tensor_parallel_size=16, interconnect="nvlink4"
        )


@pytest.mark.parametrize(("num_tokens", "ranks"), [(4, 4), (16, 8), (256, 8), (64, 2)])
def test_the_busiest_rank_is_that_of_many_draws(num_tokens, ranks):
    random = np.random.default_rng(0)
    touched, rows = [], []
    for _ in range(400):
        chosen = np.argsort(random.random((num_tokens, 128)), axis=1)[:, :8]
        counts = np.bincount(chosen.ravel(), minlength=128).reshape(ranks, -1)
        touched.append((counts > 0).sum(axis=1).max())
        rows.append(counts.sum(axis=1).max())
    found = busiest_rank(128, 8, num_tokens, ranks)
    assert found[0] == pytest.approx(np.mean(touched), rel=0.08)
    assert found[1] == pytest.approx(np.mean(rows), rel=0.08)


def test_ranks_that_divide_the_experts_wait_for_the_busiest():
    whole, divided = (
        RooflineCost(
            model=MOE,
            gpu=ROUND,
            tensor_parallel_size=2,
            enable_expert_parallel=given_,
            **BARE,
        )
        for given_ in (False, True)
    )
    few, many = decodes(1, 10), decodes(4000, 10)
    assert divided.step(few).gemm_s > whole.step(few).gemm_s
    assert divided.step(many).gemm_s == pytest.approx(whole.step(many).gemm_s, rel=0.05)
    assert divided.step(few).allreduce_s == whole.step(few).allreduce_s
    assert divided.describe()["enable_expert_parallel"]


OWN = {"bytes_per_s": 1.8e11, "is_switched": True, "hop_s": 1e-6, "max_gpus": 16}


def test_links_of_ones_own(tmp_path):
    path = tmp_path / "optical.yaml"
    path.write_text(yaml.safe_dump(OWN))
    read, mapped = load_interconnect(str(path)), load_interconnect(OWN)
    assert (read.name, mapped.name) == ("optical", "user")
    assert replace(read, name="user") == mapped
    assert mapped.max_gpus == 16
    path.write_text("bytes_per_s: 2e11\nis_switched: false\nhop_s: 0\nmax_gpus: 8\n")
    assert load_interconnect(str(path)).bytes_per_s == 2e11


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bytes_per_s": -1}, "bytes_per_s must be a number from"),
        ({"max_gpus": 8.5}, "max_gpus must be a whole number"),
        ({"is_switched": 1}, "is_switched must be true or false"),
        ({"hops": 1}, "hops is no field of an interconnect"),
        ({"name": 3}, "name must be a string"),
    ],
)
def test_wrong_links_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        load_interconnect(OWN | changed)


def test_missing_parts_of_links_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="hop_s is missing"):
        load_interconnect({key: OWN[key] for key in OWN if key != "hop_s"})
    with pytest.raises(ConfigError, match="no readable interconnect file"):
        load_interconnect(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("key", ["allreduce_latency_s", "allreduce_efficiency"])
def test_keys_of_one_price_for_all_sizes_say_what_to_give(key: str) -> None:
    data = minimal() | {"cost": {"kind": "roofline", key: 0.5}}
    with pytest.raises(ConfigError, match=rf"^cost\.{key} is gone: .*interconnect"):
        Simulation(parse_config(data))
