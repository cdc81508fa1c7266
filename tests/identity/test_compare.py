"""The comparison itself finds what differs, down to a bit, and can show it again."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.config.tables import load_config, parse_config
from sim.simulation.run import Simulation
from tests.identity import compare as compare_module
from tests.identity import fuzz
from tests.identity.compare import (
    ONLY_THE_END,
    Build,
    Look,
    Run,
    assert_equal_paths,
    look_of,
    reproduction,
    run,
)
from tests.identity.random_configs import LISTED_TRACE, Case, draw_case
from tests.identity.regimes import regimes_of
from tests.identity.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas as pd

    from sim.config.tables import RunConfig
    from tests.identity.trail import Trail

CONFIG = parse_config(
    {
        "workload": {
            "trace": {
                "kind": LISTED_TRACE,
                "requests": [
                    {
                        "at": 0.75 * index,
                        "prompt": [[2 * (index % 3), 20 + 7 * (index % 4)]],
                        "out": 5 + index % 11,
                        "seg": 2 * index + 1,
                    }
                    for index in range(40)
                ],
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "block_size": 4,
            "num_gpu_blocks_override": 32,
            "async_scheduling": False,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "scheduler_reserve_full_isl": False,
        },
        "cost": {"kind": "constant", "step_s": 0.5},
    }
)
"""A run with preemptions, hits and evictions."""
CLOSELY = Look(7, told=True)


def spoil_the_chosen_path(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Run], object]
) -> None:
    def spoilt(config: RunConfig, look: Look, build: Build) -> Run:
        result = run(config, look, build)
        if build is Simulation:
            spoil(result)
        return result

    monkeypatch.setattr(compare_module, "run", spoilt)


def change_table(
    run: Run, name: str, change: Callable[[pd.DataFrame], pd.DataFrame]
) -> None:
    run.tables[name] = change(run.tables[name])


def trail(run: Run) -> Trail:
    assert run.trail is not None
    return run.trail


def add_a_bit(run: Run, name: str, column: str, row: int) -> None:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        values = frame[column].to_numpy(copy=True)
        values[row] = np.nextafter(values[row], math.inf)
        return frame.assign(**{column: values})

    change_table(run, name, change)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda run: add_a_bit(run, "steps", "latency_s", 5),
            r"steps: row 5 \(step 5\): latency_s is .*, not ",
        ),
        (
            lambda run: add_a_bit(run, "requests", "finish_s", 2),
            r"requests: row 2 \(request_id 2\): finish_s is ",
        ),
        (
            lambda run: change_table(run, "preemptions", lambda frame: frame[1:]),
            r"preemptions: row 0 \(step \d+, request_id \d+\): ",
        ),
        (
            lambda run: run.summary.update(prefix_cache_hits=1),
            r"summary: prefix_cache_hits is 1, not \d+",
        ),
        (
            lambda run: run.summary.update(num_steps=float(run.summary["num_steps"])),
            r"summary: num_steps is \d+\.0, not \d+",
        ),
        (
            lambda run: trail(run).states[4].free.reverse(),
            r"state after step 35: free queue: number 0 is ",
        ),
        (
            lambda run: trail(run).states[3].tables[0].append(1),
            r"state after step 28: tables of request \d+: ",
        ),
        (
            lambda run: trail(run).states[-1].waiting.append(1),
            r"state after step \d+: waiting: \[1\], not \[\]",
        ),
        (lambda run: trail(run).states.pop(), r"states: \d+, not \d+"),
        (
            lambda run: trail(run).given_up[1][1].append(9),
            r"tables given up: number 1 is of request \d+: .*9\], not",
        ),
        (lambda run: trail(run).given_up.pop(), r"tables given up: \d+, not \d+"),
        (
            lambda run: trail(run).states[5].moved["evicted"].append(99),
            r"state after step 42: blocks evicted since the last look, sorted: ",
        ),
    ],
)
def test_a_difference_is_found_and_told(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Run], object], words: str
) -> None:
    spoil_the_chosen_path(monkeypatch, spoil)
    with pytest.raises(AssertionError) as failure:
        assert_equal_paths(CONFIG, CLOSELY)
    assert re.search(words, str(failure.value)), str(failure.value)


@pytest.mark.parametrize("look", [ONLY_THE_END, CLOSELY])
def test_a_configuration_runs_again_from_its_file(look: Look, tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(reproduction(CONFIG, look))
    assert look_of(path.read_text()) == look
    assert load_config(path).model_dump() == CONFIG.model_dump()
    assert len(path.read_text().splitlines()) < 50


def test_a_seed_is_one_case() -> None:
    assert draw_case(5) == draw_case(5) != draw_case(6)


def test_the_command_tells_a_difference_and_makes_it_smaller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def spoil(run: Run) -> None:
        """Be wrong wherever somebody is preempted."""
        if run.summary.get("num_preemptions"):
            add_a_bit(run, "preemptions", "time_s", 0)

    spoil_the_chosen_path(monkeypatch, spoil)
    monkeypatch.setattr(fuzz, "shrink", partial(shrink, most_tries=12))
    monkeypatch.setattr(fuzz, "draw_case", lambda _: Case(CONFIG, ONLY_THE_END))
    monkeypatch.setattr("sys.argv", ["fuzz", "1"])
    assert fuzz.main() == 1
    said = capsys.readouterr().out
    assert "seed 0:\n- preemptions: row 0" in said
    assert "1 configurations, 1 on which the paths differ" in said
    path = tmp_path / "smaller.yaml"
    path.write_text(said[said.index("# observed every") : said.rindex("1 configur")])
    smaller = load_config(path)
    trace = smaller.workload.trace
    assert trace is not None
    assert 1 <= len(trace["requests"]) <= 20
    monkeypatch.setattr("sys.argv", ["fuzz", "--file", str(path)])
    assert fuzz.main() == 1


def test_what_does_not_differ_is_not_made_smaller() -> None:
    assert shrink(CONFIG, ONLY_THE_END, most_tries=3) == CONFIG


def test_the_case_of_these_tests_is_worth_it() -> None:
    compared = assert_equal_paths(CONFIG, CLOSELY)
    assert {"preemptions", "hits", "evictions"} <= regimes_of(compared)
    assert trail(compared.reference).given_up
