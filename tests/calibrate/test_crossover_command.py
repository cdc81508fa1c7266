"""``kvsim profile show --crossover``: what is printed, drawn and refused."""

import json
import re

import pytest
from PIL import Image

from sim.cli.main import run
from sim.costs.measured.profile import canonical_json, profile_id
from tests.sim.costs.test_costs import LLAMA_8B
from tests.sim.costs.test_measured import entry, write

MODEL = "meta-llama/Llama-3.1-8B"
SHOW = ["profile", "show"]
ASK = ["--crossover", "--model", MODEL]


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "p.json", entry(LLAMA_8B))


def test_a_table_and_a_sentence_for_each_variant(file, capsys):
    assert run([*SHOW, file, *ASK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{MODEL} on h200_sxm (profile p.json), TP 1")
    assert lines[1].split() == ["ms", "recompute*", "loop*", "batch*", "kernel*"]
    assert lines[2].split()[0] == "16"
    for name in ("loop", "batch", "kernel"):
        assert any(line.startswith(f"{name}: ") for line in lines)
    assert lines[-1].startswith("* in part or whole an estimate")


def test_the_datasheet_answers_without_a_profile(capsys):
    assert run([*SHOW, "--gpu", "a100_sxm", *ASK, "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["loop", "batch", "kernel"]


def test_json_and_figure(file, tmp_path, capsys):
    out = tmp_path / "new" / "figure.png"
    more = ["--out", str(out), "--json", "--tensor-parallel-size", "1"]
    assert run([*SHOW, file, *ASK, *more]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num_tokens"][-1] == 131_072
    assert set(content["swap"]) == {"loop", "batch", "kernel"}
    with Image.open(out) as image:
        assert image.size == (1600, 900)
    assert [path.name for path in out.parent.iterdir()] == ["figure.png"]


def test_smaller_chunks_take_longer(file, capsys):
    times = []
    for budget in ("8192", "512"):
        more = ["--json", "--max-num-batched-tokens", budget]
        assert run([*SHOW, file, *ASK, *more]) == 0
        content = json.loads(capsys.readouterr().out)
        times.append(content["recompute"]["seconds"][-1])
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FILE", "--crossover"], "give --model"),
        (["--crossover", "--model", MODEL], "give one of them"),
        (["FILE", "--gpu", "h100_sxm", *ASK], "profile is of h200_sxm"),
        (["FILE", *ASK, "--block-size", "0"], "block_size must be 1 to"),
        (["FILE", *ASK, "--out", "a.pdf"], "must end in .png"),
        (["FILE", *ASK, "--tensor-parallel-size", "4"], "no tables of .* on 4 ranks"),
        (["FILE", "--model", MODEL], "belong to --crossover"),
        ([], "show takes a profile"),
        (["--gpu", "nothing", *ASK], "nothing"),
    ],
)
def test_mistakes_are_told_in_a_line(file, arguments, message, capsys, tmp_path):
    given = [file if word == "FILE" else word for word in arguments]
    assert run([*SHOW, *given]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err)
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json"]


def test_a_figure_that_cannot_be_written_leaves_nothing(file, tmp_path, capsys):
    blocked = tmp_path / "p.json" / "figure.png"
    assert run([*SHOW, file, *ASK, "--out", str(blocked)]) == 2
    captured = capsys.readouterr()
    assert "cannot be written" in captured.err
    assert captured.out == ""


def test_a_dry_run_has_no_answer(tmp_path, capsys):
    path = tmp_path / "dry.json"
    write(path, entry(LLAMA_8B))
    content = json.loads(path.read_text()) | {"kind": "dry-run"}
    path.write_text(canonical_json(content | {"id": profile_id(content)}))
    assert run([*SHOW, str(path), *ASK]) == 2
    assert "dry run, whose times are made up" in capsys.readouterr().err
