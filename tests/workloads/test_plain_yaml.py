"""YAML and JSON that somebody else wrote: bounded, and every key once."""

from __future__ import annotations

import json
from copy import deepcopy
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from calibrate.importers.llmservingsim import import_llmservingsim
from sim.cli.main import run as kvsim
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.interconnects import load_interconnect
from sim.hardware.models.bundled import load_model
from tests.shared import ROOT
from tests.sim.commands import refused
from tests.sim.studies.planning.plans import small
from tests.sim.studies.sweeps.files import tiny
from workloads.errors import PlainDataError, WorkloadError
from workloads.plain import MOST_BY_ALIASES, parse_yaml
from workloads.preset import load_preset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAUGHS = "a0: &a0 [l, l, l, l, l, l, l, l, l]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
DOUBLED = "list:\n- &b0 [x]\n" + "".join(
    f"- &b{i} [*b{i - 1}, *b{i - 1}]\n" for i in range(1, 41)
)
MERGED = "m0: &m0 {x: 1}\n" + "".join(
    f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 41)
)


@pytest.mark.parametrize("text", [LAUGHS, DOUBLED, MERGED])
@pytest.mark.parametrize(
    "command",
    [
        "run {}",
        "sweep {}",
        "plan {}",
        "workload describe {}",
        "workload curve {}",
        "workload generate {} --to kvsim --out x",
        "capacity --model Qwen/Qwen3-8B --gpu {}",
        "run {} --set engine={}",
    ],
)
def test_nested_aliases_are_refused_at_once(
    text: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    began_s = monotonic()
    line = refused(command.format(path, path).split(), capsys, tmp_path)
    assert "aliases (*name) stand for" in line
    assert monotonic() - began_s < 5


def test_aliases_that_people_write_are_read() -> None:
    text = "one: &one {a: 1, b: [2, 3]}\ntwo: *one\nthree: {<<: *one, a: 4}\n"
    assert parse_yaml(text, "here") == yaml.safe_load(text)
    most = f"a: &a [{', '.join('1' * 100)}]\nb: [{', '.join(['*a'] * 980)}]\n"
    assert len(parse_yaml(most, "here")["b"]) == 980
    assert MOST_BY_ALIASES > 100 * 980
    more = most.replace("*a]", f"*a{', *a' * 20}]")
    with pytest.raises(PlainDataError, match="stand for 101,000 values more"):
        parse_yaml(more, "here")
    with pytest.raises(PlainDataError, match="no plain number"):
        parse_yaml("a: &a [*a]", "here")


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_datasheet_states_each_field_once(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"gpu{suffix}"
    path.write_text('{"memory_bytes": 8.0e10, "memory_bytes": 4.0e10}')
    for load in (load_gpu, load_interconnect):
        with pytest.raises(ConfigError, match="the key 'memory_bytes' stands twice"):
            load(str(path))


def test_a_model_and_a_preset_state_each_key_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"num_hidden_layers": 2, "num_hidden_layers": 4}')
    with pytest.raises(ConfigError, match="'num_hidden_layers' stands twice"):
        load_model(str(path))
    with pytest.raises(WorkloadError, match="'num_hidden_layers' stands twice"):
        load_preset(str(path))


def test_an_imported_sheet_is_read_as_carefully(tmp_path: Path) -> None:
    (tmp_path / "meta.yaml").write_text("model: a\nmodel: b\n")
    with pytest.raises(PlainDataError, match="the key 'model' stands twice"):
        import_llmservingsim(tmp_path)


def test_what_a_sweep_wrote_is_read_as_carefully(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "sweep.json").write_text(json.dumps({}))
    (tmp_path / "sweep.yaml").write_text(LAUGHS)
    began_s = monotonic()
    assert kvsim(["plot", str(tmp_path), "--out", str(tmp_path / "figures")]) == 2
    assert "holds no sweep that can be read" in capsys.readouterr().err
    assert monotonic() - began_s < 5


@pytest.mark.parametrize(
    ("key", "alone"), [(True, True), (None, False), (1, False), (1.5, True)]
)
def test_a_key_that_is_no_text_is_refused(
    *, key: Any, alone: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every table of a configuration, a sweep and a plan, however deep."""
    for number, (command, data) in enumerate(_files()):
        for place in [*_tables(data)]:
            changed = deepcopy(data)
            table = changed
            for name in place:
                table = table[name]
            if alone:
                table.clear()
            table[key] = 3
            path = tmp_path / f"{number}.yaml"
            path.write_text(yaml.safe_dump(changed))
            arguments = [*command.split(), str(path), "--out", str(tmp_path)]
            if alone and place[-1:] in _FREE:
                continue
            refused(arguments, capsys, tmp_path.with_suffix(".no"))


_FREE = (("per_gpu_hour",),)
"""Tables whose keys are names of anything."""


def _files() -> Iterator[tuple[str, dict[str, Any]]]:
    sessions = (ROOT / "examples/chat_sessions.yaml").read_text()
    plan = small()
    yield "run --no-figures", yaml.safe_load(sessions)
    yield "sweep", {"base": tiny(), "list": [{"seed": 1}, {"seed": 2}]}
    yield "plan", plan


def _tables(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield place
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _tables(each, (*place, key))
