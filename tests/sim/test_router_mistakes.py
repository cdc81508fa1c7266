"""Wrong numbers of routers and deciders: each ends in a line, before anything runs."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.run import Simulation
from tests.sim.test_fleet_pairs import fleet_of as pair_of
from tests.sim.test_fleet_run import TIGHT, data_of, fleet_of

POSITIVE = "must be 0 or more, and finite, got "
SHARE = "must be from 0 to 1, got "


def refusal(fleet: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        Simulation(parse_config(data_of(TIGHT, fleet)))
    told = str(refused.value)
    assert "\n" not in told
    return told


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        *(
            ("llm_d", key, value, POSITIVE + str(value))
            for key in ("queue_weight", "kv_cache_weight", "prefix_weight")
            for value in (-1.0, nan, inf)
        ),
        ("llm_d", "queue_weight", "two", "valid number, got 'two'; write numbers as"),
        ("llm_d", "queue_weight", True, "should be a valid number, got True"),
        ("llm_d", "precise", "yes", "should be a valid boolean, got 'yes'"),
        ("llm_d", "block_tokens", 1.5, "should be a valid integer, got 1.5"),
        ("llm_d", "block_tokens", 0, "must be 1 or more, and finite, got 0"),
        ("llm_d", "max_prefix_blocks", -1, "must be 1 or more, and finite, got -1"),
        ("dynamo_kv", "router_temperature", nan, POSITIVE + "nan"),
        ("dynamo_kv", "router_temperature", inf, POSITIVE + "inf"),
        ("dynamo_kv", "overlap_score_credit", -1.0, POSITIVE + "-1.0"),
        ("dynamo_kv", "prefill_load_scale", nan, POSITIVE + "nan"),
        ("dynamo_kv", "decode_active_request_weight", -0.5, POSITIVE + "-0.5"),
        ("dynamo_kv", "use_kv_events", 1, "should be a valid boolean, got 1"),
        ("sglang_cache_aware", "cache_threshold", -0.1, SHARE + "-0.1"),
        ("sglang_cache_aware", "cache_threshold", 2.0, SHARE + "2.0"),
        ("sglang_cache_aware", "cache_threshold", nan, SHARE + "nan"),
        ("sglang_cache_aware", "balance_abs_threshold", -1, POSITIVE + "-1"),
        ("sglang_cache_aware", "balance_rel_threshold", -1.0, POSITIVE + "-1.0"),
        ("sglang_cache_aware", "max_tree_size", -8, POSITIVE + "-8"),
        ("ray_prefix", "match_rate_threshold", 1.5, SHARE + "1.5"),
        ("ray_prefix", "imbalanced_threshold", -1.0, "must be 0 or more, got -1.0"),
        ("ray_prefix", "imbalanced_threshold", "no", "got 'no'"),
        ("aibrix_prefix", "imbalance_abs_count", -1, POSITIVE + "-1"),
        ("aibrix_prefix", "standard_deviation_factor", -1, POSITIVE + "-1"),
    ],
)
def test_a_wrong_number_of_a_router(
    kind: str, key: str, value: object, said: str
) -> None:
    told = refusal(fleet_of(2, kind, **{key: value}))
    assert told.startswith("fleet.router")
    assert f"{key}: " in told
    assert said in told


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("isl_bounding", "max_tokens", -2, POSITIVE + "-2"),
        ("isl_bounding", "max_share", -2.0, POSITIVE + "-2.0"),
        ("isl_bounding", "max_share", nan, POSITIVE + "nan"),
        ("prefill_load", "max_active_tokens", -2.0, POSITIVE + "-2.0"),
        ("prefill_load", "max_active_tokens", "2k", "valid number, got '2k'"),
        ("isl_or_load", "max_active_tokens", nan, POSITIVE + "nan"),
        ("prefix_based", "non_cached_tokens", -5, POSITIVE + "-5"),
    ],
)
def test_a_wrong_number_of_a_decider(
    kind: str, key: str, value: object, said: str
) -> None:
    given = {"kind": kind, key: value} | (
        {"max_active_tokens": 9.0} if "load" in kind and "active" not in key else {}
    )
    proxy = {"order": "decode_first", "decider": given}
    routers = {"router": {"kind": "dynamo_kv"}, "decode_router": {"kind": "dynamo_kv"}}
    told = refusal(pair_of(proxy=proxy, **routers))
    assert told.startswith("fleet.proxy.decider")
    assert f"{key}: " in told
    assert said in told
