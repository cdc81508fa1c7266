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
