"""Blocks that routers remember by runs, beside lists of their hashes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from cache.prompt_tree import PromptTree
from sim.fleet.routers.block_index import BlockIndex, prompt_runs
from sim.fleet.routers.dynamo_kv import HeldBlocks, RoutedBlocks
from tests.sim.fleet.test_routers import prompt_hashes, request

if TYPE_CHECKING:
    from sim.scheduler.request import Request


def test_later_blocks_count_where_another_engine_knows_the_first() -> None:
    index = BlockIndex([2, 3])
    index.add([(1, 3)], 0)  # the first one is forgotten: room for two
    assert index.num_matched([(1, 3)]) == [0, 0]
    index.add([(1, 1)], 1)
    assert index.num_matched([(1, 3), (2, 1)]) == [2, 1]


PROMPTS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4
)


@given(
    st.lists(st.tuples(PROMPTS, st.integers(0, 2)), max_size=40),
    PROMPTS,
    st.lists(st.integers(0, 2), max_size=1),
    st.booleans(),
)
def test_the_index_is_what_a_list_a_place_would_be(
    sent: list[tuple[list[tuple[int, int]], int]],
    asked: list[tuple[int, int]],
    gone: list[int],
    in_tree: bool,
) -> None:
    tree = PromptTree() if in_tree else None
    capacities = [3, 5, 50]
    index, naive = BlockIndex(capacities), [list[int]() for _ in capacities]
    for segments, place in sent:
        prompt = request(0, *segments, tree=tree)
        index.add(prompt_runs(prompt, 2), place)
        index.check()
        for each in prompt_hashes(prompt, 2):
            own = naive[place]
            if each in own:
                own.remove(each)
            own.append(each)
            del own[: max(len(own) - capacities[place], 0)]
    for place in gone:
        index.forget(place)
        index.check()
        naive[place].clear()
    known = list[int]()
    for each in prompt_hashes(request(0, *asked, tree=tree), 2):
        if not any(each in own for own in naive):
            break
        known.append(each)
    matched = [sum(each in own for each in known) for own in naive]
    assert index.num_matched(prompt_runs(request(0, *asked, tree=tree), 2)) == matched


@given(
    st.lists(st.tuples(PROMPTS, st.integers(0, 3)), max_size=30), PROMPTS, st.booleans()
)
def test_blocks_of_prompts_in_flight_are_counted_once(
    sent: list[tuple[list[tuple[int, int]], int]],
    asked: list[tuple[int, int]],
    in_tree: bool,
) -> None:
    tree = PromptTree() if in_tree else None
    held, routed = HeldBlocks(), RoutedBlocks()
    in_flight: list[Request] = []
    sent_s: dict[int, float] = {}
    for now_s, (segments, num_left) in enumerate(sent):
        in_flight.append(request(0, *segments, tree=tree))
        held.add(prompt_runs(in_flight[-1], 2))
        routed.add(prompt_runs(in_flight[-1], 2), now_s)
        sent_s.update(dict.fromkeys(prompt_hashes(in_flight[-1], 2), now_s))
        while len(in_flight) > num_left:
            held.remove(prompt_runs(in_flight.pop(0), 2))
        held.check()
    naive = Counter(each for other in in_flight for each in prompt_hashes(other, 2))
    assert held.num_blocks == len(naive)
    hashes = prompt_hashes(request(0, *asked, tree=tree), 2)
    runs = prompt_runs(request(0, *asked, tree=tree), 2)
    assert held.num_shared(runs) == sum(each in naive for each in hashes)
    for oldest_s in (0.0, len(sent) / 2, len(sent)):
        young = [sent_s.get(each, -1.0) >= oldest_s for each in hashes]
        assert routed.num_since(runs, oldest_s) == [*young, False].index(False)
