"""What candidates are called: names that a table and a file can bear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.studies.planning.candidates import candidates_of
from sim.studies.planning.spec import load_plan
from tests.sim.planning.plans import small, written

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
