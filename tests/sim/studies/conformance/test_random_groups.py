"""Random workloads of several KV cache groups, and layers that files spell out."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from sim.errors import ConfigError, UserError
from sim.studies.conformance import DecisionDriver, driver_of
from sim.studies.conformance.conform import Comparison, Coverage, as_file
from sim.studies.conformance.random_group_pairs import random_group_pools_workload
from sim.studies.conformance.random_groups import MOST_GROUPS, random_group_workload
from sim.studies.conformance.random_v1 import random_workload
from sim.studies.conformance.shrink import shrunk
from sim.studies.conformance.workload import DecisionWorkload, parse_workload
from tests.sim.studies.conformance.decision_files import request

CONFIG = {"max_model_len": 256, "max_num_batched_tokens": 128, "max_num_seqs": 4}
TWO_PAGE_SIZES = {
    "num_layers": 24,
    "repeated": [
        *[{"num_kv_heads": 8, "head_size": 128, "sliding_window": 128}] * 3,
        {"num_kv_heads": 2, "head_size": 128},
    ],
}


def asked(*, config: Any = CONFIG, **kv: Any) -> DecisionWorkload:
    kv = {"block_size": 16, "available_bytes": 10**9} | kv
    raw = {"schema": 1, "reference": "vllm 0.33.0", "config": config, "kv": kv}
    return parse_workload(json.dumps(raw | {"requests": [request("a", 40, 5)]}), "w")


@pytest.mark.slow
def test_every_random_workload_is_served() -> None:
    """With its invariants proved at every step, and every rule met now and then."""
    coverage, kinds = Coverage(), Counter[str]()
    for seed in range(60):
        workload = random_group_workload(seed, "0.33.0")
        driver = DecisionDriver(workload, check=True)
        lines = list(driver.lines())
        assert driver.ending == "done", seed
        coverage.add(workload, Comparison(None, lines))
        assert workload.plan is not None
        groups = workload.plan.layout.groups
        assert len(groups) <= MOST_GROUPS
        kinds.update({type(group.spec).__name__ for group in groups})
    assert min(kinds.values()) >= 3
    assert len(kinds) == 5
    met = coverage.workloads_with
    for name in ("preemptions", "prefix hits", "junctions", "copied blocks"):
        assert met[name] > 0, name
    assert met["several groups"] >= 40
    assert "groups of states" in coverage.in_words()


@pytest.mark.parametrize(
    "seeds", [(200,), pytest.param(range(0, 240, 3), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("speculative", [False, True])
def test_every_random_pool_is_taken(seeds: range, speculative: bool) -> None:
    """Some stall, as in the release.

    Of 200 an engine was drawn that the release ends at its first look-up of chunks.
    """
    for seed in seeds:
        workload = random_group_pools_workload(
            seed, "0.33.0", prefillers=0, decoders=0, speculative=speculative
        )
        driver = driver_of(workload, check=True)
        assert [*driver.lines()]
        assert driver.ending in ("done", "stalled"), seed


def test_a_seed_means_one_workload_and_its_file_is_read_back() -> None:
    workload = random_group_workload(5, "0.33.0")
    assert as_file(workload) == as_file(random_group_workload(5, "0.33.0"))
    read = parse_workload(json.dumps(as_file(workload)), "again")
    assert list(DecisionDriver(read).lines()) == list(DecisionDriver(workload).lines())


@pytest.mark.parametrize("draw", [random_workload, random_group_workload])
def test_random_workloads_may_keep_two_steps_in_flight(draw: Any) -> None:
    coverage, endings = Coverage(), Counter[str]()
    for seed in range(25):
        workload = draw(seed, "0.33.0", async_scheduling=True)
        driver = DecisionDriver(workload, check=True)
        coverage.add(workload, Comparison(None, list(driver.lines())))
        endings[driver.ending] += 1
    assert endings["done"] >= 23  # a prompt of max_model_len stands still, in both
    assert coverage.workloads_with["wasted tokens"] > 5
    assert coverage.workloads_with["stale tokens"] > 0


def test_layers_may_be_spelled_out() -> None:
    spelled, named = asked(layers=TWO_PAGE_SIZES), asked(model="two-page-sizes")
    assert spelled.plan == named.plan
    assert next(DecisionDriver(spelled).lines()) == next(DecisionDriver(named).lines())
    state = {"state_shapes": [[3, 8], [4, 64]], "checkpoint_alignment": 1}
    full = {"num_kv_heads": 4, "head_size": 8}
    mixed = asked(layers={"num_layers": 3, "repeated": [full, state]}).plan
    assert mixed is not None
    assert list(mixed.layers) == [
        "model.layers.0.attn",
        "model.layers.1.mixer",
        "model.layers.2.attn",
    ]


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ({}, "kv: give a model by name, or layers, one of the two"),
        ({"model": "gpt-oss-20b", "layers": TWO_PAGE_SIZES}, "one of the two"),
        ({"layers": {"num_layers": 1, "repeated": [{"num_kv_heads": 1}]}}, "head_size"),
        (
            {
                "layers": {
                    "num_layers": 1,
                    "repeated": [{"state_shapes": [[2]], "state_dtypes": []}],
                }
            },
            "state_dtypes names one type a shape, 1, got 0",
        ),
    ],
)
def test_what_is_wrong_with_layers_is_said(kv: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked(**kv)


def test_layers_that_do_not_matter_are_left_out() -> None:
    """Of a model that has a name, too: here any two groups of unlike blocks will do."""

    def shows(part: DecisionWorkload) -> bool:
        try:
            assert part.plan is not None
            groups = part.plan.layout.groups
        except UserError:
            return False
        return len({group.spec.block_size for group in groups}) > 1

    kv = {"prefix_cache_retention_interval": None, "override": {"swa": 64}}
    small = shrunk(asked(model="two-page-sizes", **kv), shows)
    assert small.kv is not None
    written = as_file(small)["kv"]
    assert written["layers"] == {
        "num_layers": 2,
        "repeated": [
            {"num_kv_heads": 8, "head_size": 128, "sliding_window": 64},
            {"num_kv_heads": 2, "head_size": 128},
        ],
    }
    assert written.keys() == {"layers", "block_size", "available_bytes"}
