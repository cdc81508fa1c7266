"""`docs/sweeps.md` and the sweep among the questions say what the code does."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.studies.sweeps.expand import Sweep, check_runs
from sim.studies.sweeps.ranges import KINDS, parse_range
from sim.studies.sweeps.spec import SweepSpec, load_sweep
from tests.shared import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
QUESTIONS = (ROOT / "docs/questions.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_every_key_stands_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (\S+) \| [^|]+\.? \|$", PAGE, re.MULTILINE
    )
    found = {key: default for key, default in rows if key in SweepSpec.model_fields}
    assert list(found) == list(SweepSpec.model_fields)
    for key, default in found.items():
        field = SweepSpec.model_fields[key]
        expected: Any = "required" if field.is_required() else field.default
        assert default == expected or yaml.safe_load(default.strip("`")) == expected, (
            key
        )


def test_every_range_stands() -> None:
    found = re.findall(r"^\| `\{(\w+): ", PAGE, re.MULTILINE)
    assert sorted(found) == sorted(KINDS)
    for kind in set(KINDS) - {"choice"}:
        parse_range({kind: [1, 3]})


@pytest.mark.parametrize("text", blocks(PAGE, "yaml"))
def test_files_on_the_page_are_sweeps(text: str, tmp_path: Path) -> None:
    data = yaml.safe_load(text)
    data["base"] = str(ROOT / "examples" / data["base"])
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    runs = list(Sweep(load_sweep(path)).runs())
    check_runs(runs)
    counts = {"grid": 24, "latin_hypercube": 32}
    assert len(runs) == next((counts[each] for each in counts if each in data), 2)


@pytest.mark.parametrize("name", ["sweep_rates", "sweep_settings"])
def test_examples_are_sweeps(name: str) -> None:
    sweep = Sweep(load_sweep(ROOT / "examples" / f"{name}.yaml"))
    check_runs(list(sweep.runs()))
    words = "24 runs" if name == "sweep_rates" else "32 runs"
    assert sweep.num_runs == int(words.split(maxsplit=1)[0])
    assert words in (ROOT / "examples" / f"{name}.yaml").read_text()


@pytest.mark.slow
def test_the_query_among_the_questions_prints_what_stands_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"^(kvsim sweep examples/\S+)$", QUESTIONS, re.MULTILINE)
    (query, printed) = re.findall(
        r"```python\n(import pandas.*?)```\n\n<!-- output of: the query above -->\n"
        r"```text\n(.*?)```",
        QUESTIONS,
        re.DOTALL,
    )[0]
    _, _, example = shlex.split(command)
    monkeypatch.chdir(tmp_path)
    assert kvsim(["sweep", str(ROOT / example), "--quiet"]) == 0
    capsys.readouterr()
    exec(query, {})
    found = capsys.readouterr().out
    assert [line.rstrip() for line in found.splitlines()] == printed.splitlines()
