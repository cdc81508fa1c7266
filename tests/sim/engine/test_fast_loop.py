"""The step loop under observers and clients, and the requests that it takes in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.costs.constant import ConstantCost
from sim.costs.pricing import batch_total_of
from sim.engine.requests import (
    ColumnRequest,
    RequestFactory,
    requests_of,
)
from sim.engine.sampling import sample
from sim.scheduler.request import Request
from tests.sim.build import request_from_spec, scheduler, spec
from tests.sim.engine.test_fast_engine import (
    MAX_MODEL_LEN,
    Run,
    burst,
    request_lists,
)
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    from sim.engine.loop import Engine
    from workloads.spec import RequestSpec


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
def test_pulled_requests_are_served_as_submitted_ones(caching: bool) -> None:
    changes = {"enable_prefix_caching": caching, "num_gpu_blocks": 51}
    specs = burst(30)
    stepwise = Run(specs, fast=False, **changes).finish()
    assert stepwise["preemptions"].count("\n") > 3
    fast = Run(specs, fast=True, pull=True, **changes)
    assert fast.finish() == stepwise


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    specs=request_lists,
    every=st.lists(st.integers(1, 60), max_size=3),
    stop_after=st.none() | st.integers(1, 200),
    caching=st.booleans(),
    num_gpu_blocks=st.integers(51, 90),
    pull=st.booleans(),
)
def test_observers_see_the_same_on_both_paths(
    *,
    specs: list[RequestSpec],
    every: list[int],
    stop_after: int | None,
    caching: bool,
    num_gpu_blocks: int,
    pull: bool,
) -> None:
    seen: list[list[Any]] = []
    for fast in (False, True):
        run = Run(
            specs,
            fast=fast,
            pull=pull,
            enable_prefix_caching=caching,
            num_gpu_blocks=num_gpu_blocks,
        )
        notes: list[Any] = []

        def look(engine: Engine, run: Run = run, notes: list[Any] = notes) -> None:
            recorder, scheduler = run.recorder, engine.scheduler
            scheduler.check()
            recorder.check(scheduler)
            notes.append((engine.num_steps, engine.env.now, recorder.num_arrived))
            notes.append(sorted((k, r.num_tokens) for k, r in recorder.active.items()))
            if stop_after is not None and engine.num_steps >= stop_after:
                engine.stop_requested = True

        for steps in every:
            run.engine.observe(steps, look)
        notes.append(run.finish() | {"ids": None})  # one may be drawn ahead
        seen.append(notes)
    assert seen[1] == seen[0]


def test_a_request_that_is_refused_or_waited_for_is_left_to_the_engine() -> None:
    ended: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
    specs = [
        spec(0, 0.0, 10, 30),
        spec(1, 2.0, MAX_MODEL_LEN, 5),
        spec(2, 2.5, 20, 1),
        spec(3, 3.0, 20, 9),
    ]
    results = []
    for fast in (False, True):
        run = Run(specs, fast=fast, pull=fast)
        make = run.factory._request

        def made(
            *given: Any, make: Any = make, run: Run = run, fast: bool = fast
        ) -> Request:
            request = make(*given)
            request.on_end = lambda each: ended[fast].append(
                (each.request_id, run.env.now)
            )
            return request

        run.factory._request = made  # type: ignore[method-assign]
        results.append(run.finish())
    assert results[0] == results[1]
    assert ended[False] == ended[True]
    assert len(ended[True]) == 4


def test_whoever_waits_for_an_end_is_called_while_others_begin() -> None:
    # Request 0 gives its last token in the very step that computes prompt 1.
    specs = [spec(0, 0.0, 10, 5), spec(1, 3.5, 20, 9)]
    run = Run([], fast=True)
    ended: list[tuple[int, float]] = []
    for request in run.factory.stream(specs):
        if not request.request_id:
            request.on_end = lambda each: ended.append((each.request_id, run.env.now))
            run.engine.submit(request)
            continue
        run.engine.arrivals = [request]
    run.env.run(until=run.engine.done)
    steps = run.recorder.finish(run.env.now).steps
    assert steps["num_prefills"][4] == steps["num_finished"][4] == 1
    assert ended == [(0, 5.0)]


def columns(**more: Any) -> RequestColumns:
    return RequestColumns(
        arrival_s=np.array([0.0, 1.5, 1.5]),
        num_prompt_tokens=np.array([7, 1, 300]),
        num_output_tokens=np.array([1, 40, 9]),
        first_request_id=5,
        first_text=3,
        **more,
    )


@pytest.mark.parametrize("max_tokens", [None, 3, 1000])
@pytest.mark.parametrize("ends", [True, False, np.array([True, True, False])])
def test_requests_of_columns_are_those_of_the_factory(
    max_tokens: int | None, ends: Any
) -> None:
    specs = columns(max_tokens=max_tokens, priority=2, ends_at_stop=ends)
    factory = RequestFactory(MAX_MODEL_LEN)
    slim, full = list(requests_of(factory, specs)), list(factory.stream(specs))
    assert {type(each) for each in slim} == {ColumnRequest}
    later = {"base_tokens", "joined_step", "num_tokens_at_event"}  # when it decodes
    for ours, theirs in zip(slim, full, strict=True):
        for name in set(Request.__slots__) - later - {"tokens"}:
            mine, other = getattr(ours, name), getattr(theirs, name)
            if isinstance(other, float) and math.isnan(other):
                assert math.isnan(mine), name
            else:
                assert (list(mine) if other == [] else mine) == other, name
        assert ours.tokens.segments == theirs.tokens.segments  # type: ignore[attr-defined]


def test_what_the_fast_path_never_changes_cannot_be_changed() -> None:
    request = next(iter(requests_of(RequestFactory(MAX_MODEL_LEN), columns())))
    with pytest.raises(AttributeError, match="num_sequences"):
        request.num_sequences = 2
    assert request.num_sequences == 1


def test_samples_are_made_by_the_factory() -> None:
    factory = RequestFactory(MAX_MODEL_LEN)
    for specs in (columns(best_of=2), columns(priority=np.array([0, 1, 2]))):
        made = list(requests_of(factory, specs))
        assert {type(each) for each in made} == {Request}
    assert [each.priority for each in made] == [0, 1, 2]
    one = [spec(0, 0.0, 10, 9)]
    assert type(next(iter(requests_of(factory, one)))) is Request
    assert list(requests_of(factory, columns().part(0, 0))) == []


def test_a_long_answer_is_not_planned_at_once() -> None:
    limits: dict[str, Any] = {"max_model_len": 20_000, "num_gpu_blocks": 6_000}
    run = Run([], fast=True, **limits)
    other = Run([], fast=True, **limits)
    for each in (run, other):
        each.factory.max_model_len = 20_000
        request = next(each.factory.stream([spec(0, 0.0, 10, 15_000)]))
        each.engine.submit(request)
    assert run.finish() == other.finish()
    assert run.scheduler.longest == 4096
    assert run.engine.num_steps == other.engine.num_steps == 15_000


def test_a_constant_cost_has_a_price_for_any_batch() -> None:
    assert batch_total_of(ConstantCost(0.5))(1, 2, 3, 4, 5, 6) == 0.5


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize(("num_head_tokens", "is_quiet"), [(250, True), (100, False)])
def test_a_head_is_looked_at_again_if_freed_blocks_may_suffice(
    num_head_tokens: int, *, is_quiet: bool, caching: bool
) -> None:
    engine = scheduler(num_gpu_blocks=18, enable_prefix_caching=caching)
    five, ten = (
        request_from_spec(spec(index, 0.0, num_tokens, 100), 8192)
        for index, num_tokens in enumerate((70, 150))
    )
    head = request_from_spec(spec(2, 0.0, num_head_tokens, 100), 8192)
    for request in (five, ten, head):
        engine.add_request(request)
    sample(engine.schedule(0.0), 0, 1.0)
    engine.update([])
    assert [*engine.running] == [five, ten]
    assert engine.quiet_steps(3) == 3
    engine.update([five])  # seven of seventeen blocks are free
    assert engine.quiet_steps(3) == 3 * is_quiet
    engine.form(1.0)
    assert (head in engine.running) is not is_quiet
    if is_quiet:
        engine.update([ten])
        assert engine.quiet_steps(3) == 0
        engine.form(2.0)
        assert head in engine.running
    engine.check()
