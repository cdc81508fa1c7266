"""The balancer before data-parallel ranks: rule, ties and staleness of the release."""

from __future__ import annotations

import pytest
import simpy

from sim.fleet.balancer import FrontEnd, Load, LoadBalancer
from tests.sim.build import request_from_spec, spec


def test_choices_are_those_of_the_release() -> None:
    # Printed by `DPLBAsyncMPClient.get_core_engine_for_request` of vLLM 0.33.0, for
    # the second of two servers: bursts, counts in between, and ends of requests.
    server = FrontEnd(4, number=1, num_servers=2)
    chosen = [server.choose() for _ in range(6)]
    server.hear([Load(0, 9, 0.2), Load(3, 4, 0.9), Load(0, 5, 0.95), Load(2, 5, 0.4)])
    chosen += [server.choose() for _ in range(10)]
    for place in (1, 1, 3):
        server.num_in_flight[place] -= 1
    server.hear([Load(0, 6, 0.2), Load(1, 5, 1.0), Load(0, 7, 0.95), Load(2, 5, 0.4)])
    chosen += [server.choose() for _ in range(8)]
    assert chosen == [
        *(2, 3, 0, 1, 2, 3),
        *(2, 3, 3, 0, 0, 3, 2, 3, 0, 1),
        *(2, 0, 1, 3, 0, 3, 0, 3),
    ]


def test_a_burst_on_idle_ranks_goes_around() -> None:
    server = FrontEnd(3)
    assert [server.choose() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_queue_before_a_full_cache_counts_four_times() -> None:
    server = FrontEnd(2)
    server.hear([Load(10, 10, 1.0), Load(0, 49, 1.0)])
    assert server.choose() == 1  # 20 + 30 against 49
    server.hear([Load(10, 10, 0.5), Load(0, 49, 1.0)])
    assert server.choose() == 0  # 20 against 49 + 1


def test_counts_come_at_most_every_tenth_of_a_second() -> None:
    env = simpy.Environment()
    loads = [Load(0, 0, 0.0), Load(0, 0, 0.0)]
    balancer = LoadBalancer(env, lambda: loads, 2, 1)
    (server,) = balancer.servers
    env.run(until=0.25)
    loads[:] = [Load(3, 4, 0.5), Load(0, 1, 0.5)]
    assert server.running == [0, 0]
    env.run(until=0.31)  # ticks at 0, 0.1, 0.2, 0.3
    assert (server.waiting, server.running) == ([3, 0], [4, 1])
    request = request_from_spec(spec(0, 0.31, 10, 5), 100)
    assert balancer.choose(request) == 1
    assert server.waiting == [3, 1]
    env.run(until=0.5)  # the same counts again do not erase what was sent
    assert server.waiting == [3, 1]
    env.run(until=6.0)  # but every five seconds they do
    assert server.waiting == [3, 0]
    assert server.num_in_flight == [0, 1]
    balancer.ended(request, 1)
    assert server.num_in_flight == [0, 0]


def test_a_coordinator_with_nothing_to_tell_sleeps() -> None:
    env = simpy.Environment()
    balancer = LoadBalancer(env, lambda: [Load(0, 0, 0.0)] * 2, 2, 2)
    env.run()
    assert env.now == pytest.approx(5.0, abs=0.2)
    balancer.choose(request_from_spec(spec(0, 20.0, 10, 5), 100))
    env.run()
    assert env.now == pytest.approx(10.0, abs=0.4)
