"""The same bytes on every Python, under other hash seeds, locales and processes."""

from __future__ import annotations

import builtins
import sys
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from sim.config.tables import load_config, parse_config
from sim.simulation.simulate import simulate
from tests.identity.random_configs import draw_case
from tests.identity.same_bytes import cases
from tests.identity.ways import SHORT, _differences, compared, shortened, ways
from tests.shared import ROOT, SHARED
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FEW = (
    *("agents", "deepseek_ranks", "fleet_autoscaler", "fleet_death"),
    *("speculative_chat", "chat_offloading", "fleet_sglang_pd"),
)
PRODUCT = tuple(str(ROOT / name) for name in ("cache", "sim", "workloads"))


def test_floats_are_added_one_by_one() -> None:
    assert added([0.1] * 10) == 0.9999999999999999  # on Python 3.12 `sum` says 1.0
    assert added([]) == 0
    assert added([2, 3]) == 5


def _spied(found: set[str]) -> Any:
    """Return `sum`, which notes the lines of the product that give it floats."""
    plain = builtins.sum

    def spying(values: Iterable[Any], /, start: Any = 0) -> Any:
        frame = sys._getframe(1)
        kept = list(values)
        is_float = any(type(each) is float for each in kept)
        if is_float and len(kept) > 2 and frame.f_code.co_filename.startswith(PRODUCT):
            found.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return plain(kept, start)

    return spying


@pytest.mark.parametrize("name", FEW)
def test_no_run_adds_floats_by_the_builtin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last digits depend on the version of Python."""
    found: set[str] = set()
    config = load_config(ROOT / f"examples/{name}.yaml", SHORT[name])
    monkeypatch.setattr(builtins, "sum", _spied(found))
    simulate(config)
    assert not found


def test_no_random_run_adds_floats_by_the_builtin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: set[str] = set()
    configs = [parse_config(draw_case(seed).config.to_data()) for seed in range(12)]
    monkeypatch.setattr(builtins, "sum", _spied(found))
    for config in configs:
        simulate(config)
    assert not found


def test_rows_of_sweeps_may_name_another_python(tmp_path: Path) -> None:
    rows = {"run": [0], "versions": ['{"python": "3.11.7"}'], "mean_ttft_ms": [1.5]}
    changes = {"a": {}, "b": {"versions": ['{"python": "3.14.10"}']}}
    changes["c"] = {"mean_ttft_ms": [1.6]}
    for name, change in changes.items():
        runs = tmp_path / name / "runs"
        runs.mkdir(parents=True)
        pd.DataFrame(rows | change).to_parquet(runs / "runs.parquet")
    a, b, c = (tmp_path / name for name in "abc")
    assert _differences(a, b) == []
    assert _differences(a, c) == ["rows: mean_ttft_ms differs in 1 of 1 rows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("sweep_pressure", "deepseek_ranks", "chat_sessions"),
        *("fleet_prefix", "fleet_prefill_decode", "mooncake_conversation", "plan_chat"),
        *("plan_host_memory", "speculative_plan", "speculative_sweep"),
        "vllm_or_sglang",
    ],
)
def test_an_example_writes_the_same_bytes_in_another_way(
    name: str, tmp_path: Path
) -> None:
    (case,) = (
        each
        for each in cases(ROOT, (SHARED / "traces").resolve(), ())
        if each.name == f"examples/{name}.yaml"
    )
    assert [*compared(shortened(case), ways(), tmp_path).values()] == [[]]
