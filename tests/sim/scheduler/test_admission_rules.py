"""Admission rules: decisions, lengths they expect, and refusals of faulty rules."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.engine.sampling import sample
from sim.errors import ConfigError
from sim.scheduler.admission import (
    ADMISSION_RULES,
    AdmissionRule,
    Conservative,
    FullPrompt,
    PastFuture,
    Watermark,
)
from sim.scheduler.admission.output_lengths import OutputLengths
from sim.scheduler.admission.past_future import _excess
from sim.scheduler.generations import OURS
from sim.scheduler.victims import VICTIMS
from sim.scheduler.views import EngineView, RequestView, WaitingRequest
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.sim.build import Run, request_from_spec, scheduler, spec
from tests.sim.commands import refused
from tests.sim.config.test_config import minimal, write
from tests.sim.scheduler.test_victims import pressed
from workloads.lengths import FixedLength, UniformLength

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.scheduler.v1 import V1Scheduler


def known(lengths: list[int], **more: int) -> OutputLengths:
    """Return the lengths known when outputs of these lengths have ended."""
    learned = OutputLengths(None, more.get("window", 10), more.get("min_known", 1))
    for length in lengths:
        learned.finished(grown(length))
    return learned


def grown(num_output_tokens: int, most: int = 10_000) -> RequestView:
    """A request that has generated so much."""
    request = request_from_spec(spec(0, 0.0, 10, 1, max_tokens=most), 100_000)
    request.num_tokens = 10 + num_output_tokens
    return RequestView(request)


def _victim(kind: str) -> dict[str, Any]:
    return {"preemption_victim": VICTIMS[kind]()}


# -- known lengths of outputs -------------------------------------------------------


def test_the_rest_is_the_mean_of_those_that_got_as_far() -> None:
    lengths = known([4, 10, 10, 20])
    assert lengths.expected_rest(grown(0)) == 11
    assert lengths.expected_rest(grown(4)) == pytest.approx(40 / 3 - 4)
    assert lengths.expected_rest(grown(9)) == pytest.approx(40 / 3 - 9)
    assert lengths.expected_rest(grown(10)) == 10
    assert lengths.expected_rest(grown(19)) == 1
    assert lengths.expected_rest(grown(500)) == 1  # it has not ended
    assert lengths.expected_rest(grown(0, most=7)) == 7  # the client's own limit


def test_only_the_latest_outputs_are_remembered() -> None:
    lengths = known([100, 100, 3, 5, 7], window=3)
    assert lengths.expected_rest(grown(0)) == 5
    lengths.finished(grown(100))
    assert lengths.expected_rest(grown(0)) == pytest.approx(112 / 3)


def test_nothing_is_expected_before_enough_have_ended() -> None:
    assert not known([5] * 3, min_known=4).is_known
    assert known([5] * 4, min_known=4).is_known
    assert OutputLengths(FixedLength(9), 10, 10).is_known


def test_a_distribution_stands_in_for_what_has_ended() -> None:
    lengths = OutputLengths(UniformLength(low=1, high=99), 10, 1)
    lengths.finished(grown(5000))  # teaches nothing
    assert lengths.expected_rest(grown(0)) == pytest.approx(50, abs=0.5)
    assert lengths.expected_rest(grown(49)) == pytest.approx(25.5, abs=0.5)


def test_the_mean_rest_agrees_with_a_plain_sum() -> None:
    rng = np.random.default_rng(3)
    values = [int(v) for v in rng.integers(1, 60, size=300)]
    lengths = known(values, window=200)
    latest = np.array(values[-200:])
    for done in range(60):
        longer = latest[latest > done]
        rest = float(longer.mean()) - done if len(longer) else 1.0
        assert lengths.expected_rest(grown(done)) == pytest.approx(max(rest, 1.0))


# -- rules --------------------------------------------------------------------------


def asked(
    rule: AdmissionRule,
    *,
    needed: int,
    full: int,
    available: int,
    running: list[Any] | None = None,
    num_gpu_blocks: int = 100,
) -> bool:
    head = WaitingRequest(
        grown(0)._request, num_needed_blocks=needed, num_full_blocks=full
    )
    engine = EngineView(
        num_gpu_blocks=num_gpu_blocks,
        block_size=16,
        num_available_blocks=available,
        running=lambda: running or [],
    )
    return rule.admits(head, engine)


def test_a_watermark_is_left_free() -> None:
    rule = Watermark(0.05)
    assert asked(rule, needed=4, full=9, available=9)
    assert not asked(rule, needed=4, full=9, available=8)
    assert asked(rule, needed=4, full=4, available=8, num_gpu_blocks=99)
    assert asked(Watermark(0.0), needed=4, full=9, available=4)


def test_the_whole_prompt_must_fit() -> None:
    assert asked(FullPrompt(), needed=1, full=7, available=7)
    assert not asked(FullPrompt(), needed=1, full=7, available=6)


class Runs:
    """A running request: tokens known, of which generated, and blocks held."""

    def __init__(self, num_tokens: int, num_output_tokens: int, blocks: int) -> None:
        self.num_tokens = num_tokens
        self.num_output_tokens = num_output_tokens
        self.num_prompt_tokens = num_tokens - num_output_tokens
        self.num_blocks = blocks
        self.max_num_tokens = 10_000


@pytest.mark.parametrize("kind", [Conservative, PastFuture])
def test_until_outputs_are_known_only_the_known_tokens_count(
    kind: type[Conservative],
) -> None:
    rule = kind(min_known=2)
    crowd = [Runs(1000, 10, 63)] * 5
    assert asked(rule, needed=1, full=7, available=7, running=crowd)
    assert not asked(rule, needed=1, full=7, available=6, running=crowd)


def test_the_conservative_rule_adds_all_that_is_to_come() -> None:
    # Outputs of 64 tokens; the head has 10 prompt tokens in 1 block: 5 blocks in all.
    # The first that runs has 48 to come, so 3 more blocks; the second 16, 1 more.
    rule = Conservative(output_tokens=FixedLength(64))
    crowd = [Runs(32, 16, 2), Runs(96, 48, 6)]
    assert asked(rule, needed=1, full=1, available=9, running=crowd)
    assert not asked(rule, needed=1, full=1, available=8, running=crowd)
    half = Conservative(0.5, output_tokens=FixedLength(64))
    # 32 and then 24 and 8 tokens to come: 3 blocks, 2 and 1.
    assert asked(half, needed=1, full=1, available=6, running=crowd)
    assert not asked(half, needed=1, full=1, available=5, running=crowd)


def test_the_peak_is_lower_where_somebody_leaves_before() -> None:
    rule = PastFuture(output_tokens=FixedLength(64))
    crowd = [Runs(32, 16, 2), Runs(96, 48, 6)]
    # When the second ends, all have grown by one block: 3 and the head's own. Its 7
    # blocks, growth included, are more than the others still want.
    assert asked(rule, needed=1, full=1, available=4, running=crowd)
    assert not asked(rule, needed=1, full=1, available=3, running=crowd)
    conservative = Conservative(output_tokens=FixedLength(64))
    assert not asked(conservative, needed=1, full=1, available=4, running=crowd)


def test_the_peak_is_that_of_a_plain_replay() -> None:
    """Grow all requests token by token, free those that end, count the blocks."""
    rng = np.random.default_rng(11)
    for _ in range(50):
        # Whole blocks, so that growth by blocks and by tokens agree.
        held = [int(v) for v in rng.integers(1, 9, size=6)]
        rests = [int(v) for v in rng.integers(1, 9, size=6)]
        most = taken = 0
        for now in range(1, max(rests) + 1):
            taken = sum(
                now if now <= rest else -own
                for own, rest in zip(held, rests, strict=True)
            )
            most = max(most, taken)
        growth = 16.0 * np.array(rests)
        growths, known = growth / 16, np.array(held, float)
        assert _excess(growths, known, most) <= 0 < _excess(growths, known, most - 1)


@given(
    rows=st.lists(
        st.tuples(st.floats(0.01, 30), st.integers(0, 40), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    most=st.integers(-20, 300),
    data=st.data(),
)
def test_what_exceeds_the_pool_goes_on_to_until_growths_fell_by_as_much(
    rows: list[tuple[float, int, bool]], most: int, data: st.DataObject
) -> None:
    """Growths fall, and known blocks come out of free ones: the peak stays above."""
    growths = np.array([each[0] for each in rows])
    known = np.array([each[1] for each in rows], float)
    excess = _excess(growths, known, most)
    if excess <= 0:
        return
    fallen = data.draw(st.floats(0, 1, exclude_max=True)) * excess * (1 - 1e-9)
    falls = np.array([each[2] for each in rows])
    taken = data.draw(
        st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))
    )
    later = growths - falls * fallen
    assert _excess(later, known + taken, most - sum(taken)) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Watermark(1.0), r"share must be at least 0 and below 1, got 1\.0"),
        (lambda: Watermark(-0.1), r"share must be"),
        (lambda: Watermark(math.nan), r"share must be"),
        (lambda: Conservative(0.0), r"conservativeness must be above 0, got 0\.0"),
        (lambda: Conservative(min_known=0), "min_known must be from 1 to window"),
        (lambda: PastFuture(window=5, min_known=6), "which is 5, got 6"),
    ],
)
def test_impossible_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- at work ------------------------------------------------------------------------


def tight(rule: AdmissionRule | None, **changes: Any) -> Run:
    """Thirty requests of different lengths in a cache of 39 blocks."""
    return Run(
        [spec(i, i / 2, 5 + 7 * i % 83, 1 + 11 * i % 47) for i in range(30)],
        num_gpu_blocks=40,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=150,
        admission=rule,
        **changes,
    )


@pytest.mark.parametrize("kind", ADMISSION_RULES)
def test_whoever_has_a_rule_serves_everybody(kind: str) -> None:
    data = pressed(admission=kind)
    results = Simulation(parse_config(data)).run(check_every=1)
    assert results.summary["completed"] == results.summary["num_requests"]


def test_reserving_what_is_expected_ends_preemptions() -> None:
    own = tight(None).go()
    # Outputs of the run are 24 tokens long on average.
    expected = Conservative(output_tokens=UniformLength(low=1, high=47))
    assert len(own.preemptions) > 5
    assert len(tight(expected).go().preemptions) < len(own.preemptions) / 3


def test_a_rule_is_told_who_has_ended_and_how_long_it_was() -> None:
    class Told(FullPrompt):
        def __init__(self) -> None:
            self.ends: list[tuple[int, int]] = []

        def finished(self, request: RequestView) -> None:
            self.ends.append((request.request_id, request.num_output_tokens))

    rule = Told()
    requests = tight(rule).go().requests
    assert sorted(rule.ends) == list(
        zip(requests["request_id"], requests["num_output_tokens"], strict=True)
    )


POLICIES: dict[str, Callable[[], dict[str, Any]]] = {
    "watermark": lambda: {"admission": Watermark(0.3)},
    "conservative": lambda: {"admission": Conservative(min_known=3)},
    "past_future": lambda: {"admission": PastFuture(min_known=3)},
} | {kind: partial(_victim, kind) for kind in VICTIMS}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_longer_answer_changes_no_decision_before_it_shows(policy: str) -> None:
    """Invariant 4: a later end is not known earlier."""
    runs = []
    for longer in (0, 30):
        specs = [spec(i, i / 2, 5 + 7 * i % 83, 1 + 11 * i % 47) for i in range(30)]
        specs[12] = spec(12, 6.0, 5, 20 + longer)
        runs.append(
            Run(
                specs,
                num_gpu_blocks=40,
                block_size=4,
                max_num_batched_tokens=32,
                max_num_seqs=8,
                max_model_len=150,
                **POLICIES[policy](),
            ).go()
        )
    until = runs[0].requests["finish_s"][12]
    first, second = (
        run.steps[run.steps["start_s"] < until].drop(columns="num_finished")
        for run in runs
    )
    assert len(first) > 20
    assert first.equals(second)
    assert len(runs[0].steps) != len(runs[1].steps)


def test_an_idle_engine_admits_without_asking() -> None:
    class No:
        num_asked = 0

        def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
            self.num_asked += 1
            return False

    rule = No()
    recording = tight(rule).go()
    assert (recording.requests["status"] == "finished_stopped").all()
    assert recording.steps["num_running"].max() == 1  # one after another
    assert rule.num_asked > 30


def test_what_a_rule_sees_is_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Looks:
        def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
            seen.append(
                {
                    "head": (head.num_needed_blocks, head.num_full_blocks),
                    "free": engine.num_available_blocks,
                    "running": [
                        (each.request_id, each.num_tokens, each.num_blocks)
                        for each in engine.running
                    ],
                    "pool": (engine.num_gpu_blocks, engine.block_size),
                }
            )
            return True

    policed: V1Scheduler = scheduler(
        num_gpu_blocks=21,
        block_size=4,
        max_model_len=60,
        max_num_batched_tokens=12,
        scheduler_reserve_full_isl=False,
        watermark=0.1,
        admission=Looks(),
    )
    for index, length in enumerate((9, 22)):
        policed.add_request(request_from_spec(spec(index, 0.0, length, 20), 60))
    sample(policed.schedule(0.0), 0, 1.0)
    # The second gets the 3 tokens that are left of the budget: 1 block, 6 in all. Of
    # the 20 usable blocks 3 are taken, and the engine's own watermark keeps 2.
    assert seen == [
        {"head": (1, 6), "free": 15, "running": [(0, 9, 3)], "pool": (21, 4)}
    ]


# -- in a configuration -------------------------------------------------------------


@pytest.mark.parametrize("generation", sorted(set(OURS) - {"v1"}))
def test_generations_without_rules_say_who_has_them(generation: str) -> None:
    message = (
        rf"engine\.admission: the {generation} generation has no such key \(v1 has"
    )
    with pytest.raises(ConfigError, match=message):
        parse_config(minimal(scheduler=generation, admission="watermark"))


@pytest.mark.parametrize(
    ("admission", "message"),
    [
        ("watermarks", "engine.admission.kind: 'watermarks' is not built; did you"),
        ({"kind": "watermark", "share": 2.0}, "engine.admission: share must be"),
        ({"kind": "watermark", "shares": 0.1}, "did you mean 'share'?"),
        (
            {"kind": "conservative", "output_tokens": {"kind": "fixd"}},
            "engine.admission.output_tokens.kind: 'fixd' is not built",
        ),
        (
            {"kind": "conservative", "conservativeness": "high"},
            "engine.admission.conservativeness: ",
        ),
    ],
)
def test_a_rule_that_cannot_be_made_is_refused(admission: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Simulation(parse_config(minimal(admission=admission)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("def admits(self, head, engine): pass", "must return True or False, got None"),
        ("def admits(self, head, engine): return head.size", "AttributeError: .*size"),
        ("def admit(self): pass", "needs a method admits"),
    ],
)
def test_a_users_rule_is_held_to_its_contract(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    message: str,
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(f"class Mine:\n    {method}\n")
    path = write(tmp_path, pressed(admission="mine.py:Mine"))
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    assert re.search(message, line)


def test_a_configured_distribution_is_known_from_the_start() -> None:
    table = {
        "kind": "past_future",
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    own, expecting = (
        simulate(parse_config(pressed(admission=admission))).summary
        for admission in (None, table)
    )
    assert expecting["num_preemptions"] < own["num_preemptions"] / 2


@pytest.mark.parametrize(
    ("admission", "own"),
    [
        ({"kind": "watermark", "share": 0.2}, {"watermark": 0.2}),
        ("full_prompt", {"scheduler_reserve_full_isl": True}),
    ],
)
@pytest.mark.parametrize("stepwise", [False, True])
def test_rules_that_are_keys_as_well_agree_with_them(
    admission: Any, own: dict[str, Any], stepwise: bool
) -> None:
    chunks = {"max_num_batched_tokens": 64, "scheduler_reserve_full_isl": False}
    named, key = (
        Simulation(parse_config(pressed(**engine)), stepwise=stepwise).run()
        for engine in (chunks | {"admission": admission}, chunks | own)
    )
    bare = simulate(parse_config(pressed(**chunks)))
    assert named.summary["path"] == ("stepwise" if stepwise else "fast")
    for table in ("requests", "steps", "preemptions"):
        assert getattr(named, table).equals(getattr(key, table)), table
    assert not named.steps.equals(bare.steps)
