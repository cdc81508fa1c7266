"""Users' own classes, and what becomes of their faults."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.studies.sweeps.job import Job
from sim.studies.sweeps.task import perform, run_summary
from tests.sim.commands import TRACE, files, refused
from tests.sim.config.test_config import minimal, write
from tests.sim.studies.planning.plans import small

if TYPE_CHECKING:
    from pathlib import Path

COST_CLASS = """
from sim.costs.base import StepCost
class Mine:
    def step(self, shape):
        {step}
    def describe(self):
        return {describe}
"""


@pytest.mark.parametrize(
    ("step", "describe", "message"),
    [
        ("return StepCost(0.0)", "{}", "must take more than 0 s"),
        ("return StepCost(0.1, gemm_s=0.5)", "{}", "add up to 0.1, got 0.5"),
        ("return 0.1", "{}", "must be priced as a StepCost, got 0.1"),
        ("return self.price()", "{}", "needs step"),
        ("return StepCost(0.1)", "float('nan')", "JSON-ready"),
        ("return StepCost(0.1, lo_s=0.2, hi_s=0.3)", "{}", "lie around 0.1 and above"),
        ("return StepCost(0.1, lo_s=0.05)", "{}", "above 0, got 0.05 and nan"),
        (
            "return StepCost(0.1) if shape.num_decodes == 0 else StepCost(-1.0)",
            "{}",
            "finite time of more than zero",
        ),
        (
            "return StepCost(0.1) if shape.num_decodes == 0 else {}['x']",
            "{}",
            "mine.py:5: KeyError: 'x'; mend your class",
        ),
    ],
)
def test_a_users_cost_model_is_held_to_its_contract(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: str,
    describe: str,
    message: str,
) -> None:
    (tmp_path / "mine.py").write_text(COST_CLASS.format(step=step, describe=describe))
    data = minimal()
    data["cost"] = {"kind": "mine.py:Mine"}
    path = write(tmp_path, data)
    sys.dont_write_bytecode = True
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert message in line


@pytest.mark.parametrize(
    ("roles", "more"),
    [
        (("prefill", "decode"), {"links": {"bytes_per_s": 20e9}}),
        (("serve",), {"events": [{"time_s": 9.0, "kind": "die", "engine": 0}]}),
    ],
)
def test_a_fault_in_a_process_of_a_fleet_is_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    roles: tuple[str, ...],
    more: dict[str, Any],
) -> None:
    """SimPy raises a copy of it, whose traceback is its own."""
    mine = COST_CLASS.format(
        step="return StepCost(0.1) if shape.num_decodes == 0 else {}['x']",
        describe="{}",
    )
    (tmp_path / "mine.py").write_text(mine)
    pools = [{"name": each, "replicas": 1, "role": each} for each in roles]
    data = minimal() | {"cost": {"kind": "mine.py:Mine"}}
    path = write(tmp_path, data | {"fleet": {"pools": pools, **more}})
    sys.dont_write_bytecode = True
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert "mine.py:5: KeyError: 'x'; mend your class" in line


def test_a_run_that_is_too_long_to_be_summed_up_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = minimal() | {"cost": {"kind": "constant", "step_s": 1e300}}
    path = write(tmp_path, data)
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert "a run may last 1e+18 s at most, got " in line


def test_arrivals_of_ones_own_are_yielded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def times_s(self, rng): return None\n"
    )
    data = minimal()
    data["workload"]["synthetic"]["arrivals"] = {"kind": "mine.py:Mine"}
    path = write(tmp_path, data)
    sys.dont_write_bytecode = True
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert "must be yielded; got None; mend Mine.times_s" in line


def test_a_fault_of_ones_own_in_a_sweep_has_its_file_and_line(tmp_path: Path) -> None:
    step = "return StepCost(0.1) if shape.num_decodes == 0 else {}['x']"
    (tmp_path / "mine.py").write_text(COST_CLASS.format(step=step, describe="{}"))
    config = minimal() | {"cost": {"kind": f"{tmp_path / 'mine.py'}:Mine"}}
    outcome = perform(Job(0, {}, config), run_summary)
    assert outcome.status == "refused"
    assert outcome.error == "mine.py:5: KeyError: 'x'; mend your class"


def test_a_plan_of_which_no_candidate_runs_has_no_objective_to_loosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = "return StepCost(0.1) if shape.num_decodes == 0 else StepCost(0.1, gemm_s=1)"
    (tmp_path / "mine.py").write_text(COST_CLASS.format(step=step, describe="{}"))
    plan = small(cost={"kind": f"{tmp_path / 'mine.py'}:Mine"})
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    command = ["plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "o")]
    assert kvsim([*command, "--quiet", "--workers", "1"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "candidates: none serves the traffic; " in line
    assert "add up to 0.1, got 1.0 of 1.0" in line
    assert "loosen" not in line


def test_a_scheduler_that_forgets_requests_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from sim.scheduler.v1 import V1Scheduler\n"
        "class Forgetful(V1Scheduler):\n"
        "    def __init__(self, *args, every: int = 2, **more):\n"
        "        super().__init__(*args, **more)\n"
        "        self.every = every\n"
        "    def add_request(self, request):\n"
        "        if request.request_id % self.every == 0:\n"
        "            super().add_request(request)\n"
    )
    path = write(tmp_path, minimal(scheduler={"kind": "mine.py:Forgetful"}))
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert "must add up to the 2 requests that it was given" in line


GROUPS = """
from sim.scheduler import v0

class Counted(v0.Scheduler):
    def __init__(self, {signature}):
        super().__init__({arguments})
        self.every, self.num_calls = every, 0

    def schedule(self, now_s):
        self.num_calls += 1
        return super().schedule(now_s)

    def summary(self):
        return super().summary() | {{"num_calls": self.num_calls * self.every}}
"""


@pytest.mark.parametrize(
    ("signature", "arguments"),
    [
        (
            "scheduler_config, cache_config, every: int = 1",
            "scheduler_config, cache_config",
        ),
        ("*args, every: int = 1, **more", "*args, **more"),
    ],
)
def test_a_users_scheduler_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signature: str, arguments: str
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(
        GROUPS.format(signature=signature, arguments=arguments)
    )
    summaries, requests = {}, {}
    for name, scheduler in {
        "mine": {"kind": "mine.py:Counted", "every": 1000},
        "v0": "v0",
    }.items():
        data = minimal(scheduler=scheduler, engine_version="0.7.3")
        data["workload"]["best_of"] = 2
        path = write(tmp_path, data)
        out = ["--out", str(tmp_path / name), "--no-figures", "--quiet"]
        assert kvsim(["run", str(path), *out, "--check", "1"]) == 0
        summaries[name] = json.loads((tmp_path / name / "summary.json").read_text())
        requests[name] = (tmp_path / name / "requests.parquet").read_bytes()
    # Samples come as one group, and the release says which defaults hold.
    assert requests["mine"] == requests["v0"]
    assert summaries["mine"].pop("num_calls") >= 1000 * summaries["v0"]["num_steps"]
    # Decodes may be counted only where no class of a user's can look at them.
    paths = {name: summary.pop("path") for name, summary in summaries.items()}
    assert paths == {"mine": "stepwise", "v0": "fast"}
    for summary in summaries.values():
        del summary["title"], summary["path_reason"]
    assert summaries["mine"] == summaries["v0"]


def test_what_is_left_may_have_the_name_of_an_argument(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from sim.scheduler.v1 import V1Scheduler\n"
        "class Mine(V1Scheduler):\n"
        "    def __init__(self, **settings): super().__init__(**settings)\n"
    )
    scheduler = f"{tmp_path / 'mine.py'}:Mine"
    config = parse_config(minimal(scheduler=scheduler, max_num_active_seqs=7))
    built = Simulation(config).scheduler
    assert built.settings.max_num_active_seqs == 7  # type: ignore[attr-defined]


def test_a_constructor_that_takes_anything_is_given_everything(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from sim.scheduler.v1 import V1Scheduler\n"
        "class Mine(V1Scheduler):\n"
        "    def __init__(self, **more): super().__init__(**more)\n"
        "class Wrapped:\n"
        "    def __init__(self, **more):\n"
        "        self.given = more\n"
        "        raise ValueError(','.join(sorted(more)))\n"
    )
    scheduler = f"{tmp_path / 'mine.py'}:Mine"
    config = parse_config(minimal(scheduler=scheduler, max_num_active_seqs=7))
    built = Simulation(config).scheduler
    assert built.settings.max_num_active_seqs == 7  # type: ignore[attr-defined]
    assert config.engine.prefix_caching
    scheduler = f"{tmp_path / 'mine.py'}:Wrapped"
    with pytest.raises(
        ConfigError, match=r"block_size,cache_config,.*scheduler_config"
    ):
        Simulation(parse_config(minimal(scheduler=scheduler)))


@pytest.mark.parametrize(
    ("engine_version", "caching"),
    [
        (None, True),
        ("0.11", True),
        ("0.7.3", False),
        ("0.2.7", False),
        ("0.1.0", False),
    ],
)
def test_the_release_says_the_defaults_of_a_users_scheduler(
    engine_version: str | None, *, caching: bool
) -> None:
    data = minimal(scheduler="mine.py:Mine", engine_version=engine_version)
    engine = parse_config(data).engine
    assert engine.prefix_caching is caching
    assert engine.version == (engine_version or "0.33")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "class Mine:\n    pass\n",
            "'.*mine.py:Mine' must be a subclass of cache.v0.evictor",
        ),
        (
            "class Mine(KeyedEvictor):\n    pass\n",
            "cannot be made: TypeError: .*abstract",
        ),
        (
            "class Mine(KeyedEvictor):\n    def key(self, block): return block.size\n",
            "AttributeError: .*size",
        ),
        (
            "class Mine(KeyedEvictor):\n"
            "    def key(self, block): return (block.block_id if block.block_id > 1"
            " else 'x',)\n",
            "TypeError: '<' not supported",
        ),
        (
            "class Mine(KeyedEvictor):\n"
            "    def key(self, block): return (block.block_id,)\n"
            "    def evict(self): return 1, 11\n",
            "two blocks must be evicted once each",
        ),
        ("Mine = 3\n", "has no class 'Mine'"),
    ],
)
def test_a_users_evictor_is_held_to_its_contract(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    message: str,
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(
        f"from cache.v0.evictor import KeyedEvictor\n{body}"
    )
    engine = {"scheduler": "v0", "enable_prefix_caching": True}
    path = write(tmp_path, minimal(evictor="mine.py:Mine", **engine))
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert line.startswith("kvsim: engine.evictor")
    assert re.search(message, line)


def test_a_configuration_runs_from_anywhere_with_the_files_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.py").write_text(
        "from sim.costs.base import StepCost\n"
        "class Mine:\n"
        "    def __init__(self, step_s: float = 0.5): self.step_s = step_s\n"
        "    def step(self, shape): return StepCost(self.step_s)\n"
        "    def describe(self): return {}\n"
    )
    (there / "trace.csv").write_text(TRACE)
    data = minimal()
    data["workload"] = {"trace": {"kind": "azure", "path": "trace.csv"}}
    data["cost"] = {"kind": "mine.py:Mine", "step_s": 0.25}
    path = write(there, data)
    monkeypatch.chdir(tmp_path)
    assert kvsim(["run", str(path), "--out", "a", "--no-figures", "--quiet"]) == 0
    monkeypatch.chdir(tmp_path / "a")
    again = ["run", "config.yaml", "--out", "../b", "--no-figures", "--quiet"]
    assert kvsim(again) == 0
    first, second = files(tmp_path / "a"), files(tmp_path / "b")
    del first["run.json"], second["run.json"]
    assert first == second
    assert json.loads(first["summary.json"])["mean_step_ms"] == 250


def test_the_roofline_prices_the_weights_that_are_there(tmp_path: Path) -> None:
    tpot_ms = {}
    for name, engine in {
        "bf16": {},
        "fp8": {"quantization": "fp8"},
        "fp32": {"dtype": "float32"},
    }.items():
        data = minimal(num_gpu_blocks_override=5000, max_model_len=600, **engine)
        data["cost"] = {"kind": "roofline"}
        results = simulate(parse_config(data))
        tpot_ms[name] = results.summary["mean_tpot_ms"]
    assert tpot_ms["fp8"] < tpot_ms["bf16"] < tpot_ms["fp32"]


def test_a_fault_of_ours_is_not_hidden(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("sim.results.recording.requests.RequestRows.add", broken)
    with pytest.raises(ValueError, match="ours"):
        kvsim(["run", str(config), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


MARKING = """
from pathlib import Path
from sim.costs.constant import ConstantCost
Path(__file__).with_suffix(".ran").touch()
class Mine(ConstantCost):
    pass
class Untrue:
    pass
"""

RUNS = ("run {own} --no-figures --quiet --out {out}", "plan {plan} --out {out}")
READS = (
    "workload describe {own}",
    "workload curve {own}",
    "workload generate {own} --to kvsim --out {out}.jsonl",
    "sweep {sweep} --dry-run",
    "list",
)


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write configurations that name a file, and that file, which leaves a mark."""
    (tmp_path / "mine.py").write_text(MARKING)
    data = minimal()
    data["cost"] = {"kind": "mine.py:Mine", "step_s": 0.01}
    write(tmp_path, data)
    sweep = {"base": "run.yaml", "grid": {"seed": [1, 2]}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    plan = small()
    plan["cost"] = data["cost"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    (tmp_path / "trace.csv").write_text(TRACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.ran"


def words(command: str) -> list[str]:
    files = {"own": "run.yaml", "plan": "plan.yaml", "sweep": "sweep.yaml"}
    return command.format(**files, out="out").split()


@pytest.mark.parametrize(
    "command",
    [
        *RUNS,
        *READS[:-1],
        "sweep {sweep} --workers 1 --out {out}",
        "workload describe trace.csv --from mine.py:Untrue",
        "workload convert trace.csv --from mine.py:Untrue --to kvsim --out x.jsonl",
        "run {own} --set cost.kind=constant --set engine.scheduler=mine.py:Untrue",
    ],
)
def test_no_plugins_runs_no_file(
    command: str, marked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused([*words(command), "--no-plugins"], capsys, marked.parent)
    assert "mine.py:" in line
    assert "would run a file, and --no-plugins was given" in line
    assert not marked.exists()


@pytest.mark.parametrize("command", READS)
def test_what_needs_no_plugin_runs_none(command: str, marked: Path) -> None:
    assert kvsim(words(command)) == 0
    assert not marked.exists()


def test_sweeps_and_plans_say_which_files_they_run(
    marked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = marked.with_suffix(".py")
    for command in ("sweep {sweep} --workers 1 --out {out}", RUNS[1]):
        assert kvsim([*words(command), "--quiet"]) in {0, 2}
        said = capsys.readouterr().err
        assert said.count(f"runs the file '{file}' (--no-plugins refuses that)") == 1


def test_processes_that_are_started_refuse_files_too(
    marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker builds the parts itself, of a configuration that was not refused."""
    config = parse_config(minimal() | {"cost": {"kind": f"{marked.parent}/mine.py:X"}})
    monkeypatch.setenv("KVSIM_NO_PLUGINS", "1")
    with pytest.raises(ConfigError, match="--no-plugins"):
        Simulation(config)
    assert not marked.exists()
