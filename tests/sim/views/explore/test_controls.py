"""Controls are those of the configuration, and take nothing that it would not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.config.tables import load_data, parse_config
from sim.errors import ConfigError
from sim.views.explore.base import Base
from sim.views.explore.controls import DRAFTS, FIRST, REPLICAS, TRAFFIC
from sim.views.explore.meanings import NOTHING, meaning_of
from tests.shared import ROOT
from tests.sim.views.explore.asking import base

if TYPE_CHECKING:
    from sim.views.explore.control import Control

DEMO = Base("demo", load_data(ROOT / "examples/demo.yaml"))
SMALL = base()
PATHS = [
    path
    for path in sorted((ROOT / "examples").glob("*.yaml"))
    if path.stem in ("chat_sessions", "chat_offloading", "fleet_death", "agents")
]


def test_those_that_matter_come_first_and_are_explained() -> None:
    first = [c for c in DEMO.controls.values() if c.rank is not None]
    assert [c.rank for c in first] == sorted(range(len(FIRST)))
    assert len(first) >= 10
    assert [c.key for c in first][:5] == [
        TRAFFIC,
        "workload.preset.rate_scale",
        "engine.model",
        "engine.gpu",
        REPLICAS,
    ]
    for control in first:
        assert control.meaning.endswith("."), control.key
    assert DEMO.controls["engine.max_num_seqs"].unit == "requests"


def test_each_key_is_one_of_the_configuration() -> None:
    for each in (DEMO, SMALL):
        for control in each.controls.values():
            if control.key in (REPLICAS, TRAFFIC):
                continue
            settings = {control.key: control.value}
            if control.group == "host memory":
                settings["engine.kv_offloading_size"] = 8.0
            data = each.with_settings(settings)
            parse_config(data)  # an unknown key would be refused


def test_tiers_and_drafts_have_sections_of_their_own() -> None:
    groups = {c.key: c.group for c in DEMO.controls.values()}
    connector = "engine.kv_transfer_config.kv_connector_extra_config"
    assert groups[f"{connector}.eviction_policy"] == "host memory"
    assert groups["engine.kv_offloading_link.load_bytes_per_s"] == "host memory"
    assert groups["engine.speculative_config.method"] == "drafts"
    assert groups["workload.acceptance.rate"] == "drafts"
    assert f"{connector}.cpu_bytes_to_use" not in groups  # kv_offloading_size says it
    assert DEMO.controls["workload.acceptance.rate"].label == "acceptance.rate"
    assert DEMO.controls[f"{DRAFTS}.method"].label == "method"
    drafting = load_data(ROOT / "examples/speculative_chat.yaml")
    control = Base("drafting", drafting).controls[f"{DRAFTS}.num_speculative_tokens"]
    assert control.value == 3
    refused = {f"{DRAFTS}.model": "/etc/passwd"}
    with pytest.raises(ConfigError, match="one of the"):
        DEMO.checked(refused)


def test_a_table_gets_the_keys_that_it_needs() -> None:
    number, rate = f"{DRAFTS}.num_speculative_tokens", "workload.acceptance.rate"
    data = DEMO.with_settings({number: 3, rate: 0.7})
    assert data["engine"]["speculative_config"] == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
    }
    assert data["workload"]["acceptance"] == {"kind": "constant", "rate": 0.7}
    # Without drafts there is no table, whatever else is said of them.
    assert DEMO.with_settings({f"{DRAFTS}.method": "mtp"}) == DEMO.with_settings({})
    kept = DEMO.moved({number: 3, rate: 0.7}, TRAFFIC, "batch")
    assert kept == {number: 3, rate: 0.7, TRAFFIC: "batch"}


def test_help_is_what_the_page_says() -> None:
    assert meaning_of("engine", "", "swap_space").unit == "GiB"
    assert meaning_of("engine", "", "no_such_key") == NOTHING
    explained = [c for c in DEMO.controls.values() if c.meaning]
    assert len(explained) == len(DEMO.controls)


def test_bounds_are_those_of_the_schema() -> None:
    c = DEMO.controls
    assert c["engine.gpu_memory_utilization"].high == 1
    assert c["engine.gpu_memory_utilization"].is_open
    assert c["engine.block_size"].low == 1
    assert c["engine.block_size"].high == 2**16
    assert not c["engine.block_size"].is_optional
    assert c["engine.max_num_seqs"].is_optional
    assert "v0" in c["engine.admission"].lacking
    assert (
        not c["engine.watermark"].lacking or "v1" not in c["engine.watermark"].lacking
    )


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_kind_of_configuration_has_its_controls(path: Any) -> None:
    data = load_data(path)
    controls = Base(path.stem, data).controls
    assert any(key.endswith(".rate_scale") for key in controls)
    replicas = [key for key in controls if key.endswith("replicas")]
    assert replicas
    assert (REPLICAS in replicas) is ("fleet" not in data)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("engine.max_num_seqs", 0, "at least 1"),
        ("engine.max_num_seqs", 1.5, "whole number"),
        ("engine.max_num_seqs", "8", "takes a number"),
        ("engine.max_num_seqs", True, "takes a number"),
        ("engine.max_num_seqs", float("inf"), "takes a number"),
        ("engine.gpu_memory_utilization", 0, "more than 0 and at most 1, got 0"),
        ("engine.gpu_memory_utilization", 1.01, "more than 0 and at most 1"),
        ("engine.block_size", None, "a value is needed"),
        ("engine.gpu_memory_utilization", [0.5], "takes a number"),
        ("engine.enable_prefix_caching", 1, "true or false"),
        ("engine.gpu", "no_such_gpu", "one of the"),
        ("engine.gpu", "/etc/passwd", "one of the"),
        ("engine.model", "../../secret/config.json", "one of the"),
        ("engine.scheduler", "mine.py:Mine", "one of the"),
        ("engine.scheduler", {"kind": "mine.py:Mine"}, "one of the"),
        ("engine.preemption_victim", "/tmp/x.py:X", "one of the"),
        (REPLICAS, 10_000, "at most 64"),
        ("cost.kind", "x.py:X", "not a setting"),
        ("cost.profile", "/etc/passwd", "not a setting"),
        ("workload.trace.path", "/etc/passwd", "not a setting"),
        ("engine", {"model": "x"}, "not a setting"),
        ("", 1, "not a setting"),
        ("x" * 10_000, 1, "not a setting"),
    ],
)
def test_what_it_does_not_take_is_refused_in_a_line(
    key: str, value: Any, rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule) as found:
        DEMO.checked({key: value})
    assert len(str(found.value)) < 250
    assert "\n" not in str(found.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


@given(st.sampled_from(list(DEMO.controls.values())), ANYTHING)
def test_whatever_comes_in_is_a_number_a_switch_or_a_listed_name(
    control: Control, value: Any
) -> None:
    try:
        taken = control.checked(value)
    except ConfigError:
        return
    if isinstance(taken, str):
        assert taken in {each.value for each in control.choices}
    else:
        assert taken is None or isinstance(taken, bool | int | float)


@pytest.mark.parametrize("given_", [None, [], "x", 3])
def test_settings_are_a_table(given_: object) -> None:
    with pytest.raises(ConfigError, match="table"):
        DEMO.checked(given_)


def test_what_is_as_given_is_no_setting() -> None:
    assert DEMO.checked({"engine.gpu": "h200_sxm", "seed": 0}) == {}
    assert DEMO.checked({"seed": 1.0}) == {"seed": 1}
