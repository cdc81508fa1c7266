"""Victims of preemption: the policies, their views, and refusals of faulty ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.engine.sampling import sample
from sim.errors import ConfigError, SchedulerError
from sim.scheduler.block_space import cacheflow, v0_2
from sim.scheduler.generations import OURS
from sim.scheduler.hf_fifo import HF_FIFO
from sim.scheduler.v0 import scheduler as v0
from sim.scheduler.victims import (
    VICTIMS,
    CheapestToRecompute,
    LatestArrival,
    LeastProgress,
    LowestPriority,
    MostBlocks,
    VictimPolicy,
)
from sim.scheduler.views import RequestView, RunningRequest, WaitingRequest
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.sim.build import Run, request_from_spec, scheduler, spec
from tests.sim.commands import refused
from tests.sim.config.test_config import minimal, write
from tests.sim.scheduler.group_steps import Steps, make

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sim.scheduler.v1 import V1Scheduler

PRESSURE: dict[str, Any] = {
    "num_gpu_blocks_override": 40,
    "max_model_len": 200,
    "max_num_seqs": 8,
}


def pressed(**engine: Any) -> dict[str, Any]:
    """A small run with preemptions."""
    data = minimal(**PRESSURE | engine)
    data["workload"]["synthetic"] |= {
        "num_requests": 60,
        "arrivals": {"kind": "poisson", "rate": 100.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 120},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    data["workload"] |= {"max_tokens": 60, "priority": {0: 0.5, 1: 0.5}}
    return data


FACTS = (
    "request_id",
    "arrival_s",
    "priority",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_tokens",
    "max_num_tokens",
    "num_computed_tokens",
    "num_blocks",
    "num_recompute_tokens",
    "num_preemptions",
)


class Seen:
    """Chooses the last, and keeps the facts that it was shown the first time."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return the last."""
        if not self.facts:
            self.facts = [{f: getattr(each, f) for f in FACTS} for each in running]
            assert needs.request_id in {each["request_id"] for each in self.facts}
        return running[-1]


def crowded(policy: VictimPolicy | None, **changes: Any) -> V1Scheduler:
    """Four requests in a pool of twelve blocks of four tokens, with one to spare.

    ====  ======  ======  ========  ===========
    id    prompt  output  priority  blocks held
    ====  ======  ======  ========  ===========
    0     10      5       2         4
    1     6       4       0         3
    2     3       4       1         2
    3     3       1       0         1
    ====  ======  ======  ========  ===========
    """
    policed = scheduler(
        num_gpu_blocks=13,
        block_size=4,
        max_model_len=40,
        preemption_victim=policy,
        **changes,
    )
    plan = [(10, 2), (6, 0), (3, 1), (3, 0)]
    for step in range(5):
        arrivals = {0: [0], 1: [1, 2], 4: [3]}.get(step, [])
        for index in arrivals:
            length, priority = plan[index]
            facts = spec(index, float(index), length, 30, priority=priority)
            policed.add_request(request_from_spec(facts, 40))
        sample(policed.schedule(float(step)), step, step + 1.0)
    return policed


def victims_of(policy: VictimPolicy) -> list[int]:
    """Return the victims, in order, while the four requests grow."""
    policed = crowded(policy)
    found: list[int] = []
    for step in range(5, 12):
        output = policed.schedule(float(step))
        found += [each.request.request_id for each in output.preemptions]
        sample(output, step, step + 1.0)
        policed.check()
    return found


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (LatestArrival, 3),
        (LowestPriority, 0),
        (LeastProgress, 3),
        (MostBlocks, 0),
        (CheapestToRecompute, 3),
    ],
)
def test_each_policy_chooses_by_its_own_measure(
    kind: type[VictimPolicy], first: int
) -> None:
    assert victims_of(kind())[0] == first


def view(request_id: int, **facts: Any) -> RunningRequest:
    """A view of a request with these `facts`."""

    class Fake(RunningRequest):
        num_output_tokens = facts.get("output", 0)
        num_prompt_tokens = facts.get("prompt", 10)
        num_blocks = facts.get("blocks", 1)
        num_recompute_tokens = facts.get("recompute", 0)
        priority = facts.get("priority", 0)
        arrival_s = facts.get("arrival_s", 0.0)

    fake = Fake.__new__(Fake)
    Fake.request_id = request_id  # type: ignore[misc, assignment]
    return fake


@pytest.mark.parametrize(
    ("policy", "facts", "chosen"),
    [
        (LatestArrival(), [{"arrival_s": 1.0}, {"arrival_s": 3.0}, {}], 1),
        (LatestArrival(), [{}, {}, {}], 2),
        (LowestPriority(), [{"priority": 1}, {"priority": 1}, {"priority": -1}], 1),
        (LeastProgress(), [{"output": 3}, {"output": 2}, {"output": 9}], 1),
        (LeastProgress(), [{"prompt": 20}, {"prompt": 30}, {"prompt": 25}], 1),
        (LeastProgress(), [{}, {}, {}], 2),
        (MostBlocks(), [{"blocks": 3}, {"blocks": 7}, {"blocks": 5}], 1),
        (MostBlocks(), [{"blocks": 3}, {"blocks": 3}, {"blocks": 3}], 2),
        (CheapestToRecompute(), [{"recompute": 3}, {"recompute": 1}, {}], 2),
        (CheapestToRecompute(), [{}, {}, {"recompute": 1}], 1),
    ],
)
def test_ties_go_as_documented(
    policy: VictimPolicy, facts: list[dict[str, Any]], chosen: int
) -> None:
    views = [view(index, **each) for index, each in enumerate(facts)]
    assert policy.choose(views, views[0]) is views[chosen]


# -- views of a policy --------------------------------------------------------------


def test_a_policy_sees_what_there_is() -> None:
    seen = Seen()
    policed = crowded(seen)
    step = 5
    while not seen.facts:
        sample(policed.schedule(float(step)), step, step + 1.0)
        step += 1
    assert [each["request_id"] for each in seen.facts] == [0, 1, 2, 3]
    assert sum(each["num_blocks"] for each in seen.facts) == 12
    for each in seen.facts:
        assert (
            each["num_tokens"] == each["num_prompt_tokens"] + each["num_output_tokens"]
        )
        assert each["num_computed_tokens"] == each["num_tokens"] - 1
        assert each["num_recompute_tokens"] == each["num_computed_tokens"]
        assert each["max_num_tokens"] == 40
        assert each["num_preemptions"] == 0
    assert [each["priority"] for each in seen.facts] == [2, 0, 1, 0]
    assert [each["arrival_s"] for each in seen.facts] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", [RequestView, RunningRequest, WaitingRequest])
def test_no_view_shows_how_long_an_output_will_be(kind: type) -> None:
    shown = {name for name in dir(kind) if not name.startswith("_")}
    assert "num_output_tokens" in shown
    assert not [name for name in shown if re.search("oracle|due|event|last", name)]
    with pytest.raises(AttributeError):
        kind.__new__(kind).num_tokens = 3


def test_what_others_hold_too_is_not_computed_again() -> None:
    seen = Seen()
    policed = scheduler(
        num_gpu_blocks=10,
        block_size=4,
        max_model_len=36,
        enable_prefix_caching=True,
        preemption_victim=seen,
    )
    for index, own in enumerate((3, 4, 5)):
        facts = spec(index, float(index), 0, 30, prompt=((100, 9), (2 * index, own)))
        policed.add_request(request_from_spec(facts, 36))
    step = 0
    while not seen.facts:
        sample(policed.schedule(float(step)), step, step + 1.0)
        step += 1
    assert len(seen.facts) == 3
    for each in seen.facts:
        assert each["num_blocks"] >= 3
        # Two blocks of four tokens are shared; the third is begun by each alone.
        assert each["num_recompute_tokens"] == each["num_computed_tokens"] - 8


# -- getting on ---------------------------------------------------------------------


class Unprotected(MostBlocks):
    """Claims falsely that it always spares one."""

    always_spares_one: ClassVar[bool] = True


def two_long_prompts(policy: VictimPolicy) -> V1Scheduler:
    """Two prompts in chunks side by side; the pool holds one and a quarter of them."""
    policed = scheduler(
        num_gpu_blocks=11,
        block_size=4,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=4,
        max_model_len=40,
        scheduler_reserve_full_isl=False,
        preemption_victim=policy,
    )
    for index, arrival_step in enumerate((0, 2)):
        facts = spec(index, float(arrival_step), 32, 4)
        policed.add_request(request_from_spec(facts, 40))
    return policed


def num_finished(policed: V1Scheduler, num_steps: int) -> int:
    finished = 0
    for step in range(num_steps):
        ended = sample(policed.schedule(float(step)), step, step + 1.0)
        policed.update(ended)
        policed.check()
        finished += len(ended)
    return finished


def test_who_has_got_nothing_since_is_not_robbed_again() -> None:
    # Without protection the request ahead is preempted: neither ever gets a token.
    assert num_finished(two_long_prompts(Unprotected()), 2000) == 0
    assert num_finished(two_long_prompts(MostBlocks()), 100) == 2


def test_a_victim_gives_its_place_in_the_batch_back() -> None:
    run = Run(
        [spec(i, 0.0, 20 + 7 * i, 40) for i in range(8)],
        num_gpu_blocks=16,
        max_model_len=150,
        preemption_victim=MostBlocks(),
        max_num_batched_tokens=64,
    )
    recording = run.go()
    assert (recording.requests["status"] == "finished_stopped").all()
    assert recording.steps["num_batched_tokens"].max() <= 64
    reasons = {str(reason) for reason in recording.preemptions["reason"]}
    assert reasons == {MostBlocks.reason}


# -- generations --------------------------------------------------------------------

WITH_VICTIMS = [name for name, g in OURS.items() if "preemption_victim" in g.keys]


@pytest.mark.parametrize("generation", WITH_VICTIMS)
@pytest.mark.parametrize("kind", VICTIMS)
def test_every_generation_takes_every_policy(generation: str, kind: str) -> None:
    data = pressed(scheduler=generation, preemption_victim=kind, block_size=16)
    data["workload"]["best_of"] = {1: 0.7, 2: 0.3}
    simulation = Simulation(parse_config(data))
    results = simulation.run(check_every=7)
    served = results.summary["completed"] + results.summary["rejected"]
    assert served == results.summary["num_requests"]
    assert results.summary["num_preemptions"] > 0
    assert not results.summary["stalled"]


@pytest.mark.parametrize("generation", WITH_VICTIMS)
def test_policies_differ(generation: str) -> None:
    # Many small requests: hf_fifo chooses among those only that find no block at once.
    more = {"scheduler": generation, "num_gpu_blocks_override": 120, "block_size": 4}
    if generation == "hf_fifo":
        more["safety_margin"] = 0.0
    schedules = {
        simulate(parse_config(pressed(**more, preemption_victim=kind)))
        .preemptions[["time_s", "request_id"]]
        .to_json()
        for kind in (None, "most_blocks", "cheapest_to_recompute")
    }
    assert len(schedules) == 3


@pytest.mark.parametrize("kind", [cacheflow.Scheduler, v0_2.Scheduler, v0.Scheduler])
def test_groups_are_chosen_among_those_without_a_slot(kind: Any) -> None:
    seen = Seen()
    run = Steps(make(kind, num_gpu_blocks=12, preemption_victim=seen))
    for length in (9, 9, 9):
        run.add(length, 30)
    while not seen.facts:
        run.emit(run.call())
    assert seen.facts[-1]["request_id"] == 2
    for each in seen.facts:
        assert each["num_blocks"] == -(-each["num_computed_tokens"] // 4) == 4
        assert each["num_output_tokens"] > 1
        assert each["num_recompute_tokens"] == each["num_computed_tokens"]


def test_hf_fifo_evicts_whom_the_policy_names_among_the_starved() -> None:
    def evicted(policy: VictimPolicy | None) -> list[int]:
        policed = HF_FIFO.make(
            {
                "num_gpu_blocks": 10,
                "block_size": 4,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 8,
                "max_model_len": 30,
                "safety_margin": 0.0,
                "preemption_victim": policy,
            }
        )
        for index, length in enumerate((3, 7, 3)):
            facts = spec(index, float(index), length, 12)
            policed.add_request(request_from_spec(facts, 30))
        found: list[int] = []
        for step in range(40):
            output = policed.schedule(float(step))
            found += [each.request.request_id for each in output.preemptions]
            policed.update(sample(output, step, step + 1.0))
            policed.check()
        return found

    # The middle one holds most; none of them is given up twice.
    assert evicted(None) == evicted(LatestArrival()) == [2]
    assert evicted(MostBlocks()) == [1]


# -- a user's own -------------------------------------------------------------------

MINE = """
class Mine:
    def __init__(self, turns: int = 1):
        self.turns = turns
    {method}
"""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("def choose(self, running, needs): pass", "must return one of .* got None;"),
        ("def choose(self, running, needs): return 3", "got 3; mend Mine"),
        (
            "def choose(self, running, needs): return type(needs)(needs._request, 1) "
            "if len(running) < 2 else needs._request",
            r"running requests that it is given, got Request\(\d+\);",
        ),
        (
            "def choose(self, running, needs): return running[99]",
            "mine.py:5: IndexError",
        ),
        ("def chooses(self): pass", "a victim policy needs a method choose.running, n"),
    ],
)
def test_a_users_policy_is_held_to_its_contract(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    message: str,
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(MINE.format(method=method))
    path = write(tmp_path, pressed(preemption_victim="mine.py:Mine"))
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert re.search(message, line)


COUNTING = """
class Mine:
    def choose(self, running, needs):
        for each in running:
            assert each.num_output_tokens >= 0, each.num_output_tokens
            assert each.num_tokens == each.num_prompt_tokens + each.num_output_tokens
            if each.num_output_tokens and not each.num_preemptions:
                assert each.num_computed_tokens == each.num_tokens - 1
        return running[-1]
"""


@pytest.mark.parametrize("is_stepwise", [True, False])
def test_a_policy_sees_tokens_as_they_were_generated(
    *, is_stepwise: bool, tmp_path: Path
) -> None:
    """Also of decodes on the decode clock, which are not counted one by one."""
    (tmp_path / "counting.py").write_text(COUNTING)
    settings = pressed(preemption_victim=f"{tmp_path}/counting.py:Mine")
    settings["engine"]["async_scheduling"] = False
    simulation = Simulation(parse_config(settings), stepwise=is_stepwise)
    assert simulation.run().summary["num_preemptions"] > 10


def test_a_request_that_is_not_offered_is_refused() -> None:
    class Stale(Seen):
        first: RunningRequest | None = None

        def choose(
            self, running: Sequence[RunningRequest], needs: RunningRequest
        ) -> RunningRequest:
            self.first = self.first or running[-1]
            return self.first

    with pytest.raises(SchedulerError, match=r"got RunningRequest\(3\); mend Stale"):
        victims_of(Stale())


def test_a_policy_of_ones_own_with_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    method = "def choose(self, running, needs): return running[-self.turns]"
    (tmp_path / "mine.py").write_text(MINE.format(method=method))
    table = {"kind": "mine.py:Mine", "turns": 1}
    path = write(tmp_path, pressed(preemption_victim=table))
    out = ["--out", str(tmp_path / "o"), "--no-figures", "--quiet", "--check", "1"]
    assert kvsim(["run", str(path), *out]) == 0
    mine = simulate(parse_config(pressed(preemption_victim=f"{tmp_path}/mine.py:Mine")))
    default = simulate(parse_config(pressed()))
    assert mine.requests.equals(default.requests)
    assert set(mine.preemptions["reason"]) == {
        "no free block for a running request; Mine chose"
    }


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"preemption_victim": "most_block"},
            "engine.preemption_victim.kind: 'most_block' is not built; did you mean "
            "'most_blocks'",
        ),
        (
            {"preemption_victim": {"kind": "most_blocks", "n": 3}},
            "engine.preemption_victim.n: 'most_blocks' has no such key",
        ),
        ({"preemption_victim": {"n": 3}}, "engine.preemption_victim.kind: must name"),
        ({"preemption_victim": 3}, "engine.preemption_victim"),
    ],
)
def test_a_policy_that_is_not_there_is_refused(
    engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Simulation(parse_config(minimal(**engine)))
    assert message in str(caught.value)


def test_who_arrived_last_is_the_default_to_the_byte() -> None:
    default = simulate(parse_config(pressed()))
    for stepwise in (False, True):
        config = parse_config(pressed(preemption_victim="latest_arrival"))
        named = Simulation(config, stepwise=stepwise).run()
        for table in ("requests", "steps", "preemptions"):
            assert getattr(named, table).equals(getattr(default, table)), table


def test_priorities_do_something_where_victims_heed_them() -> None:
    def warned(**engine: Any) -> bool:
        simulation = Simulation(parse_config(pressed(**engine)))
        return any("workload.priority does nothing" in w for w in simulation.warnings)

    assert warned()
    assert warned(preemption_victim="most_blocks")
    assert not warned(preemption_victim="lowest_priority")
