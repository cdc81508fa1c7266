"""Names of candidates, such as a table and a file can bear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.studies.planning.answer.verdict import host_memory_sentences
from sim.studies.planning.phases.candidates import candidates_of
from sim.studies.planning.spec import load_plan
from tests.sim.studies.planning.plans import small, solved, written

if TYPE_CHECKING:
    from pathlib import Path


def test_policies_are_named_by_kind_and_keys(tmp_path: Path) -> None:
    rules = [None, "conservative", {"kind": "watermark", "share": 0.02}]
    asked = small(candidates={"gpu": ["h200_sxm"], "admission": rules})
    found = candidates_of(load_plan(written(asked, tmp_path)))
    ends = [each.name.partition("admission=")[2] for each in found]
    assert ends == ["None", "conservative", "watermark-share=0.02"]


def test_host_memory_is_paid_for_by_the_gib(tmp_path: Path) -> None:
    prices = {"per_gpu_hour": {"h200_sxm": 4.0}, "per_host_gib_hour": 0.005}
    sizes = {"gpu": ["h200_sxm"], "kv_offloading_size": [None, 256]}
    plan = load_plan(written(small(candidates=sizes, prices=prices), tmp_path))
    without, tier = candidates_of(plan)
    assert (without.host_gib, tier.host_gib) == (0.0, 256.0)
    costs = [
        plan.parsed_prices.per_hour(each.gpu, 2 * each.num_gpus, 2 * each.host_gib)
        for each in (without, tier)
    ]
    assert costs == [8.0, 8.0 + 2.56]


@pytest.mark.parametrize("shares", [False, True])
def test_host_memory_behind_prompts_that_share_nothing_is_told(
    tmp_path: Path, *, shares: bool
) -> None:
    """It cannot be worth anything there, and most public traces tell lengths alone."""
    asked = small(candidates={"kv_offloading_size": [None, 64]})
    asked["engine"] |= {"gpu": "h200_sxm"}
    asked["workload"]["synthetic"] |= {"num_requests": 200, "rate_scale": 0.5}
    if shares:
        prefixes = {"kind": "system_prompts", "num_groups": 2}
        prefixes["tokens"] = {"kind": "fixed", "tokens": 16}
        asked["workload"]["synthetic"]["prefixes"] = prefixes
    notes = solved(asked, tmp_path).data["notes"]
    assert any("no prompt begins as another one" in each for each in notes) != shares


def test_a_link_is_paid_for_by_its_speed(tmp_path: Path) -> None:
    prices = {"per_gpu_hour": {"h200_sxm": 4.0}, "per_link_gb_s_hour": 0.01}
    links = [
        {"load_bytes_per_s": rate, "store_bytes_per_s": 2e10} for rate in (2e10, 5e10)
    ]
    axes = {"gpu": ["h200_sxm"], "kv_offloading_link": links}
    asked = small(candidates=axes, prices=prices)
    asked["engine"] |= {"kv_offloading_size": 64}
    plan = load_plan(written(asked, tmp_path))
    found = candidates_of(plan)
    assert [each.link_gb_per_s for each in found] == [20.0, 50.0]
    costs = [
        plan.parsed_prices.per_hour(each.gpu, 1, each.host_gib, each.link_gb_per_s)
        for each in found
    ]
    assert costs == pytest.approx([4.2, 4.5])


def told(size: float | None, replicas: int | None, cost: float, rate: float) -> Any:
    """Return a candidate as ``plan.json`` has it."""
    found = {
        "gpu": "h200_sxm",
        "engine": {"kv_offloading_size": size, "max_num_seqs": 8},
        "varied": {},
        "rate": {"value": rate},
    }
    if replicas is not None:
        found |= {"replicas": replicas, "num_gpus": replicas, "cost_per_hour": cost}
    return found


def test_what_host_memory_saves_is_a_sentence() -> None:
    plan = {"prices": {"currency": "USD"}}
    without = told(None, 7, 28.0, 1.0)
    for tier, said in (
        (
            told(256, 5, 25.12, 1.5),
            "saves 2 of 7 h200_sxm, and costs 2.88 USD an hour less",
        ),
        (
            told(256, 7, 35.17, 1.1),
            "saves none of 7 h200_sxm, and costs 7.17 USD an hour more",
        ),
        (
            told(256, 8, 40.0, 0.9),
            "takes 1 h200_sxm more, and costs 12.00 USD an hour more",
        ),
        (told(256, None, 0.0, 0.9), "changes no fleet that was found"),
    ):
        (sentence,) = host_memory_sentences(plan, [without, tier])
        rate = f"{tier['rate']['value']:.3g}"
        assert sentence == (
            f"256 GiB of host memory behind each engine {said}: one engine holds "
            f"{rate} requests/s, 1 without."
        )
    assert not [*host_memory_sentences(plan, [without])]
