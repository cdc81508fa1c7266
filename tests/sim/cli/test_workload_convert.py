from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import run as kvsim
from sim.cli.workload.source import requests_of
from sim.errors import ConfigError
from tests.sim.commands import TRACE, refused
from tests.sim.config.test_config import minimal, write
from workloads import TRACE_READERS, RequestSpec

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

MOONCAKE = """{"timestamp": 0, "input_length": 513, "output_length":5, "hash_ids":[0,1]}
{"timestamp": 27, "input_length": 10, "output_length": 6, "hash_ids": [0]}
"""
SPEC = """workload:
  synthetic:
    num_requests: 5
    arrivals: {kind: constant, rate: 2.0}
    prompt_tokens: {kind: fixed, tokens: 10}
    output_tokens: {kind: fixed, tokens: 3}
"""


def read(kind: str, path: Path) -> list[RequestSpec]:
    reader_type: Any = TRACE_READERS[kind]
    return list(reader_type(path=path).read())


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    return path


def test_converted(
    azure: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl.zst"
    command = ["workload", "convert", str(azure), "--to", "kvsim", "--out", str(out)]
    assert kvsim(command) == 0
    captured = capsys.readouterr()
    assert captured.out == f"3 requests are in {out} (kvsim)\n"
    assert captured.err == f"kvsim: '{azure}' is read as azure\n"
    assert read("kvsim", out) == read("azure", azure)
    assert "exists already" in refused(command, capsys, tmp_path)
    assert kvsim([*command, "--overwrite", "--quiet", "--from", "azure"]) == 0
    assert capsys.readouterr() == ("", "")


def test_losses_are_listed(
    mooncake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    command = ["workload", "convert", str(mooncake), "--to", "vidur", "--out", str(out)]
    assert kvsim([*command, "--quiet"]) == 0
    line = "kvsim: lost: which prompts share text (2 of 2 requests)\n"
    assert capsys.readouterr().err == line


def test_settings_of_both_sides(mooncake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ["workload", "convert", str(mooncake), "--to", "mooncake", "--quiet"]
    command += ["--out", str(out), "--set", "out.block_tokens=100"]
    assert kvsim([*command, "--set", "limit=1"]) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["hash_ids"] == [0, 1, 2, 3, 4, 5]


def test_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "spec.yaml"
    config.write_text(SPEC)
    out = tmp_path / "out.csv"
    command = ["workload", "convert", str(config), "--to", "vidur", "--out", str(out)]
    assert kvsim([*command, "--set", "workload.synthetic.num_requests=3"]) == 0
    assert [request.num_prompt_tokens for request in read("vidur", out)] == [10] * 3


def test_a_whole_configuration(azure: Path, tmp_path: Path) -> None:
    data = minimal()
    data["workload"] = {"trace": {"kind": "azure", "path": azure.name}}
    config = write(tmp_path, data)
    requests = requests_of(config, None, ["workload.trace.limit=2"], False)
    assert [request.num_prompt_tokens for request in requests] == [374, 396]
    with pytest.raises(ConfigError, match=r"^engine\.modle: unknown key"):
        requests_of(config, None, ["engine.modle=x"], False)
    with pytest.raises(ConfigError, match="--from is for traces"):
        requests_of(config, "azure", [], False)


def test_bad_lines(
    azure: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    azure.write_text(TRACE + "broken\n")
    out = tmp_path / "out.jsonl"
    command = ["workload", "convert", str(azure), "--to", "kvsim", "--out", str(out)]
    line = refused([*command, "--quiet"], capsys, tmp_path)
    assert line.startswith(f"kvsim: {azure}:5: a line must have 3 fields; got 'broken'")
    assert kvsim([*command, "--quiet", "--skip-bad-lines"]) == 0
    assert capsys.readouterr().err.startswith(
        f"kvsim: warning: {azure}: left out 1 malformed line; the first: {azure}:5: "
    )
    assert len(read("kvsim", out)) == 3
    azure.write_text(TRACE.splitlines()[0] + "\nbroken\n")
    assert kvsim([*command, "--quiet", "--skip-bad-lines", "--overwrite"]) == 2
    reason, line = capsys.readouterr().err.splitlines()
    assert reason.startswith(f"kvsim: warning: {azure}: left out 1 malformed line")
    assert line.startswith(f"kvsim: {azure}: a trace needs at least one request")
    azure.write_text(TRACE + "broken\n")
    config = tmp_path / "spec.yaml"
    config.write_text(f"workload: {{trace: {{kind: azure, path: {azure}}}}}\n")
    assert len(requests_of(config, None, [], True)) == 3
    skipping = ["workload.trace.skip_bad_lines=true"]
    assert len(requests_of(config, None, skipping, False)) == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--to", "sharegpt"], "'sharegpt' is not written: its words would have to be"),
        (["--to", "moonkake"], "'moonkake' is not built; did you mean 'mooncake'?"),
        (["--to", "azure", "--from", "azur"], "'azur' is not built; did you mean"),
        (["--to", "azure", "--set", "lim=3"], "'mooncake' has no such key; did you"),
        (["--to", "azure", "--set", "out.x=3"], "--to.x: 'azure' has no such key"),
        (
            ["--to", "azure", "--set", "out.kind=vidur"],
            "--set out.kind: the command line says so by",
        ),
        (["--to", "azure", "--set", "path=b"], "--set path: the command line says so"),
        (["--to", "azure", "--set", "kind=kvsim"], "says so by FILE and --from"),
        (["--to", "azure", "--set", "limit"], "--set takes key.path=value"),
        (["--to", "azure", "--set", "limit=some"], "limit"),
        (["--to", "mooncake", "--set", "out.block_tokens=0"], "block_tokens must be"),
        (["--to", "azure", "--from", "vidur"], "trace.jsonl:1: columns must include"),
    ],
)
def test_refused(
    arguments: list[str],
    problem: str,
    mooncake: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "out")
    command = ["workload", "convert", str(mooncake), *arguments, "--out", out]
    assert problem in refused([*command, "--quiet"], capsys, tmp_path)


def test_files_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    command = ["workload", "convert", "nowhere.csv", "--to", "kvsim", "--out", out]
    assert "a trace must exist; got 'nowhere.csv'" in refused(command, capsys, tmp_path)
    command[2] = "nowhere.yaml"
    assert "there is no configuration file" in refused(command, capsys, tmp_path)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(TRACE.encode())[:-9])
    command[2] = str(tmp_path / "cut.gz")
    command += ["--from", "azure"]
    assert "gzip data must be whole" in refused(command, capsys, tmp_path)


def test_unknown_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("time,what\n")
    out = str(tmp_path / "out")
    command = ["workload", "convert", str(path), "--to", "kvsim", "--out", out]
    line = refused(command, capsys, tmp_path)
    assert "a trace's format must be plain; got 'time,what'" in line
    assert "name its kind (trace.kind, or --from): azure, burstgpt, " in line
