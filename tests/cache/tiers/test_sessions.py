"""Policies that know sessions: what goes first, and that nothing is lost."""

from __future__ import annotations

from math import inf
from random import Random
from typing import TYPE_CHECKING

import pytest

from cache.tiers import TIER_POLICIES, CPUTier, LookupResult, RequestAccess
from cache.tiers.access import SessionHint
from cache.tiers.places import Keys

if TYPE_CHECKING:
    from cache.tiers.extents import Hold

OURS = ("pin_shared", "session_end", "next_use", "keep_ttl")


def store(tier: CPUTier, access: RequestAccess, keys: list[int]) -> list[int] | None:
    """Store a prompt; return the places of what had to go, None if it was refused."""
    prepared = tier.prepare_store(Keys.of(keys), access)
    if prepared is None:
        return None
    tier.complete_store(prepared.hold)
    tier.check()
    evicted: list[int] = prepared.evicted_ids.tolist()
    return evicted


def serve(
    tier: CPUTier,
    session_id: int,
    keys: list[int],
    *,
    returns_s: float = inf,
    end_s: float = 0.0,
) -> list[int] | None:
    hint = SessionHint(session_id, returns_s)
    access = RequestAccess(session_id, hint)
    evicted = store(tier, access, keys)
    access.end_s = end_s
    tier.finish(access)
    tier.check()
    return evicted


def left(tier: CPUTier, keys: range) -> list[int]:
    return [key for key in keys if tier.lookup(key) is not LookupResult.MISS]


def test_what_several_sessions_show_goes_last() -> None:
    tier = CPUTier(6, eviction_policy="pin_shared")
    serve(tier, 1, [1, 2, 3])
    serve(tier, 2, [1, 2, 4])  # 1 and 2 are shared
    serve(tier, 3, [5, 6, 7])
    assert left(tier, range(1, 8)) == [1, 2, 4, 5, 6, 7]
    serve(tier, 4, [8, 9, 10])
    assert left(tier, range(1, 11)) == [1, 2, 5, 8, 9, 10]
    serve(tier, 5, [11, 12, 13, 14, 15, 16])
    assert left(tier, range(1, 17)) == [11, 12, 13, 14, 15, 16]


def test_turns_of_one_session_share_nothing() -> None:
    tier = CPUTier(4, eviction_policy="pin_shared")
    serve(tier, 1, [1, 2], returns_s=1.0)
    serve(tier, 1, [1, 2, 3])
    serve(tier, 2, [4, 5, 6])
    assert left(tier, range(1, 7)) == [1, 4, 5, 6]


def test_sessions_that_are_over_go_first() -> None:
    tier = CPUTier(6, eviction_policy="session_end")
    serve(tier, 1, [1, 2], returns_s=9.0)
    serve(tier, 2, [1, 3, 4])  # over, but 1 is shared
    serve(tier, 3, [5, 6], returns_s=9.0)
    serve(tier, 4, [7, 8], returns_s=9.0)
    assert left(tier, range(1, 9)) == [1, 2, 5, 6, 7, 8]


def test_what_is_wanted_last_goes_first() -> None:
    tier = CPUTier(4, eviction_policy="next_use")
    serve(tier, 1, [1], returns_s=50.0)
    serve(tier, 2, [2], returns_s=10.0, end_s=10.0)
    serve(tier, 3, [3], returns_s=inf, end_s=20.0)
    serve(tier, 4, [4], returns_s=90.0, end_s=5.0)
    for number, gone in ((5, 3), (6, 4), (7, 1), (8, 2)):
        serve(tier, number, [number], returns_s=0.1)
        assert gone not in left(tier, range(1, 9))


def test_what_is_kept_refuses_what_is_new() -> None:
    tier = CPUTier(3, eviction_policy="keep_ttl")
    serve(tier, 1, [1, 2], end_s=100.0)
    serve(tier, 2, [3], end_s=200.0)
    tier.policy.now_s = 399.0
    assert serve(tier, 3, [4], end_s=399.0) is None
    tier.policy.now_s = 400.0
    assert serve(tier, 4, [5, 6, 7], end_s=400.0) is None
    assert serve(tier, 5, [5], end_s=400.0) == [1]
    assert left(tier, range(1, 8)) == [1, 3, 5]


@pytest.mark.parametrize("policy", OURS)
def test_random_use_breaks_nothing(policy: str) -> None:
    draw = Random(policy)
    tier = CPUTier(12, eviction_policy=policy)
    living: list[tuple[RequestAccess, list[int]]] = []
    loads: list[Hold] = []
    for now in range(1500):
        tier.policy.now_s = 100.0 * now
        session = draw.randrange(6)
        if draw.random() < 0.4:
            length = draw.randint(1, 7)
            keys = [1, 2, *range(10 * session + 3, 10 * session + 3 + length)]
            hint = SessionHint(session, draw.choice((1.0, 40.0, 900.0, inf)))
            living.append((RequestAccess(now, draw.choice((hint, hint, None))), keys))
        elif living and draw.random() < 0.6:
            access, keys = draw.choice(living)
            store(tier, access, keys)
            number, is_ready = tier.longest_prefix(Keys.of(keys))
            if number and is_ready and draw.random() < 0.5:
                loads.append(tier.prepare_load(Keys.of(keys[:number]), access))
        elif living:
            access, _ = living.pop(draw.randrange(len(living)))
            access.end_s = tier.policy.now_s
            tier.finish(access)
        if loads and draw.random() < 0.6:
            tier.complete_load(loads.pop())
        tier.check()
    assert tier.num_evictions > 100
    assert set(OURS) < set(TIER_POLICIES)
