"""The load balancer in front of an engine's data-parallel ranks.

Source: vLLM 0.33.0, ``v1/engine/core_client.py``
(`DPLBAsyncMPClient.get_core_engine_for_request`, `process_engine_outputs`),
``v1/engine/coordinator.py`` (`DPCoordinatorProc.process_input_socket`),
``entrypoints/cli/serve.py`` (``--api-server-count``).
"""

from __future__ import annotations

from itertools import cycle
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from sim.engine.clock import SCRAPE_PRIORITY, At
from sim.fleet.checks import at_least

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import simpy

    from sim.scheduler.request import Request

STATS_INTERVAL_S: Final = 0.1
"""Least time between two sets of counts. Source: `min_stats_update_interval_ms`."""
_REPEATED_AFTER_S: Final = 5.0


class Load(NamedTuple):
    """The queue lengths and the cache usage that a rank reports."""

    num_waiting: int
    num_running: int
    kv_cache_usage: float


class FrontEnd:
    """An API server that chooses a rank for each of its requests.

    A rank scores the larger of what was last heard of it, waiting and running, and
    what this server has with it itself, times the servers; where requests wait, six
    times their number for each share of the cache in use beyond a half. The least
    score wins; ties go to the first rank from a start that moves on by one with every
    choice. What is sent counts as waiting until the next counts come.
    """

    def __init__(self, num_ranks: int, number: int = 0, num_servers: int = 1) -> None:
        self.num_servers = num_servers
        self.start = num_ranks * number // num_servers
        self.waiting = [0] * num_ranks
        self.running = [0] * num_ranks
        self.usage = [0.0] * num_ranks
        self.num_in_flight = [0] * num_ranks

    def hear(self, loads: Sequence[Load]) -> None:
        """Take the counts of all ranks; what was counted by itself is forgotten."""
        self.waiting = [load.num_waiting for load in loads]
        self.running = [load.num_running for load in loads]
        self.usage = [load.kv_cache_usage for load in loads]

    def choose(self) -> int:
        """Return the rank of a request, and count it there."""
        num_ranks, least, chosen = len(self.waiting), inf, 0
        for i in range(num_ranks):
            place = (self.start + i) % num_ranks
            waiting = self.waiting[place]
            score: float = max(
                self.num_servers * self.num_in_flight[place],
                waiting + self.running[place],
            )
            if waiting:
                score += waiting * 6.0 * max(0.0, self.usage[place] - 0.5)
            if score < least:
                least, chosen = score, place
        self.waiting[chosen] += self.num_servers
        self.start = (self.start + 1) % num_ranks
        self.num_in_flight[chosen] += 1
        return chosen


class LoadBalancer:
    """API servers, and the coordinator that tells them how loaded the ranks are.

    Counts are read at most every `STATS_INTERVAL_S`, as soon as any have changed, and
    told again after five seconds; the real coordinator has them from messages, which
    ranks send between steps. Requests come to the servers in turn: in reality the
    operating system spreads connections.

    Parameters
    ----------
    env
        The clock.
    loads
        Reads the load of all ranks, in their order.
    num_engines, num_servers
        How many ranks or engines there are, and API servers before them.

    Attributes
    ----------
    next_s
        When loads are read next, in seconds; -inf while a request is waited for.
    """

    def __init__(
        self,
        env: simpy.Environment,
        loads: Callable[[], Sequence[Load]],
        num_engines: int,
        num_servers: int = 1,
    ) -> None:
        at_least(1, num_servers=num_servers)
        self.env = env
        self.servers = [
            FrontEnd(num_engines, number, num_servers) for number in range(num_servers)
        ]
        self._turns = cycle(self.servers)
        self._server_of: dict[int, FrontEnd] = {}
        self._loads = loads
        self._changed: simpy.Event | None = None
        self.next_s = 0.0
        env.process(self._coordinate())

    def choose(self, request: Request) -> int:
        server = next(self._turns)
        self._server_of[request.request_id] = server
        self._wake()
        return server.choose()

    def ended(self, request: Request, place: int) -> None:
        self._server_of.pop(request.request_id).num_in_flight[place] -= 1
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.succeed()
            self._changed = None

    def _coordinate(self) -> Generator[simpy.Event, None, None]:
        """Tell the servers of every change, but not more often than it is done."""
        env = self.env
        told: list[tuple[int, int]] = []
        told_s = -inf
        while True:
            loads = self._loads()
            counts = [(load.num_waiting, load.num_running) for load in loads]
            is_repeated = counts == told and env.now - told_s >= _REPEATED_AFTER_S
            if counts != told or is_repeated:
                for server in self.servers:
                    server.hear(loads)
                told, told_s = counts, env.now
            if is_repeated:
                self.next_s, self._changed = -inf, env.event()
                yield self._changed
            else:
                self.next_s = env.now + STATS_INTERVAL_S
                yield At(env, self.next_s, SCRAPE_PRIORITY)
