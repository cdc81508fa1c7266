"""Where requests go: routers beside the decisions of real ones."""

from __future__ import annotations

import json
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.tokens import SegmentTokens
from sim.engine.clock import Clock
from sim.errors import ConfigError
from sim.fleet.balancer import Load
from sim.fleet.routers.block_index import prompt_runs
from sim.fleet.routers.counting import (
    CountingRouter,
    Draws,
    LeastRequests,
    PowerOfTwo,
    RandomRouter,
    RoundRobin,
)
from sim.fleet.routers.dynamo_kv import DynamoKv
from sim.fleet.routers.llm_d import LlmD
from sim.fleet.routers.prefix_tree import PrefixTree
from sim.fleet.routers.production_stack import ProductionStackPrefix
from sim.fleet.routers.session import Session
from sim.fleet.routers.sglang_cache_aware import SGLangCacheAware
from sim.scheduler.request import Request
from tests.shared import shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cache.prompt_tree import PromptTree

Pieces = tuple[tuple[int, int, int], ...]


def request(
    number: int = 0, *segments: tuple[int, int], tree: PromptTree | None = None
) -> Request:
    prompt = segments or ((number + 1, 8),)
    length = sum(each for _, each in prompt)
    return Request(
        request_id=number,
        arrival_s=float(number),
        num_prompt_tokens=length,
        tokens=SegmentTokens(prompt, -1, tree),
        max_num_tokens=length + 8,
        oracle_num_tokens=length + 4,
    )


def prompt_hashes(request: Request, block_size: int) -> list[int]:
    """Return the chained hashes of a prompt's full blocks, one by one."""
    hashes: list[int] = []
    num_blocks = request.num_prompt_tokens // block_size
    request.tokens.extend_block_hashes(hashes, num_blocks, block_size)
    return hashes


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# -- routers that count ----------------------------------------------------------------


def test_each_in_turn() -> None:
    router = RoundRobin(3)
    assert [router.choose(request(i)) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert router.num_in_flight == [3, 2, 2]
    router.ended(request(0), 0)
    assert router.num_in_flight == [2, 2, 2]


def test_round_robin_is_the_real_one_s() -> None:
    router = RoundRobin(3)
    calls = _calls("sgl_round_robin.jsonl")
    workers = [call["worker"] for call in calls if "worker" in call]
    ours = [router.choose(request(i)) for i in range(len(workers))]
    assert len(workers) >= 80
    # The real one's workers have registered in an order of their own.
    of_place = dict(zip(ours[:3], workers[:3], strict=True))
    assert [of_place[place] for place in ours] == workers


def test_random_is_uniform() -> None:
    router = RandomRouter(4, stream())
    chosen = np.bincount([router.choose(request(i)) for i in range(8000)])
    assert np.all(np.abs(chosen - 2000) < 4 * np.sqrt(8000 * 3 / 16))


@given(st.integers(0, 99), st.lists(st.integers(1, 1 << 32 - 1), max_size=40))
def test_draws_are_those_of_numpy(seed: int, bounds: list[int]) -> None:
    one, other = stream(seed), Draws(stream(seed))
    for bound in [*bounds, 3, 1, 0xC000_0001, 64]:
        assert int(one.integers(bound)) == other.below(bound)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["come", "end", "ready"]), st.integers(0, 99))),
)
def test_the_least_loaded_is_any_of_those(
    num_engines: int, moves: list[tuple[str, int]]
) -> None:
    router, other = LeastRequests(num_engines, stream()), stream()
    there: list[int] = []
    ready = list(range(num_engines))
    for move, number in moves:
        loads = [there.count(place) for place in range(num_engines)]
        if move == "come":
            least = min(loads[place] for place in ready)
            places = [place for place in ready if loads[place] == least]
            place = router.choose(request(number))
            assert place == places[int(other.integers(len(places)))]
            there.append(place)
        elif move == "end" and there:
            router.ended(request(number), there.pop(number % len(there)))
        elif move == "ready":
            bits = number % (1 << num_engines) or 1
            ready = [place for place in range(num_engines) if bits >> place & 1]
            router.set_ready(ready)
        assert router.num_in_flight == [there.count(i) for i in range(num_engines)]


@pytest.mark.parametrize("num_engines", [1, 2, 5])
def test_of_two_the_less_loaded(num_engines: int) -> None:
    router = PowerOfTwo(num_engines, stream(1))
    router.num_in_flight[0] = 100
    chosen = [router.choose(request(i)) for i in range(60)]
    assert (0 in chosen) == (num_engines == 1)
    assert router.num_in_flight[0] == 100 + 60 * (num_engines == 1)


def test_power_of_two_has_the_tails_of_the_supermarket_model() -> None:
    """Balls into bins: the most loaded of 500 has about log log n, not log n."""
    by_two, by_one = PowerOfTwo(500, stream(2)), RandomRouter(500, stream(2))
    for router in (by_two, by_one):
        for number in range(500):
            router.choose(request(number))
    assert max(by_two.num_in_flight) <= 3
    assert max(by_one.num_in_flight) >= 4


def test_a_pool_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs an engine to choose, got 0; give the"):
        RoundRobin(0)


# -- prefixes --------------------------------------------------------------------------


@st.composite
def prompts(draw: st.DrawFn) -> Pieces:
    """Pieces of few segments, so that prompts share much."""
    return tuple(
        (draw(st.integers(1, 2)), draw(st.integers(0, 1)), draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 4)))
    )


def tokens_of(pieces: Pieces) -> list[tuple[int, int]]:
    return [(s, first + i) for s, first, length in pieces for i in range(length)]


def num_common(left: list[Any], right: list[Any]) -> int:
    pairs = zip(left, right, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right))
    )


@given(st.lists(st.tuples(prompts(), st.integers(0, 2)), max_size=12), prompts())
def test_the_tree_knows_the_longest_prefix(
    sent: list[tuple[Pieces, int]], asked: Pieces
) -> None:
    tree = PrefixTree(1 << 20)
    known: dict[int, int] = {}
    for pieces, place in sent:
        tree.insert(pieces, place)
        tree.check()
        common = num_common(tokens_of(pieces), tokens_of(asked))
        known[place] = max(known.get(place, 0), common)
    longest = max(known.values(), default=0)
    num_tokens, places = tree.match(asked)
    assert num_tokens == longest
    assert places == sorted(p for p, common in known.items() if common == longest > 0)


@given(
    st.lists(st.tuples(prompts(), st.integers(0, 2)), max_size=12),
    st.integers(0, 9),
    st.booleans(),
)
def test_eviction_forgets_old_ends_and_no_beginning(
    sent: list[tuple[Pieces, int]], most: int, is_shared: bool
) -> None:
    tree = PrefixTree(most, is_shared=is_shared)
    for pieces, place in sent:
        tree.insert(pieces, place)
        tree.evict()
        tree.check()
        numbers = tree.num_tokens.values()
        assert (sum if is_shared else max)(numbers) <= most


def test_the_oldest_end_goes_first() -> None:
    tree = PrefixTree(8)
    tree.insert([(1, 0, 4), (2, 0, 2)], 0)
    tree.insert([(1, 0, 4), (3, 0, 3)], 0)
    assert tree.num_tokens == {0: 9}
    tree.evict()
    assert tree.num_tokens == {0: 7}
    assert tree.match([(1, 0, 4), (2, 0, 2)]) == (4, [0])
    assert tree.match([(1, 0, 4), (3, 0, 2)]) == (6, [0])


def test_one_limit_for_all_engines_takes_the_oldest_of_any() -> None:
    tree = PrefixTree(10, is_shared=True)
    for segment, place in ((1, 0), (2, 1), (3, 0)):
        tree.insert([(segment, 0, 4)], place)
    tree.insert([(1, 0, 2)], 0)  # the beginning of the oldest is used again
    tree.evict()
    assert tree.num_tokens == {0: 6, 1: 4}
    tree.insert([(4, 0, 4)], 1)
    tree.evict()
    assert tree.num_tokens == {0: 6, 1: 4}
    assert tree.match([(2, 0, 4)]) == (0, [])
    assert SGLangCacheAware(2, stream(), spill_gate=True).tree.is_shared


# -- SGLang's router -------------------------------------------------------------------


def test_prefix_load_and_threshold() -> None:
    router = SGLangCacheAware(2, stream(), balance_abs_threshold=2)
    assert router.choose(request(0, (1, 60), (2, 40))) == 0
    assert router.choose(request(1, (1, 60), (3, 40))) == 0  # 60 % are known there
    assert router.choose(request(2, (1, 30), (4, 70))) == 1  # 30 % is not more
    assert router.choose(request(3, (1, 60), (5, 40))) == 0
    assert router.num_in_flight == [3, 1]
    router.num_in_flight = [4, 1]
    assert router.choose(request(4, (1, 60), (6, 40))) == 1  # out of balance
    router.ended(request(4), 1)
    assert router.num_in_flight == [4, 1]


@pytest.mark.parametrize(("busiest", "place"), [(15, 0), (16, 1)])
def test_loads_are_uneven_by_a_difference_and_by_a_ratio(
    busiest: int, place: int
) -> None:
    router = SGLangCacheAware(
        2, stream(), balance_abs_threshold=2, balance_rel_threshold=1.5
    )
    router.choose(request(0, (1, 60), (2, 40)))
    router.num_in_flight = [busiest, 10]
    assert router.choose(request(1, (1, 60), (3, 40))) == place


@pytest.mark.parametrize("name", ["sgl_cache_aware.jsonl", "sgl_cache_aware_2.jsonl"])
def test_decisions_are_those_of_the_real_router(name: str) -> None:
    """Up to the order in which its three workers had registered.

    Where several workers know the longest prefix, the real one takes any of them.
    """
    num_decisions, differing = 0, []
    for order in permutations(range(3)):
        num_decisions, num_wrong = _decisions(name, order)
        differing.append(num_wrong)
    assert num_decisions >= 200
    assert min(differing) == 0, differing


def _decisions(name: str, order: tuple[int, ...]) -> tuple[int, int]:
    place_of = {worker: place for place, worker in enumerate(order)}
    router = SGLangCacheAware(3, stream(), balance_abs_threshold=4)
    held: dict[str, int] = {}
    num_decisions = num_wrong = 0
    for call in _calls(name):
        if "release" in call:
            router.ended(request(), held.pop(call["release"]))
            continue
        pieces: Pieces = tuple((ord(each), 0, 1) for each in call["text"])
        place = place_of[call["worker"]]
        num_decisions += 1
        num_wrong += place not in router.candidates(pieces)
        router.tree.insert(pieces, place)
        if call["hold"]:
            router.num_in_flight[place] += 1
            held[f"r{call['i']}"] = place
    return num_decisions, num_wrong


def _calls(name: str) -> Iterator[dict[str, Any]]:
    for row in shared(f"fleets/oracles/{name}").read_text().splitlines():
        yield json.loads(row)


@pytest.mark.parametrize(
    ("loads", "places"),
    [
        ([10, 3, 3, 4], [0]),  # 5 above the mean of 5, whose two roots are 4.5
        ([10, 3, 3, 5], [0]),
        ([11, 3, 3, 4], [1, 2]),
        ([11, 2, 3, 5], [1]),
        ([18, 8, 9, 10], [0]),  # 6.75 above, two roots are 6.7
        ([20, 9, 10, 10], [1]),
        ([20, 10, 10, 11], [0]),  # 7.25 above, two roots are 7.1
        ([23, 11, 12, 14], [0]),  # 8 above, two roots are 7.7
        ([5, 0, 1, 1], [0]),  # less than 4 above
        ([8, 2, 2, 3, 3, 3, 3, 3], [1, 2]),
        ([15, 7, 8, 8, 8, 8, 9, 9], [0]),
        ([15, 7, 7, 7, 7, 8, 9, 11], [1, 2, 3, 4]),
    ],
)
def test_a_gate_passes_over_the_engines_that_the_real_one_does(
    loads: list[int], places: list[int]
) -> None:
    """States in which SMG 1.13.0's server chose; the first engine knows the prompt."""
    router = gated(loads)
    router.tree.insert(((0, 0, 100),), 0)
    assert router.candidates(((0, 0, 100),)) == places


def gated(loads: list[int], **more: Any) -> SGLangCacheAware:
    router = SGLangCacheAware(len(loads), stream(), spill_gate=True, **more)
    router.num_in_flight = loads
    return router


def test_of_several_that_know_it_the_one_with_the_fewest() -> None:
    for loads, places in (
        ([9, 9, 9, 9], [0, 2]),
        ([9, 0, 8, 9], [2]),
        ([13, 9, 13, 0], [0, 2]),  # 13 is no 1.5 times the mean, 8.75
        ([60, 5, 70, 6, 4, 4, 4, 4], [4, 5, 6, 7]),
    ):
        router = gated(loads)
        for place in (0, 2):
            router.tree.insert(((0, 0, 100),), place)
        assert router.candidates(((0, 0, 100),)) == places, loads


def test_a_gate_has_the_margin_that_it_is_given_where_that_is_less() -> None:
    for threshold, places in (4, [0]), (3, [1, 2, 3]):
        router = gated([5, 1, 1, 1], balance_abs_threshold=threshold)
        router.tree.insert(((0, 0, 100),), 0)  # 3 above
        assert router.candidates(((0, 0, 100),)) == [0], threshold
        router.num_in_flight = [6, 1, 1, 1]  # 3.75 above
        assert router.candidates(((0, 0, 100),)) == places, threshold


def test_a_gated_router_draws_among_equals() -> None:
    router = gated([0, 0, 1, 0])
    chosen = set()
    for number in range(60):
        place = router.choose(request(number))
        chosen.add(place)
        router.ended(request(number), place)
    assert chosen == {0, 1, 3}


# -- llm-d -----------------------------------------------------------------------------


def llm_d(num_engines: int = 3, **more: Any) -> LlmD:
    blocks = {"num_gpu_blocks": [100] * num_engines, "block_size": 16}
    return LlmD(num_engines, stream(), **blocks | more)


def test_scores_are_those_of_queue_cache_and_prefix() -> None:
    router = llm_d()
    router.hear([Load(4, 9, 0.5), Load(0, 9, 0.9), Load(2, 1, 0.0)])
    asked = request(0, (1, 256))
    assert router.scores(asked, []) == pytest.approx([0 + 1.0, 2 + 0.2, 1 + 2.0])
    router.index.add([(7, 2)], 0)
    assert router.scores(asked, [(7, 3), (8, 1)])[0] == pytest.approx(1.0 + 3 * 0.5)
    router.hear([Load(5, 0, 0.0)] * 3)
    assert router.scores(asked, []) == [4.0, 4.0, 4.0]


def test_kv_events_say_what_engines_have_in_place_of_what_they_were_sent() -> None:
    cached = {1: [0, 9, 3], 2: [16, 0, 0]}

    def cached_blocks(asked: Request) -> list[int]:
        return cached[asked.request_id]

    router = llm_d(cached_blocks=cached_blocks, precise=True)
    # 9 blocks of the engine's are 2 whole ones of the index; of 3 there are none.
    assert router.cached_tokens(request(1, (1, 1000))) == [0, 128, 0]
    assert router.scores(request(1, (1, 640)), [])[1] == pytest.approx(4 + 3 * 0.2)
    assert router.choose(request(1, (1, 640))) == 1
    assert router.choose(request(2, (1, 256))) == 0
    assert router.scores(request(2, (1, 192)), [])[0] == pytest.approx(4 + 3)
    sent = prompt_runs(request(1, (1, 640)), router.block_tokens)
    assert not any(router.index.num_matched(sent))
    with pytest.raises(ConfigError, match="precise: engines of the v1 generation"):
        llm_d(precise=True)


def test_an_index_may_be_cut_short_and_forget_sooner() -> None:
    router = llm_d(block_tokens=16, max_prefix_blocks=2, lru_capacity=3)
    place = router.choose(request(0, (1, 320)))
    assert router.cached_tokens(request(1, (1, 320)))[place] == 32
    assert router.choose(request(2, (1, 20), (5, 200))) == place  # half of two blocks
    assert router.index.capacities == [3, 3, 3]
    with pytest.raises(ConfigError, match="lru_capacity: must be 1 or more"):
        llm_d(lru_capacity=0)


def test_what_was_scraped_counts_until_the_next_scrape() -> None:
    router = llm_d(2)
    router.hear([Load(9, 0, 0.0), Load(0, 0, 0.0)])
    assert [router.choose(request(number)) for number in range(5)] == [1] * 5
    router.hear([Load(0, 0, 0.0), Load(9, 0, 0.0)])
    assert router.choose(request(9)) == 0


def test_a_prompt_comes_back_to_the_engine_that_knows_it() -> None:
    router = llm_d(4)
    first = router.choose(request(0, (1, 640), (2, 64)))
    assert {router.choose(request(n, (1, 640), (n, 64))) for n in range(3, 9)} == {
        first
    }


def test_blocks_of_the_index_are_larger_than_those_of_the_engine() -> None:
    assert llm_d().block_tokens == 64
    assert llm_d(block_size=128).block_tokens == 128
    assert [n for _, n in prompt_runs(request(0, (1, 640)), 64)] == [10]
    assert [n for _, n in prompt_runs(request(0, (1, 640)), 64, 200)] == [3]
    assert [n for _, n in prompt_runs(request(0, (1, 96), (2, 96)), 64)] == [1, 1, 1]
    assert prompt_runs(request(0, (1, 63)), 64) == []


# -- the production stack, and sessions ------------------------------------------------


def test_the_longest_known_chunks_decide() -> None:
    router = ProductionStackPrefix(3, stream())
    assert router.candidates(request(0, (1, 64))) == [0, 1, 2]
    first = router.choose(request(0, (1, 64), (2, 16)))
    assert router.candidates(request(1, (1, 64), (3, 64))) == [first]
    assert router.candidates(request(1, (1, 31), (3, 64))) == [
        0,
        1,
        2,
    ]  # no whole chunk
    assert router.candidates(request(1, (1, 64), (2, 16))) == [
        first
    ]  # a short one, too


def test_load_changes_nothing_there() -> None:
    router = ProductionStackPrefix(3, stream())
    first = router.choose(request(0, (1, 320)))
    assert [router.choose(request(n, (1, 320))) for n in range(1, 20)] == [first] * 19


def test_sessions_stay_and_few_move_to_another_engine() -> None:
    def places(num_engines: int) -> list[int]:
        router = Session(num_engines, lambda each: each.request_id)
        return [router.choose(request(number)) for number in range(3000)]

    eight, nine = places(8), places(9)
    assert eight == places(8)
    shares = np.bincount(eight) / 3000
    assert np.all((shares > 0.08) & (shares < 0.18))
    moved = [new for old, new in zip(eight, nine, strict=True) if old != new]
    assert set(moved) == {8}
    assert len(moved) < 0.18 * 3000


def test_without_a_session_the_least_loaded() -> None:
    router = Session(3, lambda _: None)
    router.num_in_flight = [1, 0, 2]
    assert router.choose(request()) == 1


def test_every_request_is_counted_until_it_ends() -> None:
    routers: list[CountingRouter] = [
        llm_d(),
        ProductionStackPrefix(3, stream()),
        RoundRobin(3),
        LeastRequests(3, stream()),
        PowerOfTwo(3, stream()),
        SGLangCacheAware(3, stream()),
    ]
    for router in routers:
        places = [router.choose(request(number)) for number in range(30)]
        assert sum(router.num_in_flight) == 30
        for number, place in enumerate(places):
            router.ended(request(number), place)
        assert router.num_in_flight == [0, 0, 0]


# -- blocks to compute and to hold -----------------------------------------------------


def test_costs_of_blocks_are_those_that_dynamo_has_logged() -> None:
    """4036/64 + 63; then 1853/64 + 28 + 63 where the first one is computed."""
    overlaps = [0, 0]
    router = DynamoKv(Clock(2.0), 2, stream(), 64, cached_blocks=lambda _: overlaps)
    one, two = request(1, (1, 4036)), request(2, (2, 1853))
    assert router.costs(one, prompt_runs(one, 64), overlaps) == [126.0625] * 2
    place = router.choose(one)
    costs = router.costs(two, prompt_runs(two, 64), overlaps)
    assert costs[place] == (4036 + 1853) / 64 + 28 + 63
    assert router.choose(two) == 1 - place
    one.note_first_token(1.0)
    assert router.costs(two, prompt_runs(two, 64), overlaps)[place] == (
        1853 / 64 + 28 + 63
    )
    overlaps[place] = 27
    assert router.costs(two, prompt_runs(two, 64), overlaps)[place] == (
        1853 / 64 - 27 + 28 + 63
    )
    router.ended(one, place)
    assert router.costs(two, prompt_runs(two, 64), [0, 0])[place] == 1853 / 64 + 28
    assert router.active_tokens(two) in {0, 1853}


def test_a_first_token_counts_when_its_engine_has_its_turn() -> None:
    """At one instant engines have theirs by place, and a prefiller asks amid these."""
    clock = Clock(2.0)
    keys = {"use_kv_events": False, "turn_of": [0.8, 0.9].__getitem__}
    router = DynamoKv(clock, 2, stream(), 64, None, **keys)
    one = request(1, (1, 640))
    place = router.choose(one)
    one.note_first_token(2.0)  # known before, by an engine that schedules ahead
    own_turn = [0.8, 0.9][place]
    for turn, num_tokens in ((0.0, 640), (0.5, 640), (own_turn, 0), (1.0, 0)):
        clock.turn = turn
        assert router.num_computing(place) == num_tokens


def test_without_events_what_was_sent_counts_for_two_minutes() -> None:
    env = Clock()
    router = DynamoKv(env, 2, stream(), 64, None, use_kv_events=False)
    place = router.choose(request(1, (1, 256)))
    cached = router.cached_tokens(request(2, (1, 256)))
    assert (cached[place], cached[1 - place]) == (256, 0)
    env.run(until=121.0)
    assert router.cached_tokens(request(2, (1, 256))) == [0, 0]
    deaf = DynamoKv(env, 2, stream(), 64, lambda _: [4, 4], use_kv_events=False)
    assert deaf.cached_tokens(request(3, (1, 256))) == [0, 0]
    with pytest.raises(ConfigError, match="use_kv_events: engines of the v1"):
        DynamoKv(env, 2, stream(), 64, None)
