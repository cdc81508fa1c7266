"""Supplies that runs share: traces read once, files that travel."""

from __future__ import annotations

import json
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import load_config, parse_config
from sim.config.trace_shelf import PackedShelf, ReadTrace, key_of, pack
from sim.simulation.simulate import simulate
from sim.studies.sweeps.directory import identity
from sim.studies.sweeps.job import Job
from sim.studies.sweeps.local import LocalExecutor, SerialExecutor
from sim.studies.sweeps.ray_cluster import Relocation
from sim.studies.sweeps.supplies import gather, named_files
from sim.studies.sweeps.task import perform, run_summary
from tests.shared import ROOT, shared
from tests.sim.commands import TRACE
from tests.sim.studies.sweeps.files import by_index, tiny
from workloads.errors import WorkloadWarning
from workloads.traces import TRACE_READERS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODULE = """
from sim.costs.constant import ConstantCost

class Mine(ConstantCost):
    def describe(self):
        return super().describe() | {"file": __file__}

class Broken(ConstantCost):
    def step(self, shape):
        raise ValueError("as told in " + __file__)
"""


def trace_jobs(path: Path, num: int = 3, **trace: Any) -> list[Job]:
    """Jobs that replay a trace at several rates."""
    jobs = []
    for i in range(num):
        data = tiny(num_gpu_blocks_override=100, max_model_len=1024)
        table = {"kind": "azure", "path": str(path), "rate_scale": 1.0 + i} | trace
        data["workload"] = {"trace": table}
        jobs.append(Job(i, {}, parse_config(data).to_data()))
    return jobs


def write_trace(directory: Path) -> Path:
    """Write a trace that is out of order, which readers warn of."""
    header, first, second, third = TRACE.splitlines()
    path = directory / "trace.csv"
    path.write_text("\n".join([header, second, first, third]) + "\n")
    return path


def test_a_trace_is_read_once_and_runs_are_the_same(tmp_path: Path) -> None:
    path = write_trace(tmp_path)
    jobs = trace_jobs(path)
    with SerialExecutor() as serial:
        expected = by_index(serial.run(jobs, run_summary))
    for status, summary, _ in expected.values():
        assert status == "done"
        assert any("sorted by time" in warning for warning in summary["warnings"])
    supplies = gather(jobs)
    assert len(supplies.traces) == 1
    assert supplies.files == {}
    path.unlink()  # a second read would fail
    for executor in (SerialExecutor(supplies), LocalExecutor(2, supplies)):
        with executor as runs:
            assert by_index(runs.run(jobs, run_summary)) == expected
    with SerialExecutor() as serial:
        assert {o.status for o in serial.run(jobs, run_summary)} == {"refused"}


def test_traces_inside_other_tables_are_found(tmp_path: Path) -> None:
    path = write_trace(tmp_path)
    trace = {"kind": "azure", "path": str(path)}
    jobs = []
    for seed in range(2):
        data = tiny(max_model_len=None, num_gpu_blocks_override=200) | {"seed": seed}
        data["workload"]["synthetic"]["prompt_tokens"] = {
            "kind": "trace",
            "trace": trace,
            "column": "prompt_tokens",
        }
        jobs.append(Job(seed, {}, data))
    assert perform(jobs[0], run_summary).status == "done"
    supplies = gather(jobs)
    assert list(supplies.traces) == [key_of(trace)]
    path.unlink()
    with SerialExecutor(supplies) as serial:
        assert {o.status for o in serial.run(jobs, run_summary)} == {"done"}


def test_other_arguments_are_another_trace_and_single_uses_are_left(
    tmp_path: Path,
) -> None:
    path = write_trace(tmp_path)
    twice = trace_jobs(path, num=2)
    (once,) = trace_jobs(path, num=1, skip_bad_lines=True)
    jobs = [*twice, Job(2, {}, once.config)]
    assert len(gather(jobs).traces) == 1
    assert len(gather(jobs, at_least=1).traces) == 2
    assert gather(jobs[:1]).traces == {}
    # A trace that was left is a file like any other.
    assert list(gather(jobs[:1]).files) == [str(path)]


def test_a_trace_that_cannot_be_read_is_left_to_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    jobs = trace_jobs(path)
    supplies = gather(jobs)
    assert supplies.traces == {}
    with SerialExecutor(supplies) as serial:
        outcomes = list(serial.run(jobs, run_summary))
    assert {outcome.status for outcome in outcomes} == {"refused"}
    assert "at least one request" in str(outcomes[0].error)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("azure", "azure_llm_2023_conv.csv", marks=pytest.mark.slow),
        pytest.param(
            "mooncake", "mooncake_fast25_conversation.jsonl", marks=pytest.mark.slow
        ),
        ("llmservingsim", "llmservingsim_sharegpt_llama31_300_sps10.jsonl.gz"),
    ],
)
def test_a_packed_trace_reads_as_its_file(kind: str, name: str) -> None:
    path = str(shared(f"traces/{name}"))
    reader = TRACE_READERS[kind](path=path)
    read: Any = pickle.loads(pack(reader))
    assert isinstance(read, ReadTrace)
    assert list(read.read()) == list(reader.read())
    assert list(read.read()) == list(reader.read())


def test_a_shelf_warns_as_the_reader_did(tmp_path: Path) -> None:
    table = {"kind": "azure", "path": str(write_trace(tmp_path))}
    reader = TRACE_READERS["azure"](path=table["path"])
    shelf = PackedShelf({key_of(table): pack(reader)})
    found = shelf.instead_of(table, reader)
    assert found is shelf.instead_of(table, reader)
    for each in (reader, found):
        with pytest.warns(WorkloadWarning, match="sorted by time"):
            list(each.read())
    other = table | {"skip_bad_lines": True}
    assert shelf.instead_of(other, reader) is reader


# -- files ------------------------------------------------------------------------


def user_job(directory: Path, name: str) -> Job:
    data = tiny() | {
        "cost": {"kind": f"{directory / 'mine.py'}:{name}", "step_s": 0.01}
    }
    data["engine"]["model"] = str(directory / "model")
    return Job(0, {}, parse_config(data).to_data())


def test_files_travel_and_leave_no_trace_of_the_way(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "model").mkdir(parents=True)
    (here / "mine.py").write_text(MODULE)
    bundled = ROOT / "sim/hardware/models/configs/meta-llama--Llama-3.1-8B.json"
    shutil.copy(bundled, here / "model" / "config.json")
    jobs = [user_job(here, "Mine"), user_job(here, "Broken")]
    expected = [perform(job, run_summary) for job in jobs]
    assert [outcome.status for outcome in expected] == ["done", "refused"]
    names = {str(here / "mine.py"), str(here / "model" / "config.json")}
    assert set(named_files(jobs[0].config)) == names
    supplies = gather(jobs)
    assert set(supplies.files) == names
    assert Relocation.into(there, supplies.files).places == {}
    assert not there.exists()
    # On a node without them.
    here.rename(tmp_path / "away")
    relocation = Relocation.into(there, supplies.files)
    moved = [relocation.moved(job) for job in jobs]
    assert moved[0].config["engine"]["model"].startswith(f"{there}/")
    assert moved[0].config["cost"]["kind"].startswith(f"{there}/")
    found = [relocation.restored(perform(job, run_summary)) for job in moved]
    assert [o.summary for o in found] == [o.summary for o in expected]
    assert [o.error for o in found] == [o.error for o in expected]
    cost = found[0].summary["cost"] if found[0].summary else {}
    assert cost["file"] == str(here / "mine.py")


def test_what_a_sweep_is_knows_its_files(tmp_path: Path) -> None:
    path = write_trace(tmp_path)
    before = identity(trace_jobs(path))
    assert list(before["files_sha256"]) == [str(path)]
    assert identity(trace_jobs(path)) == before
    path.write_text(TRACE)
    assert identity(trace_jobs(path)) != before


def test_a_lean_run_has_the_same_summary(tmp_path: Path) -> None:
    def plain(config: Mapping[str, Any]) -> Any:
        return json.loads(json.dumps(run_summary(config)))

    for name in ("demo.yaml", "chat_sessions.yaml"):
        short = ["workload.preset.duration_s=60"]
        if name == "chat_sessions.yaml":
            short = ["workload.sessions.num_sessions=50"]
        config = load_config(ROOT / "examples" / name, short)
        path = tmp_path / name
        path.write_text(config.to_yaml())
        expected = json.loads(json.dumps(simulate(load_config(path)).summary))
        assert plain(config.to_data()) == expected
