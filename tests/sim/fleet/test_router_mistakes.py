"""Wrong numbers of routers and deciders: each ends in a line, before anything runs."""

from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.run import Simulation
from tests.sim.fleet.test_pairs import fleet_of as pair_of
from tests.sim.fleet.test_run import TIGHT, data_of, fleet_of

if TYPE_CHECKING:
    from pathlib import Path

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
        ("vllm_dp", "num_servers", 0, "must be 1 or more, and finite, got 0"),
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


OWN = """
class Base:
    def __init__(self, num_engines):
        self.num_chosen = 0
    def choose(self, request):
        self.num_chosen += 1
        return 0
    def ended(self, request, place):
        pass
    def set_ready(self, places):
        pass
class Mine({base}):
    {body}
"""


def own_fleet(tmp_path: Path, body: str, base: str = "Base") -> dict[str, Any]:
    """Return a fleet of three engines behind a router of one's own."""
    path = tmp_path / "own.py"
    path.write_text(OWN.format(base=base, body=body))
    return fleet_of(3, f"{path}:Mine")


@pytest.mark.parametrize(
    "interval", ["0", "-1.0", "1e-30", "float('nan')", "'1'", "True"]
)
def test_an_interval_of_ones_own_router_is_a_span_of_time(
    tmp_path: Path, interval: str
) -> None:
    told = refusal(own_fleet(tmp_path, f"interval_s = {interval}"))
    assert "interval_s must be 0.001 s or more, got " in told


@pytest.mark.parametrize(
    ("body", "base", "name"),
    [
        ("interval_s = 1.0", "Base", "hear(loads)"),
        ("ended = None", "Base", "ended(request, place)"),
    ],
)
def test_ones_own_router_lacks_a_method(
    tmp_path: Path, body: str, base: str, name: str
) -> None:
    told = refusal(own_fleet(tmp_path, body, base))
    assert f"a router needs a method {name}, which Mine has not" in told


@pytest.mark.parametrize("place", ["3", "-1", "1.0", "None"])
def test_ones_own_router_chooses_no_engine(tmp_path: Path, place: str) -> None:
    fleet = own_fleet(tmp_path, f"choose = lambda self, request: {place}")
    with pytest.raises(ConfigError, match=rf"of 3 that count from 0, got {place};"):
        Simulation(parse_config(data_of(TIGHT, fleet))).run()


def test_ones_own_router_chooses_an_engine_that_has_died(tmp_path: Path) -> None:
    fleet = own_fleet(tmp_path, "pass")
    fleet["events"] = [{"time_s": 0.5, "kind": "die", "engine": 0}]
    with pytest.raises(ConfigError, match=r"an engine that is ready, .* got 0;"):
        Simulation(parse_config(data_of(TIGHT, fleet))).run()


def test_methods_of_ones_own_router_are_watched(tmp_path: Path) -> None:
    fleet = own_fleet(tmp_path, "__slots__ = ()", "object")
    assert "needs a method choose" in refusal(fleet)
    path = tmp_path / "slots.py"
    path.write_text(
        "class Mine:\n    __slots__ = ()\n    def choose(self, request): return 0\n"
        "    def ended(self, request, place): pass\n"
    )
    assert "leave __slots__ out" in refusal(fleet_of(3, f"{path}:Mine"))


def test_a_whole_number_of_numpys_is_a_place(tmp_path: Path) -> None:
    fleet = own_fleet(
        tmp_path, "choose = lambda self, request: __import__('numpy').int64(2)"
    )
    results = Simulation(parse_config(data_of(TIGHT, fleet))).run()
    served = [each["num_requests"] for each in results.summary["engines"]]
    assert served[:2] == [0, 0]
    assert served[2]


DECIDER = """
class Mine:
    needs_prefixes = needs_decoder = needs_load = False
    def is_remote(self, prospect):
        return {answer}
class Mute:
    needs_prefixes = needs_decoder = needs_load = False
class Prefixes(Mine):
    needs_prefixes = True
"""


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("Mute", "True", r"needs a method is_remote\(prospect\)"),
        ("Mine", "None", "must return True or False, got None; mend"),
        ("Mine", "prospect.most_cached_tokens() > 0", "has needs_prefixes = True"),
        ("Prefixes", "prospect.num_cached_tokens() > 0", "has needs_decoder = True"),
        ("Mine", "prospect.num_active_tokens() > 0", "has needs_load = True"),
    ],
)
def test_ones_own_decider_is_held_to_its_contract(
    tmp_path: Path, name: str, answer: str, said: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(DECIDER.format(answer=answer))
    proxy = {"order": "prefill_first", "decider": {"kind": f"{path}:{name}"}}
    fleet = pair_of(proxy=proxy, decode_router={"kind": "llm_d"})
    with pytest.raises(ConfigError, match=f"^fleet.proxy.decider: .*{said}"):
        Simulation(parse_config(data_of(TIGHT, fleet))).run()


@pytest.mark.parametrize("key", ["interval_s", "scrape_interval_s"])
def test_an_autoscaler_looks_every_millisecond_at_most(key: str) -> None:
    fleet = fleet_of(1, "least_requests")
    targets = {"requests_in_flight": 4}
    fleet["autoscaler"] = {"targets": targets, "max_replicas": 3, key: 1e-30}
    assert f"{key}: should be greater than or equal to 0.001" in refusal(fleet)


@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_a_slow_engine_is_slow_within_reason(factor: float) -> None:
    fleet = fleet_of(2, "least_requests")
    event = {"time_s": 0.0, "kind": "slow", "engine": 0, "factor": factor}
    assert "factor: should be " in refusal(fleet | {"events": [event]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("latency_s", 1e30),
        ("descriptor_s", 1e30),
        ("handshake_s", 1e30),
        ("bytes_per_s", 1e-300),
    ],
)
def test_a_transfer_ends(key: str, value: float) -> None:
    """A decoder that waits asks for its prompt every few seconds."""
    links = {"bytes_per_s": 1e9} | {key: value}
    assert f"links.{key}: should be " in refusal(pair_of(links=links))
