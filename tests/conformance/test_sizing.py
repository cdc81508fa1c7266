"""Which pools vLLM 0.33.0 plans for a model's layers: 65 questions, and its answers."""

from __future__ import annotations

import json

import pytest

from sim.cli.main import run
from sim.errors import ConfigError
from sim.scheduler.log.files import read_log
from sim.studies.conformance.diff import first_difference
from sim.studies.conformance.kv_planning import KvCache, header_of
from sim.studies.conformance.sizing import parse_sizing_cases
from tests.shared import shared

OF_A_SCHEDULE = frozenset({"coordinator", "partial_hash_hits"})
"""What the first line of a schedule says beside its plan."""


def test_every_case_is_answered_as_the_release_does(tmp_path, capsys) -> None:
    folder = shared("conformance/v1_hybrid")
    ours, golden = tmp_path / "ours.jsonl.gz", folder / "sizing.golden.jsonl.gz"
    assert (
        run(["decisions", f"{folder / 'sizing.cases.json'}", "--out", f"{ours}"]) == 0
    )
    assert "65 pools as vllm 0.33.0 plans them, 7 of" in capsys.readouterr().out
    for mine, theirs in zip(read_log(ours), read_log(golden), strict=True):
        assert mine == theirs
    assert run(["decisions", "--diff", f"{golden}", f"{ours}"]) == 0


def test_schedules_begin_with_the_same_plan() -> None:
    paths = sorted(shared("conformance/v1_hybrid").glob("*.workload.json"))
    for path in paths:
        workload = json.loads(path.read_text(encoding="utf-8"))
        log = path.with_name(path.name.replace(".workload.json", ".golden.jsonl.gz"))
        header = next(iter(read_log(log)))["header"]
        kv, config = KvCache.model_validate(workload["kv"]), workload["config"]
        plan = kv.plan(
            max_model_len=config["max_model_len"],
            max_in_flight_tokens=config["max_num_batched_tokens"],
            enable_prefix_caching=config["enable_prefix_caching"],
        )
        expected = {k: v for k, v in header.items() if k not in OF_A_SCHEDULE}
        assert header_of(plan, kv.available_bytes) == expected, path.name
    assert len(paths) >= 37


CASE = {
    "name": "a",
    "config": {"max_num_batched_tokens": 2048, "max_model_len": 8192},
    "kv": {"model": "gpt-oss-20b", "block_size": 16, "available_bytes": 10**10},
}


def cases(**kv: object) -> str:
    case = CASE | {"kv": {**CASE["kv"], **kv}}  # type: ignore[dict-item]
    return json.dumps({"schema": 1, "reference": "vllm 0.33.0", "cases": [case]})


def test_any_bundled_model_may_be_asked_for() -> None:
    asked = parse_sizing_cases(cases(model="Qwen/Qwen3.5-35B-A3B"), "here")
    assert asked is not None
    (line,) = asked.lines()
    assert [group["layers"] for group in line["header"]["groups"]] == [10] * 4
    # States in float32, as the model's file says.
    assert line["header"]["groups"][0]["spec"]["dtypes"] == ["bfloat16", "float32"]


def test_what_is_wrong_with_a_case_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cases\.0\.kv\.tp: should be greater"):
        parse_sizing_cases(cases(tp=0), "here")
    asked = parse_sizing_cases(cases(model="gpt-oss-21b"), "here")
    assert asked is not None
    with pytest.raises(ConfigError, match=r"kv\.model must be one of .*did you mean"):
        list(asked.lines())
    assert parse_sizing_cases("{}", "here") is None


def test_the_first_difference_names_the_case() -> None:
    asked = parse_sizing_cases(cases(), "here")
    assert asked is not None
    (line,) = asked.lines()
    other = line | {"header": line["header"] | {"num_blocks": 1}}
    found = first_difference([line], [other])
    assert found is not None
    assert (found.step, found.field) == ("a", "header")
    words = found.in_words()
    assert words.startswith("case a (line 1), field 'header' (groups, pages and blocks")
    assert "num_blocks: expected 25431, got 1" in words
