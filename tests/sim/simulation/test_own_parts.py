"""Mistakes in parts of one's own: each ends in a line, none in wrong numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from cache.v1.policies import CACHE_POLICIES
from sim.config.plug import fault_in_user_code
from sim.config.tables import parse_config
from sim.errors import ConfigError, UserError
from sim.simulation.run import Simulation
from tests.sim.commands import refused
from tests.sim.config.test_config import minimal, write
from tests.sim.fleet.test_run import TIGHT, data_of, fleet_of
from tests.test_extending import block
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

SCHEDULER = block("python").replace("class StaticBatching", "class Mine")
USAGE = "CacheUsage(num_blocks, num_blocks, num_tokens, num_tokens, share, 0.0)"
SUMMARY = '{"most_requests_of_a_batch": self.most}'
SEND = "        output.shape = batch.shape()\n        return output"
APPEND = "            output.num_scheduled_tokens.append(num_new_tokens)\n"


def without(method: str) -> tuple[str, str]:
    """Return a method of the page's scheduler as it stands there, and nothing."""
    pattern = rf"    (?:@property\n    )?def {method}\(.*?\n(?=    @|    def |\Z)"
    (found,) = re.findall(pattern, SCHEDULER, re.DOTALL)
    return str(found), ""


@pytest.mark.parametrize(
    "mistake",
    [
        (*without("schedule"), "needs a method schedule(now_s), which Mine has not"),
        (*without("abort"), "needs a method abort(request), which Mine has not"),
        ("def abort(self, request)", "def abort(self)", "called as abort(request)"),
        ("num_swapped = 0", "", "needs num_swapped, and Mine cannot tell it"),
        ("len(self.waiting)", "-1", "num_waiting must be a whole number from 0"),
        ("len(self.waiting)", "4", "must add up to the 0 requests"),
        (SEND, "        pass", "must return a SchedulerOutput, got None"),
        ("output.shape = batch.shape()", "", "shape must count the 20 tokens"),
        ("batch.shape()", "(0, 0)", "shape must be a BatchShape"),
        (APPEND, "", "a number for each of the 1 requests in scheduled, got 0"),
        (APPEND, APPEND.replace("num_new", "-num_new"), "whole number of tokens from"),
        (
            "waiting.append(request)",
            "waiting.extend([request] * 2)",
            "cannot go from running to running; mend your class",
        ),
        ("            request.move_to(RequestStatus.RUNNING)\n", "", "must be running"),
        ("first_scheduled_s = now_s", "order = 0", "must have a first_scheduled_s"),
        ("scheduled_s = now_s", "scheduled_s = now_s + 9", "s at the latest, got 9."),
        ("request.num_computed_tokens = request.", "_ = request.", "from 20 to its 20"),
        ("tokens = request.num_tokens\n", "tokens = 99\n", "20 tokens, got 99"),
        ("if not r.status.is_finished", "", "must be running, by move_to"),
        ("if not r.status.is_finished]", "if 0]", "to the 2 requests that it was"),
        (USAGE, "None", "must return a CacheUsage, got None"),
        (USAGE, USAGE.replace("share", "2.0"), "must have shares from 0 to 1"),
        (USAGE, USAGE.replace("num_blocks, ", "-1, ", 1), "whole numbers from 0"),
        (SUMMARY, "None", "summary must return a table of names, got None"),
        (SUMMARY, "{1: 2}", "summary must return a table of names"),
        (SUMMARY, "{'x': float('nan')}", "summary must be JSON-ready"),
        ("return None if", "return False if", "a reason or None, got False"),
        ("self.waiting, self.running = deque(), []", "raise SystemExit(3)", "Exit: 3;"),
    ],
)
def test_a_scheduler_is_held_to_its_contract(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    mistake: tuple[str, str, str],
) -> None:
    right, wrong, said = mistake
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert right in SCHEDULER
    (tmp_path / "mine.py").write_text(SCHEDULER.replace(right, wrong))
    keys = {"max_model_len": 64, "num_gpu_blocks_override": 50}
    path = write(tmp_path, minimal(scheduler="mine.py:Mine", **keys))
    command = ["run", str(path), "--out", str(tmp_path / "o"), "--no-figures"]
    assert said in refused(command, capsys, tmp_path)


def test_a_scheduler_that_forms_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.engine.steps.vain.MAX_NUM_EMPTY_STEPS", 50)
    path = tmp_path / "mine.py"
    path.write_text(SCHEDULER.replace("while not self.running and", "while False and"))
    config = parse_config(minimal(scheduler=f"{path}:Mine", max_model_len=64))
    summary = Simulation(config).run().summary
    assert summary["stalled"]
    (line,) = [each for each in summary["warnings"] if "the queue stalled" in each]
    assert line.endswith(
        "5 requests wait: Mine.schedule forms empty batches; mend it, or leave "
        "engine.admission_check on if a request is too large"
    )


def rows(config: dict[str, Any]) -> pd.DataFrame:
    return Simulation(parse_config(config), stepwise=True).run().requests


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("generation", ["v1", "v0", "v0_2", "cacheflow"])
def test_no_scheduler_of_a_release_breaks_the_contract(
    tmp_path: Path, generation: str, *, swap: bool
) -> None:
    keys: dict[str, Any] = TIGHT | {"engine_version": VERSIONS[generation]}
    if generation == "v1":
        keys |= {"async_scheduling": False, "enable_prefix_caching": swap}
    elif swap:
        keys["preemption_mode"] = "swap"
    (tmp_path / "mine.py").write_text(CLASSES[generation])
    own = data_of(keys | {"scheduler": f"{tmp_path / 'mine.py'}:Mine"}, None)
    theirs = data_of(keys | {"scheduler": generation}, None)
    if generation != "v1":
        for data in (own, theirs):
            data["workload"] |= {"best_of": 2, "max_tokens": 60}
    ours = rows(own)
    assert ours["num_preemptions"].sum() > 0
    assert ours.equals(rows(theirs))


VERSIONS = {"v1": "0.33", "v0": "0.7.3", "v0_2": "0.2.7", "cacheflow": "0.1.0"}
CLASSES = {
    "v1": "from sim.scheduler.v1 import V1Scheduler\nclass Mine(V1Scheduler): pass\n",
    "v0": "from sim.scheduler import v0\nclass Mine(v0.Scheduler): pass\n",
    "v0_2": (
        "from sim.scheduler.block_space import v0_2\nclass Mine(v0_2.Scheduler): pass\n"
    ),
    "cacheflow": (
        "from sim.scheduler.block_space import cacheflow\n"
        "class Mine(cacheflow.Scheduler): pass\n"
    ),
}

COST = """
from decimal import Decimal
import numpy as np
from sim.costs import StepCost
class Mine:
    num_asked = 0
    def describe(self): return {describe}
    def step(self, shape):
        self.num_asked += 1
        return {late} if self.num_asked > 3 else StepCost(0.01)
    {more}
"""


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ("None", "must be priced as a StepCost, got None"),
        ("(0.01,)", "must be priced as a StepCost, got (0.01,)"),
        ("StepCost('x')", "must be priced in seconds, got ('x', "),
        ("StepCost(0.01, gemm_s=0.5)", "add up to 0.01, got 0.5 of 0.5, 0.0"),
        ("StepCost(0.01, gemm_s=0.02, host_s=-0.01)", "must be 0 or more and add up"),
        ("StepCost(0.01, lo_s=0.02, hi_s=0.03)", "must lie around 0.01"),
    ],
)
def test_every_price_is_held_to_the_contract(
    tmp_path: Path, late: str, said: str
) -> None:
    told = cost_refusal(tmp_path, late=late)
    assert told.startswith("cost: ")
    assert said in told


@pytest.mark.parametrize(
    ("describe", "more", "said"),
    [
        ("None", "", "describe() must return a table, got None"),
        ("{}", "columns = lambda self, shapes: shapes", "columns of 4 steps must be"),
        (
            "{}",
            "columns = lambda self, shapes: np.full((4, 12), 0.01)",
            "columns must say of each row what step says of it",
        ),
    ],
)
def test_a_cost_model_is_tried_first(
    tmp_path: Path, describe: str, more: str, said: str
) -> None:
    assert said in cost_refusal(tmp_path, describe=describe, more=more)


def cost_refusal(tmp_path: Path, **parts: str) -> str:
    given = {"late": "StepCost(0.01)", "describe": "{}", "more": ""} | parts
    (tmp_path / "mine.py").write_text(COST.format(**given))
    data = minimal() | {"cost": {"kind": f"{tmp_path / 'mine.py'}:Mine"}}
    with pytest.raises(ConfigError) as refusal:
        Simulation(parse_config(data)).run()
    return str(refusal.value)


@pytest.mark.parametrize(
    "number", ["np.float32(0.5)", "Decimal('0.5')", "np.array(.5)"]
)
def test_prices_of_any_number_are_seconds(tmp_path: Path, number: str) -> None:
    late = f"StepCost({number}, gemm_s={number})"
    source = COST.format(late=late, describe="{}", more="").replace("> 3", "> 1")
    (tmp_path / "mine.py").write_text(source)
    data = minimal() | {"cost": {"kind": f"{tmp_path / 'mine.py'}:Mine"}}
    results = Simulation(parse_config(data)).run()
    assert results.steps["gemm_s"].tolist() == [0.5] * len(results.steps)
    assert results.summary["mean_step_ms"] == 500


@pytest.mark.parametrize(
    ("key", "body", "said"),
    [
        ("preemption_victim", "def choose(self, running)", "choose(running, needs)"),
        ("preemption_victim", "def chose(self)", "needs a method choose(running, nee"),
        ("admission", "def admits(self, head)", "called as admits(head, engine), and"),
        (
            "admission",
            "def admits(self, head, engine): return True\n    def finished(self)",
            "called as finished(request), and Mine has finished() beside self",
        ),
    ],
)
def test_a_policys_methods_take_what_they_are_given(
    tmp_path: Path, key: str, body: str, said: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"class Mine:\n    {body}: return True\n")
    with pytest.raises(ConfigError, match=f"^engine.{key}: an? .*{re.escape(said)}"):
        Simulation(parse_config(minimal(**{key: f"{path}:Mine"})))


@pytest.mark.parametrize(
    "call", ["choose(request)", "ended(request, place)", "hear(loads)"]
)
def test_a_routers_methods_take_what_they_are_given(tmp_path: Path, call: str) -> None:
    calls = {"choose(request)": 0, "ended(request, place)": 0, "hear(loads)": 0}
    methods = [
        f"    def {each.replace('(', '(self, ')}: return 0\n"
        for each in calls
        if each != call
    ]
    wrong = f"    def {call.partition('(')[0]}(self): return 0\n"
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    interval_s = 1.0\n" + "".join([*methods, wrong]))
    with pytest.raises(ConfigError, match=rf"is called as {re.escape(call)}, and Mine"):
        Simulation(parse_config(data_of(TIGHT, fleet_of(2, f"{path}:Mine"))))


@pytest.mark.parametrize(
    ("prompt", "more", "said"),
    [
        ("((i, 5.0),)", "3, i", "got float, at position 0"),
        ("(('a', 5),)", "3, i", "got str, at position 0"),
        ("((i, np.int64(5)),)", "np.int64(3), i", "got int64, at position 0"),
        ("((i, 5),)", "3, str(i)", "got str, at position 0"),
    ],
)
def test_a_readers_numbers_are_pythons_own(
    tmp_path: Path, prompt: str, more: str, said: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n"
        "from workloads.spec import RequestSpec\n"
        "class Mine:\n"
        "    def __init__(self, path: str): pass\n"
        "    def read(self):\n"
        f"        for i in range(3): yield RequestSpec(i, i * 1.0, {prompt}, {more})\n"
    )
    data = minimal()
    data["workload"] = {"trace": {"kind": f"{path}:Mine", "path": "x"}}
    with pytest.raises(
        WorkloadError, match=rf"segments, tokens and ids .* {said}; mend"
    ):
        Simulation(parse_config(data))


KEYED = """
from cache.v1.policies import CachePolicy, KeyedPolicy
class Mine(KeyedPolicy):
    num_asked = 0
    def key(self, block):
        self.num_asked += 1
        return {key}
class Twice(CachePolicy):
    def __init__(self): self.free, self.latest = [], None
    def cached(self, block_id, content, depth): pass
    def hit(self, block_id): self.free.remove(block_id)
    def released(self, block_id): self.free.append(block_id)
    def evict(self, incoming):
        if block := self.latest and self.latest.pop(): return block
        block = self.free.pop(0)
        self.latest = self.latest if block < 5 else [block]
        return block
    @property
    def num_evictable(self): return len(self.free)
"""


@pytest.mark.parametrize("kind", list(CACHE_POLICIES))
def test_evictors_of_ours_pass_the_trial(kind: str) -> None:
    """Keys may ask what a policy was told of a block, as those of an oracle do."""
    results = Simulation(parse_config(data_of(TIGHT | {"evictor": kind}, None))).run()
    assert results.summary["completed"] == results.summary["num_requests"]


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("float('nan')", "Mine", "engine.evictor: .*an order, got nan and nan; mend"),
        ("{block.block_id}", "Mine", "engine.evictor: .*an order, got .1. and .2."),
        ("1 if self.num_asked < 9 else 'x'", "Mine", "Mine: TypeError: '<' not supp"),
        ("0", "Twice", "engine.evictor: Twice evicts block .* twice; forget a block"),
    ],
)
def test_an_evictor_orders_blocks_and_forgets_them(
    tmp_path: Path, key: str, name: str, said: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(KEYED.replace("{key}", key))
    data = data_of(TIGHT | {"evictor": f"{path}:{name}"}, None)
    with pytest.raises(Exception, match=r".") as fault:
        Simulation(parse_config(data)).run()
    told = fault_in_user_code(fault.value)
    if isinstance(fault.value, UserError):
        told = str(fault.value)
    assert re.match(said, str(told))
