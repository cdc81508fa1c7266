"""Recorded schedules are executed as they are meant: logits of dense attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.calibrate.missing import torch_only

torch_only()

# ruff: noqa: E402
from calibrate.replay.tokens import MadeUpTexts, ReplayError
from calibrate.replay.truth import TruthCheck
from tests.calibrate.replays import MODES, small_run, texts_of, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Lines = list[dict[str, Any]]


@pytest.mark.parametrize(("generation", "keys", "samples"), MODES)
def test_every_logit_is_that_of_dense_attention(
    generation: str, keys: dict[str, Any], samples: int, tmp_path: Path
) -> None:
    config = small_run(generation, keys, samples)
    schedule = written(config, tmp_path)
    steps = list(schedule.steps())
    truth = TruthCheck(schedule.facts, texts_of(config)).run(steps)
    assert truth.num_steps == len(steps)
    # each query once, and again where it was recomputed up to the same token
    assert truth.num_logits >= sum(len(step.queries) for step in steps)
    assert truth.worst_error < 1e-12
    if "swap_space" in keys:
        assert truth.kinds.get("swap", 0) >= (2 if keys["swap_space"] else 0)
    if keys.get("preemption_mode") == "swap":
        assert truth.kinds["swap"] >= 2
        assert truth.kinds["copy"] >= 1


def test_kernels_that_are_launched_one_by_one_are_checked_too(tmp_path: Path) -> None:
    config = small_run(*MODES[4])
    schedule = written(config, tmp_path)
    check = TruthCheck(schedule.facts, texts_of(config), use_graphs=False)
    assert check.run(schedule.steps()).worst_error < 1e-12
    assert check.executor.variants["graphs"] == "none"


def test_a_schedule_whose_workload_is_unknown_is_checked_too(tmp_path: Path) -> None:
    schedule = written(small_run("v1", {"enable_prefix_caching": True}, 1), tmp_path)
    truth = TruthCheck(schedule.facts, MadeUpTexts()).run(schedule.steps())
    assert truth.num_logits == 60


def other_block(lines: Lines) -> None:
    """A sequence is given a block of somebody else in the middle of its life."""
    tables = [(line, name) for line in lines for name in line.get("bt", {})]
    line, name = tables[len(tables) // 2]
    keep, ids = line["bt"][name]
    line["bt"][name] = [keep, [ids[0] - 1 or ids[0] + 1, *ids[1:]]]


def dropped(key: str) -> Callable[[Lines], None]:
    def drop(lines: Lines) -> None:
        line = next(line for line in lines if key in line)
        line[key] = line[key][1:]

    return drop


def crossed(lines: Lines) -> None:
    """Two blocks come back from the CPU in each other's place."""
    line = next(line for line in lines if len(line.get("swap_in", ())) > 1)
    (first, here), (second, there), *rest = line["swap_in"]
    line["swap_in"] = [[first, there], [second, here], *rest]


def false_hit(lines: Lines) -> None:
    """A request is said to have found one block more in the cache than it has."""
    # the only one whose prompt nobody shares: its blocks cannot hold it by chance
    entry = next(entry for line in lines for entry in line["sched"] if entry[0] == "3")
    entry[1] -= 4
    entry[3] += 4


@pytest.mark.parametrize(
    ("generation", "keys", "spoil"),
    [
        ("v1", {"enable_prefix_caching": False}, other_block),
        ("v1", {"enable_prefix_caching": False}, false_hit),
        ("v0", {"preemption_mode": "swap"}, other_block),
        ("v0", {"preemption_mode": "swap"}, dropped("swap_out")),
        ("v0", {"preemption_mode": "swap"}, dropped("swap_in")),
        ("v0", {"preemption_mode": "swap"}, crossed),
        ("v0", {"preemption_mode": "swap"}, dropped("copy")),
        ("cacheflow", {"preemption_mode": "swap"}, dropped("copy")),
    ],
)
def test_a_schedule_that_moves_or_shares_wrongly_is_caught(
    generation: str,
    keys: dict[str, Any],
    spoil: Callable[[Lines], None],
    tmp_path: Path,
) -> None:
    config = small_run(generation, keys, 1 if generation == "v1" else 2)
    schedule = written(config, tmp_path, spoil)
    with pytest.raises(ReplayError, match=r"^step \d+: "):
        TruthCheck(schedule.facts, texts_of(config)).run(schedule.steps())


def test_logits_alone_catch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibrate.replay.tokens.TokenPool._check", lambda *_: None)
    config = small_run("v0", {"preemption_mode": "swap"}, 2)
    # not `crossed`: keys carry their positions, so their order in the cache is nothing
    for spoil in (dropped("swap_in"), dropped("swap_out"), dropped("copy")):
        schedule = written(config, tmp_path, spoil)
        with pytest.raises(ReplayError, match="logits of"):
            TruthCheck(schedule.facts, texts_of(config)).run(schedule.steps())
