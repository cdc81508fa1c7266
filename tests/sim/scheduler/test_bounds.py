"""Rules at their bounds, which runs hardly ever meet: faults there went unnoticed."""

from __future__ import annotations

from array import array
from functools import partial
from math import inf
from types import SimpleNamespace as Told
from typing import Any

import numpy as np
import pytest

from cache.v1.policies import ARC
from sim.costs.pricing import _ends_ahead_by
from sim.engine.clock import ARRIVAL_PRIORITY
from sim.engine.offloading import OffloadedSteps
from sim.engine.steps.single import QuietSteps
from sim.errors import CostError
from sim.fleet.balancer import Load
from sim.fleet.routers.dynamo_kv import DynamoKv
from sim.fleet.scrapes import load_of
from sim.scheduler.batch import BatchShape
from sim.scheduler.sglang.adder import Added, PrefillAdder
from sim.scheduler.sglang.requests import Entry
from sim.scheduler.sglang.settings import Settings
from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler
from sim.scheduler.v1.scheduler import Scheduler
from tests.sim.fleet.test_routers import request as request_of


def test_sglang_takes_no_request_that_needs_all_that_is_left() -> None:
    settings = Settings(max_prefill_tokens=10_000, chunked_prefill_size=-1)
    for num_free, told in ((150, Added.NO_TOKEN), (151, None)):
        cache: Any = Told(
            allocator=Told(num_available_tokens=num_free), num_evictable_tokens=0
        )
        adder = PrefillAdder(settings, cache, [], ratio=0.5, num_mixed=0)
        entry: Any = Told(num_left=50, num_extend_tokens=100)
        assert adder._refused(entry) is told


def test_sglang_lets_a_prompt_that_is_too_long_end_with_a_token() -> None:
    request: Any = Told(num_prompt_tokens=900, max_num_tokens=1_000, ignore_eos=False)
    settings: Any = Told(longest_request=2_000, longest_prompt=800, patch=9)
    entry = Entry.of(request, np.arange(900), settings)
    assert (request.max_num_tokens, entry.num_prompt_tokens) == (901, 1)


@pytest.mark.parametrize(
    ("has_news", "news_s", "wake_s"),
    [
        (False, 11.2, 11.5),  # the third look
        (False, 10.1, 10.5),
        (False, 9.0, 10.5),
        (False, inf, inf),
        (True, 11.2, 10.5),
    ],
)
def test_looks_at_what_is_behind_the_host_come_one_interval_after_another(
    has_news: bool, news_s: float, wake_s: float
) -> None:
    steps: Any = Told(
        _behind=Told(next_news_s=lambda _: news_s), _has_news=has_news, _idle_s=0.5
    )
    assert OffloadedSteps._wake_behind_s(steps, 10.0) == wake_s


def test_a_decode_that_opened_a_block_tells_of_that_alone() -> None:
    scheduler: Any = Told(
        layout=Told(groups=[Told(spec=Told(block_size=16))]),
        step=8,
        prompts=[],
        passed_over=(),
        clock=Told(block_size=16, opening=lambda step: ["decode"] if step == 7 else []),
        num_computed_tokens=lambda _: 33,  # two blocks are full
        block_ids=lambda _, first, group: [10, 11, 12][first:],
    )
    assert [*ConnectorScheduler.new_block_ids(scheduler)] == [[12]]


def test_dynamo_counts_a_prompt_until_its_token_appears() -> None:
    env: Any = Told(now=5.0, turn=ARRIVAL_PRIORITY)
    router = DynamoKv(env, 1, np.random.default_rng(0), 16, lambda _: [0])
    asked = request_of(0, (1, 70))
    router.choose(asked)
    asked.note_first_token(5.0)
    assert router.num_computing(0) == 70  # arrivals come before ends of steps
    env.turn = ARRIVAL_PRIORITY + 1
    assert router.num_computing(0) == 0


def test_dynamo_forgets_first_tokens_of_an_engine_that_is_gone() -> None:
    """One that is sent there once more has its prompt computed anew."""
    env: Any = Told(now=4.0, turn=ARRIVAL_PRIORITY)
    router = DynamoKv(env, 1, np.random.default_rng(0), 16, lambda _: [0])
    asked = request_of(0, (1, 70))
    router.choose(asked)
    asked.note_first_token(5.0)  # known before, amid quiet steps
    router.set_ready(())
    router.set_ready((0,))
    router.choose(asked)
    env.now = 6.0
    assert router.num_computing(0) == 70


def test_steps_ahead_end_where_the_host_outlasts_one() -> None:
    ends = _ends_ahead_by(lambda context: 3.0 - context / 10, 1, 2.5, 0.0)
    assert ends(0, 9, 0.0, inf) == pytest.approx(
        [3.0, 5.9, 8.7, 11.4, 14.0, 16.5, 18.9]
    )
    assert ends(0, 9, 0.0, 5.9) == pytest.approx([3.0, 5.9, 8.7])


def test_arc_forgets_what_was_only_seen_once_when_all_is_so() -> None:
    """Case IV of the paper: content that is new, and no ghost."""
    arc = ARC(2)
    for block_id, content in ((1, 11), (2, 12)):
        arc.cached(block_id, content, 0)
        arc.released(block_id)
    assert arc.evict(13) == 1  # without a ghost, as T1 is as long as the cache
    arc.cached(1, 13, 0)
    arc.released(1)
    assert arc.evict(11) == 2
    arc.cached(2, 11, 0)
    arc.released(2)
    arc.check()
    assert arc.evict(None) == 1  # 11 was no ghost, so it stands in T1 behind 13


def test_usage_amid_a_stretch_is_asked_of_schedulers_that_foresee_it() -> None:
    scheduler: Any = Told(
        num_waiting=2,
        num_running=3,
        cache_usage=lambda: Told(kv_cache_usage=0.25),
        usage_after=lambda num_steps: num_steps / 10,
    )
    engine: Any = Told(scheduler=scheduler, stretch=Told(num_begun=lambda: 7))
    assert load_of(engine) == Load(2, 3, 0.25)
    scheduler.foresees_usage = True
    assert load_of(engine) == Load(2, 3, 0.7)
    engine.stretch = None
    assert load_of(engine) == Load(2, 3, 0.25)


def test_a_newcomer_ahead_of_a_head_that_is_kept_out_is_looked_at() -> None:
    told: Any = Told(
        step=4,
        gate=Told(head="refused", num_steps_shut=lambda _: 7),
        waiting=Told(peek_request=lambda: "newcomer"),
        running=["one"],
        prefilling=[],
        clock=Told(num_decodes=1),
        _most_running=2,
        _budget=10,
        _decodes=Told(num_steps=lambda _, most: most),
        _chunks=Told(are_spaced=False),
    )
    told._num_steps_shut = partial(Scheduler._num_steps_shut, told)
    assert Scheduler.quiet_steps(told, 50) == 0
    told.waiting.peek_request = lambda: "refused"
    assert Scheduler.quiet_steps(told, 50) == 7


def test_a_quiet_step_without_a_length_is_refused_by_what_decodes_cost() -> None:
    shapes: list[BatchShape] = []

    def priced(shape: BatchShape) -> Any:
        shapes.append(shape)
        return Told(total_s=0.0)

    clock: Any = Told(num_decodes=2, num_base_tokens=100)
    tables: Any = Told(num_usable_blocks=10)
    cost_model: Any = Told(step=priced)
    log = Told(ends_s=array("d"), new_blocks=array("q"), packed=[])
    recorder: Any = Told(steps=log)
    never: Any = None
    steps = QuietSteps(clock, tables, never, never, never, cost_model, recorder)
    with pytest.raises(CostError, match=r"says 0\.0 s at 5\.0 s"):
        steps.take(3, 1, 5.0, inf, [5.0])
    assert shapes == [BatchShape(2, 106, 0, 0, 0, 0)]
    assert not log.packed
