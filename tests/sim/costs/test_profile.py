"""Profile files: what is read, what is refused, and what a bad one is told."""

import copy
import json

import pytest

from sim.costs.measured.profile import (
    ProfileError,
    canonical_json,
    migrated,
    parse_profile,
    profile_id,
    read_profile,
)
from sim.costs.measured.profile_checks import validate_profile
from tests.sim.costs.golden.make_profile import FILE, golden

GOLDEN_ID = "sha256:ead368bd655e7f68523b0379b951152c8ed8a394a42bff67774ca3b2c2e31c5c"

DEVICE = {
    "name": "h200_sxm",
    "bandwidth_bytes_per_s": 4.8e12,
    "flops_per_s": 9.89e14,
    "flops_8bit_per_s": 1.978e15,
    "host_bytes_per_s": 6.4e10,
    "link_bytes_per_s": 4.5e11,
    "num_sms": 132,
    "l2_bytes": 52428800,
}
DECODE = {
    "operation": "decode_attention",
    "variant": "vllm",
    "dtype": "bfloat16",
    "constants": {"head_dim": 128, "window": 0, "kv_itemsize": 2},
    "axes": {
        "num_heads": [32, 32, 32],
        "num_kv_heads": [8, 8, 8],
        "batch": [64, 64, 64],
        "context": [1024, 2048, 4096],
    },
    "quantiles": {"p50_s": [8e-5, 1.4e-4, 2.6e-4], "p90_s": [9e-5, 1.5e-4, 2.7e-4]},
    "n": [20, 20, 20],
}


def body(**changes):
    content = {
        "format": "kvprofile/1",
        "kind": "imported",
        "units": {"size": "byte", "time": "s"},
        "provenance": {
            "date": "2026-01-01",
            "tool": "kvsim 0",
            "device": DEVICE,
            "source": {"name": "a table"},
        },
        "ops": [copy.deepcopy(DECODE)],
        "interference": {},
        "steps": [],
        "fit": {},
    } | changes
    return content | {"id": profile_id(content)}


def text(**changes):
    return canonical_json(body(**changes))


def changed(key, value, op=None):
    """A profile with one thing of its table changed, hashed again."""
    table = copy.deepcopy(op or DECODE)
    *path, last = key.split(".")
    holder = table
    for name in path:
        holder = holder[name]
    holder[last] = value
    return text(ops=[table])


def test_a_profile_is_read_as_written():
    profile = parse_profile(text())
    assert profile.kind == "imported"
    assert profile.device["name"] == "h200_sxm"
    (table,) = profile.tables("decode_attention")
    assert table.num_points == 3
    assert table.axes["context"] == (1024, 2048, 4096)
    assert table.quantiles["p50_s"] == (8e-5, 1.4e-4, 2.6e-4)
    assert table.counts == (20, 20, 20)
    assert profile.tables("gemm") == ()
    assert validate_profile(profile) == []


def test_the_id_is_the_hash_of_everything_else_whatever_its_spelling():
    spelled = json.dumps(body(), indent=4)
    assert parse_profile(spelled).id == parse_profile(text()).id
    assert profile_id(body()) != profile_id(body(kind="measured"))


def test_unknown_keys_are_ignored_but_hashed():
    assert parse_profile(text(mood="good")).body["mood"] == "good"
    table = DECODE | {"colour": "green"}
    assert parse_profile(text(ops=[table])).ops[0].num_points == 3
    assert parse_profile(text(format="kvprofile/1.7")).id


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (text()[:200], "cut off or no JSON"),
        ("", "cut off or no JSON"),
        ("[1]", "must hold a JSON object"),
        (text().replace("0.00014", "NaN"), "NaN is no number"),
        (text(format="kvprofile/2"), "upgrade kvsim"),
        (text(format="kvprofile/0"), "nothing reads kvprofile/0"),
        (text(format="kvprofile/x"), "format must be kvprofile/1"),
        (text(format="torch"), "format must be kvprofile/1"),
        (text(format=None), "format must be kvprofile/1"),
        (text().replace("0.00014", "0.00013"), "was changed after it was written"),
        (text().replace('"id":', '"ident":'), "was changed after it was written"),
        (text(units={"size": "byte", "time": "ms"}), "convert the times to seconds"),
        (text(units=None), "must be in units"),
        (text(kind="guessed"), "kind must be measured or imported"),
        (text(ops=None), "has no ops"),
        (text(provenance=[]), "has no provenance"),
        (text(ops=[3]), "must be an object"),
        (text(steps=7), "steps must be a list, not '7'"),
        (text(fit=True), "fit must be an object, not 'True'"),
        (text(fit={"host": [1]}), "fit.host must be an object"),
        (text(fit={"models": [True]}), "models.0. has no geometry"),
        (text(fit={"models": [{"geometry": {}, "decode": 1}]}), "decode is no table"),
        (changed("operation", None), "operation must be a text"),
        (changed("quantiles", {"p50_ms": [0.08, 0.14, 0.26]}), "seconds as p50_s"),
        (changed("quantiles.p50_us", [1, 2, 3]), "named p10_s"),
        (changed("quantiles.p50_s", [80.0, 140.0, 260.0]), "the unit is wrong"),
        (changed("quantiles.p50_s", [1e-4, -1e-4, 1e-4]), "must hold seconds"),
        (changed("quantiles.p50_s", [1e-4, True, 1e-4]), "must hold seconds"),
        (changed("quantiles.p50_s", [1e-4, 1e-4]), "column of 2 integers"),
        (changed("quantiles.p90_s", [1e-4, 1e-4]), "column of 3 numbers"),
        (changed("axes.context", [1024, 2048.0, 4096]), "must hold integers"),
        (changed("axes.context", [1024, -2048, 4096]), "must hold integers"),
        (changed("axes.context", 1024), "column of 3 integers"),
        (changed("axes", []), "must be an object of columns"),
    ],
)
def test_what_cannot_be_trusted_is_refused_in_one_line(content, reason):
    with pytest.raises(ProfileError, match=reason) as caught:
        parse_profile(content, "'p.json'")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_no_file_no_text_no_profile(tmp_path):
    with pytest.raises(ProfileError, match="there is no profile"):
        read_profile(tmp_path / "p.json")
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="no readable profile"):
        read_profile(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(text())
    assert read_profile(tmp_path / "p.json").kind == "imported"


def test_migrations_are_applied_one_after_the_other():
    steps = {
        -1: lambda content: content | {"a": 1},
        0: lambda content: content | {"b": content["a"] + 1},
    }
    assert migrated({}, -1, steps) == {"a": 1, "b": 2}
    assert migrated({"b": 5}, 1, steps) == {"b": 5}


def problems(content):
    return validate_profile(parse_profile(content))


def test_a_point_faster_than_physics_is_caught():
    (problem,) = problems(changed("quantiles.p50_s", [8e-5, 1e-4, 2.6e-4]))
    # 64 x 2048 keys of 4 KiB over 4.8 TB/s take 112 us, with boosted clocks 102 us
    assert problem.rule == "floor"
    assert problem.fatal
    assert "context 2048" in problem.message
    assert problems(changed("quantiles.p50_s", [8e-5, 1.03e-4, 2.6e-4])) == []


def test_what_fits_the_cache_may_be_faster_than_the_bus():
    small = DECODE | {"axes": DECODE["axes"] | {"batch": [1, 1, 1]}}
    assert problems(changed("quantiles.p50_s", [1.1e-6, 1.2e-6, 1.9e-6], small)) == []


GEMM = DECODE | {
    "operation": "gemm",
    "constants": {"weight_bits": 16},
    "axes": {"m": [1, 4096], "n": [8192, 8192], "k": [8192, 8192]},
    "quantiles": {"p50_s": [3e-5, 6e-4]},
    "n": None,
}


def test_products_obey_bandwidth_and_peak():
    assert problems(text(ops=[GEMM])) == []
    (slow,) = problems(changed("quantiles.p50_s", [2e-5, 6e-4], GEMM))
    assert "m 1" in slow.message
    (slow,) = problems(changed("quantiles.p50_s", [3e-5, 4e-4], GEMM))
    assert "m 4096" in slow.message
    eight = GEMM | {"constants": {"weight_bits": 8}}
    assert problems(changed("quantiles.p50_s", [3e-5, 4e-4], eight)) == []


EXPERTS = GEMM | {
    "operation": "moe",
    "constants": {
        "hidden_size": 2048,
        "inter_size": 768,
        "num_experts": 128,
        "top_k": 8,
        "weight_bits": 16,
    },
    "axes": {"tokens": [64, 64, 8192], "activated_experts": [68, 126, 128]},
    "quantiles": {"p50_s": [1.4e-4, 2.6e-4, 6.2e-4]},
}


def test_experts_obey_bandwidth_and_peak():
    assert problems(text(ops=[EXPERTS])) == []
    # 126 x 9.4 MB over 4.8 TB/s are 248 us, with boosted clocks 225 us
    (fast,) = problems(changed("quantiles.p50_s", [1.4e-4, 2.2e-4, 6.2e-4], EXPERTS))
    assert "activated_experts 126" in fast.message
    # 65,536 rows at 989 TFLOP/s are 625 us
    (fast,) = problems(changed("quantiles.p50_s", [1.4e-4, 2.6e-4, 5.5e-4], EXPERTS))
    assert "tokens 8192" in fast.message
    eight = EXPERTS | {"constants": EXPERTS["constants"] | {"weight_bits": 8}}
    assert problems(changed("quantiles.p50_s", [1.4e-4, 2.2e-4, 5.5e-4], eight)) == []


def test_more_experts_that_are_faster_are_told():
    (note,) = problems(changed("quantiles.p50_s", [2.8e-4, 2.6e-4, 6.2e-4], EXPERTS))
    assert "1 points with more activated_experts" in note.message


def test_more_work_that_is_faster_is_told_and_fatal_where_it_can_be_measured_again():
    times = [1.2e-4, 1.1e-4, 2.6e-4]
    (note,) = problems(changed("quantiles.p50_s", times))
    assert (note.rule, note.fatal) == ("order", False)
    assert "1 points with more context" in note.message
    table = DECODE | {"quantiles": {"p50_s": times}}
    found = problems(text(ops=[table], kind="measured"))
    assert [p.fatal for p in found if p.rule == "order"] == [True]
    assert problems(changed("quantiles.p50_s", [1.2e-4, 1.15e-4, 2.6e-4])) == []


def test_provenance_is_required():
    wanting = {"date": "", "tool": "kvsim 0", "device": DEVICE | {"l2_bytes": None}}
    found = [p.message for p in problems(text(provenance=wanting))]
    for key in ("date", "source", "device.l2_bytes"):
        assert any(f"provenance.{key} is missing" in line for line in found), key
    measured = [p.message for p in problems(text(kind="measured"))]
    for key in ("preset", "seed", "backends", "stability", "device.driver"):
        assert any(f"provenance.{key} is missing" in line for line in measured), key


def test_a_device_that_is_null_is_missing():
    wanting = {"date": "2026-01-01", "tool": "kvsim 0", "device": None}
    found = [p.message for p in problems(text(provenance=wanting))]
    assert any("provenance.device.name is missing" in line for line in found)


# -- formats of the past ------------------------------------------------------------


def test_the_golden_profile_is_read_as_it_was_written():
    profile = read_profile(FILE)
    assert profile.id == GOLDEN_ID
    assert validate_profile(profile) == []
    (table,) = profile.tables("decode_attention")
    assert table.axes["context"] == (1024, 2048, 4096, 8192)
    assert table.constants["num_kv_heads"] == 8
    assert table.quantiles["p50_s"][0] == pytest.approx(7.7108864e-05)
    assert profile.steps[0]["p50_s"] == 0.009
    assert profile.fit["host"]["request_overhead_s"] == 5e-6
    # written again, it is the same to the byte, what is not known here included
    assert canonical_json(profile.body) == FILE.read_text()
    assert canonical_json(golden()) == FILE.read_text()


def older():
    """The golden profile as an invented format 0 has it: times in us, one a list."""
    content = copy.deepcopy(golden())
    content["format"] = "kvprofile/0"
    content["units"] = {"size": "byte", "time": "us"}
    (table,) = content["ops"]
    table["times_us"] = [1e6 * value for value in table.pop("quantiles")["p50_s"]]
    return content | {"id": profile_id(content)}


def lifted(body):
    """From the invented format 0 to 1; a new object, the old one as it was."""
    tables = []
    for table in body["ops"]:
        rest = {key: value for key, value in table.items() if key != "times_us"}
        seconds = [float(f"{value / 1e6:.9g}") for value in table["times_us"]]
        tables.append(rest | {"quantiles": {"p50_s": seconds}})
    units = {"size": "byte", "time": "s"}
    return body | {"format": "kvprofile/1", "units": units, "ops": tables}


def test_an_older_format_is_lifted_by_a_pure_function(monkeypatch):
    before = older()
    kept = copy.deepcopy(before)
    monkeypatch.setattr("sim.costs.measured.profile.MIGRATIONS", {0: lifted})
    profile = parse_profile(canonical_json(before))
    assert profile.body["format"] == "kvprofile/1"
    assert profile.tables("decode_attention") == read_profile(FILE).tables(
        "decode_attention"
    )
    assert before == kept
    # it goes by the name that it was written under, which its old content hashes to
    assert profile.id == before["id"]


def test_without_a_migration_an_older_format_is_refused():
    with pytest.raises(ProfileError, match="nothing reads kvprofile/0 any more"):
        parse_profile(canonical_json(older()))


def test_a_migration_of_a_changed_file_is_refused(monkeypatch):
    monkeypatch.setattr("sim.costs.measured.profile.MIGRATIONS", {0: lifted})
    changed_text = canonical_json(older()).replace("2048", "2049")
    with pytest.raises(ProfileError, match="was changed after it was written"):
        parse_profile(changed_text)
