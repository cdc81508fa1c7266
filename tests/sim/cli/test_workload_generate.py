"""``kvsim workload generate``: what was sampled, replayed byte by byte."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.cli.main import run as kvsim
from tests.sim.closed_loops import chat_config
from tests.sim.commands import refused
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path


def tokens(low: int, high: int) -> dict[str, Any]:
    return {"kind": "uniform", "low": low, "high": high}


CHAT = chat_config()["workload"]["sessions"] | {
    "prefixes": {"kind": "system_prompts", "num_groups": 3, "tokens": tokens(10, 60)}
}
AGENT = {
    "kind": "agent",
    "num_sessions": 8,
    "arrivals": {"kind": "poisson", "rate": 20.0},
    "tool_calls": {"kind": "geometric", "mean": 3.0},
    "task_tokens": tokens(5, 40),
    "call_tokens": tokens(5, 20),
    "result_tokens": tokens(5, 40),
    "answer_tokens": tokens(10, 50),
    "tool_s": {"kind": "lognormal", "median_s": 0.1, "sigma": 1.0},
    "sub_agents": {"kind": "uniform", "low": 0, "high": 2},
    "max_context_tokens": 300,
}
DOCUMENTS = minimal()["workload"]["synthetic"] | {
    "num_requests": 60,
    "arrivals": {"kind": "gamma", "rate": 40.0, "burstiness": 0.3},
    "prefixes": {
        "kind": "documents",
        "num_documents": 5,
        "tokens": tokens(20, 90),
        "per_prompt": tokens(0, 2),
        "system_tokens": 20,
    },
}
SAMPLED: dict[str, Any] = {
    "best_of": {1: 0.7, 2: 0.3},
    "priority": {0: 0.5, 1: 0.5},
    "slo_class": {"fast": 0.5, "slow": 0.5},
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "chat": {"sessions": CHAT},
    "chat of few users": {"sessions": CHAT, "max_concurrent_users": 3},
    "chat with samples": {"sessions": CHAT} | SAMPLED,
    "agent": {"sessions": AGENT},
    "documents": {"synthetic": DOCUMENTS} | SAMPLED,
    "beams": {"sessions": CHAT, "beam_width": {1: 0.8, 2: 0.2}, "max_tokens": 30},
    "preset": {"preset": {"name": "azure_conv_2023", "num_requests": 20}},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_run_of_the_file_is_a_run_of_the_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = chat_config()
    data["workload"] = WORKLOADS[name]
    data["engine"]["scheduling_policy"] = "priority"
    if name == "preset":
        data["engine"] |= {"num_gpu_blocks_override": 3000, "max_model_len": 16000}
    path = write(tmp_path, data)
    file = tmp_path / "traffic.jsonl.gz"
    assert kvsim(["workload", "generate", str(path), "--out", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    how = printed.out.strip().splitlines()[-1].removeprefix("run them: ")
    runs = {"sampled": [], "replayed": shlex.split(how)}
    for out, changes in runs.items():
        where = ["--out", str(tmp_path / out), "--no-figures", "--quiet"]
        assert kvsim(["run", str(path), *where, *changes]) == 0
    for table in ("requests", "steps", "preemptions"):
        sampled, replayed = (
            (tmp_path / out / f"{table}.parquet").read_bytes() for out in runs
        )
        assert sampled == replayed, table


def test_the_workload_table_alone_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = write(tmp_path, chat_config()), tmp_path / "part.yaml"
    part.write_text(yaml.safe_dump({"workload": chat_config()["workload"], "seed": 3}))
    files = []
    for number, spec in enumerate((whole, part)):
        out = tmp_path / f"{number}.jsonl"
        command = ["workload", "generate", str(spec), "--out", str(out)]
        assert kvsim(command) == 0
        files.append(out.read_bytes())
        assert " of 25 sessions are in " in capsys.readouterr().out
    assert files[0] == files[1]
    command += ["--overwrite", "--quiet", "--seed", "4"]
    assert kvsim(command) == 0
    assert capsys.readouterr().out == ""
    assert out.read_bytes() != files[0]


def test_another_format_says_what_it_loses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path, chat_config()), tmp_path / "traffic.csv"
    command = ["workload", "generate", str(path), "--out", str(out), "--to", "azure"]
    assert kvsim(command) == 0
    lost = [line for line in capsys.readouterr().err.splitlines() if "lost:" in line]
    assert lost
    assert out.read_text().startswith("TIMESTAMP")


def test_mistakes_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, chat_config())
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine\n")
    cases = {
        "exists already": ["--out", str(taken)],
        "--to": ["--out", str(tmp_path / "x.jsonl"), "--to", "sharegpt"],
        "turns": [
            *("--out", str(tmp_path / "x.jsonl")),
            *("--set", "workload.sessions.turns={kind: fixed, number: -1}"),
        ],
    }
    for words, arguments in cases.items():
        line = refused(
            ["workload", "generate", str(path), *arguments], capsys, tmp_path
        )
        assert words in line
    assert taken.read_text() == "mine\n"
