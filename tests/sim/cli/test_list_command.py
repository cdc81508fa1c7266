"""Lists of all that is bundled: the tables of the code, and nothing typed twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim.cli.main import LISTS
from sim.cli.main import run as kvsim
from sim.config.plug import ROLES
from sim.hardware.gpus import GPUS
from sim.hardware.models.bundled import bundled_models, load_model
from sim.hardware.models.weights import count_parameters
from sim.scheduler.generations import GENERATIONS
from sim.views.bundled import BUNDLED_KINDS, bundled


def listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert kvsim([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", BUNDLED_KINDS)
def test_every_kind_is_listed_with_what_is_known_of_it(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = listed(["list", kind], capsys)
    assert rows == json.loads(json.dumps(bundled(kind)))
    assert len({row["name"] for row in rows}) == len(rows) > 0
    assert all(len(row) > 1 for row in rows)
    for row in rows:
        assert all(text(row) for text in BUNDLED_KINDS[kind].columns.values()), row


def test_short_forms_list_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for command in LISTS:
        kind = "trace_readers" if command == "readers" else command
        assert listed([command], capsys) == listed(["list", kind], capsys)


def test_sentences_stand_on_lines_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kvsim(["schedulers", "hf_fifo"]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()][1:3] == [
        "Decodes first, then prompts in mid-way, then the queues, under three budgets.",
        "releases: transformers 5.17, default: 5.17, prefix caching: on, CPU tier: yes",
    ]


def test_kinds_without_a_word_and_all_tables_of_a_workload_are_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert listed(["list"], capsys) == {n: k.key for n, k in BUNDLED_KINDS.items()}
    names = {tuple(row["name"] for row in bundled(kind)) for kind in BUNDLED_KINDS}
    missing = [table for table in ROLES.values() if tuple(table) not in names]
    assert [sorted(table) for table in missing] == [["fixed", "geometric", "uniform"]]


def test_facts_are_those_of_the_code() -> None:
    assert [row["name"] for row in bundled("models")] == list(bundled_models())
    assert [row["name"] for row in bundled("gpus")] == list(GPUS)
    assert [row["name"] for row in bundled("schedulers")] == list(GENERATIONS)
    found = bundled("models", "gpt-oss-120B")[0]
    model = load_model("openai/gpt-oss-120b")
    assert found["num_parameters"] == count_parameters(model)
    assert found["kv_cache_layers"] == {"sliding window": 18, "full attention": 18}
    # 18 layers of 8 heads of 64 values, keys and values, two bytes each.
    assert found["kv_bytes_per_token"] == 18 * 2 * 8 * 64 * 2
    gpu = bundled("gpus", "h200")[0]
    assert gpu["memory_bytes"] == GPUS["h200_sxm"].memory_bytes
    assert gpu["fp8_flops_per_s"] == 1978.9e12


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("h100 pcie", ["h100_pcie"]),
        ("NVIDIA L4", ["l40s", "l40", "l4"]),
        ("rtx_pro server", ["rtx_pro_6000_server"]),
    ],
)
def test_all_words_must_be_there_in_any_case(words: str, names: list[str]) -> None:
    assert [row["name"] for row in bundled("gpus", words)] == names


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", BUNDLED_KINDS)
def test_nothing_is_cut_at_any_width(
    kind: str,
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sim.cli.console.WIDTH", columns)
    assert kvsim(["list", kind]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    words = "".join(printed.split())
    for row in bundled(kind):
        for text in BUNDLED_KINDS[kind].columns.values():
            assert "".join(text(row).split()) in words


def test_gpus_that_nothing_was_held_against_are_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kvsim(["gpus"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    starred = {words[0] for words in rows if words[1:2] == ["*"]}
    assert starred == {row["name"] for row in bundled("gpus") if not row["is_judged"]}
    assert "* a datasheet that nothing measured was" in " ".join(printed.split())
    assert "e+" not in printed


def test_what_is_not_there_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kvsim(["list", "victim"]) == 2
    assert "did you mean 'victims'?" in capsys.readouterr().err
    assert kvsim(["gpus", "h99"]) == 2
    assert capsys.readouterr().err == (
        "kvsim: gpus: nothing bundled has 'h99'; without a word all 50 are listed\n"
    )
