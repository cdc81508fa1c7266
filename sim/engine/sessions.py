"""Closed loops: sessions whose turns wait for answers, users who wait for their turn.

::

    arrivals --> a free user --> send --> the engine --> end of the answer
                     ^             ^                          |
                     |             +--- delay_s of the next --+
                     +------------- the last turn ended ------+
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import inf, nextafter
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.engine.clock import ARRIVAL_PRIORITY, At
from workloads.requests.chains import has_chains
from workloads.requests.columns import numbers
from workloads.requests.long_arrays import parts, spilled

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import simpy

    from sim.engine.clients import Client, Server
    from workloads.spec import RequestSpec


class SessionClient:
    """Sends every request when what it waits for has happened.

    A request that waits for none opens a session; the session is over when that request
    and all that follow from it have ended. A follow-up is sent `delay_s` after the end
    of the request that it waits for: of all its samples, or all its beams' tokens. If
    that one was rejected or aborted, whatever follows from it is not sent.

    With a bound on users, a session is started at its arrival or, if all users are
    busy, when the next becomes free, in order of arrival. A user who has just become
    free sends its first request `delay_s` later, or at its arrival if that is later
    still; users who have not had a session yet send at once.

    Parameters
    ----------
    env, engine
        The server, and its clock.
    specs
        In order of arrival; `request_id` is the position.
    client
        From the workload's requests to the engine's.
    max_concurrent_users
        Most sessions in progress, or None.
    front_end_s
        Seconds that an answer takes to the client and the next request to the queue, or
        None if no front end is looked at. One hands requests over one by one: of those
        that are sent at one instant the first begins a step alone.
    """

    def __init__(
        self,
        env: simpy.Environment,
        engine: Server,
        specs: Sequence[RequestSpec],
        client: Client,
        max_concurrent_users: int | None = None,
        *,
        front_end_s: float | None = None,
    ) -> None:
        self.env = env
        self.engine = engine
        self.client = client
        self._specs = specs
        self._is_one_by_one = front_end_s is not None
        self._front_end_s = front_end_s or 0.0
        self._last_sent_s = -inf
        # A user each is enough for all: more would only take memory.
        most = max_concurrent_users
        self._users = _Users(env, None if most is None else min(most, len(specs)))
        self._follow_ups = FollowUps(specs)
        self._all_over: simpy.Event | None = None
        self._num_sessions = 0

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Open sessions in order of arrival; close the arrivals when all are over."""
        env = self.env
        for spec in self._follow_ups.openings():
            if spec.arrival_s > env.now:
                yield At(env, spec.arrival_s, ARRIVAL_PRIORITY)
            free_since_s = yield from self._users.take()
            free_since_s += self._front_end_s
            if self.engine.stop_requested:
                return
            send_s = max(spec.arrival_s, free_since_s + spec.delay_s, env.now)
            self._num_sessions += 1
            env.process(self._session(spec, send_s))
        if self._num_sessions:
            self._all_over = env.event()
            yield self._all_over
        self.engine.close_arrivals()

    def _session(
        self, spec: RequestSpec, send_s: float
    ) -> Generator[simpy.Event, Any, None]:
        """Send a request and all that follows from it, then give the user back."""
        yield from self._turns(spec, send_s)
        self._users.give_back()
        self._num_sessions -= 1
        if self._all_over is not None and not self._num_sessions:
            self._all_over.succeed()

    def _turns(
        self, spec: RequestSpec, send_s: float
    ) -> Generator[simpy.Event, Any, None]:
        """Send a request at its time, then what follows; return when all has ended."""
        env, asides = self.env, []
        while True:
            if send_s > env.now:
                yield At(env, send_s, ARRIVAL_PRIORITY)
            if self._is_one_by_one:
                yield from self._wait_for_others()
            asked = spec._replace(arrival_s=env.now)
            is_answered = yield from self.client.ask(self.engine, asked)
            followers = self._follow_ups.of(spec) if is_answered else ()
            if not followers:
                break
            ended_s = env.now + self._front_end_s
            spec, *others = followers
            send_s = ended_s + spec.delay_s
            for other in others:
                at_s = ended_s + other.delay_s
                asides.append(env.process(self._turns(other, at_s)))
        if asides:
            yield env.all_of(asides)

    def _wait_for_others(self) -> Generator[simpy.Event, Any, None]:
        """Wait for those sent before at this instant, the least time that there is."""
        now_s = self.env.now
        send_s = self._last_sent_s = max(now_s, nextafter(self._last_sent_s, inf))
        if send_s > now_s:
            yield At(self.env, send_s, ARRIVAL_PRIORITY)


class FollowUps:
    """The requests that wait for each request, looked up in columns.

    Parameters
    ----------
    specs
        In order of arrival; `request_id` is the position.
    """

    def __init__(self, specs: Sequence[RequestSpec]) -> None:
        self._specs = specs
        self._has_chains = has_chains(specs)
        if self._has_chains:
            previous_ids = numbers(specs, "previous_id")
            by_previous = np.argsort(previous_ids, kind="stable")
            self._by_previous = spilled(by_previous.astype(np.int32))
            # Not searched by NumPy, which would turn all of it into wider integers.
            self._previous_ids = spilled(previous_ids[by_previous]).data

    def openings(self) -> Iterator[RequestSpec]:
        """Yield requests that wait for none."""
        if not self._has_chains:
            yield from self._specs
            return
        end = bisect_left(self._previous_ids, 0)
        for some in parts(self._by_previous[:end]):
            yield from map(self._specs.__getitem__, some.tolist())

    def of(self, spec: RequestSpec) -> list[RequestSpec]:
        """Return the requests that wait for one, in order of arrival."""
        if not self._has_chains:
            return []
        ids, wanted = self._previous_ids, spec.request_id
        first = last = bisect_left(ids, wanted)
        while last < len(ids) and ids[last] == wanted:
            last += 1
        rows = self._by_previous[first:last].tolist()
        return [self._specs[row] for row in rows]


class _Users:
    """A bound on sessions in progress.

    Parameters
    ----------
    env
        The clock.
    number
        How many users, or None for as many as come.
    """

    def __init__(self, env: simpy.Environment, number: int | None) -> None:
        self._env = env
        self._is_bounded = number is not None
        # When each free user became free, in order.
        self._free_since_s = deque([-inf] * (number or 0))
        self._wanted: simpy.Event | None = None

    def take(self) -> Generator[simpy.Event, Any, float]:
        """Wait for a free user; return since when it has been free, in seconds."""
        if not self._is_bounded:
            return -inf
        if not self._free_since_s:
            self._wanted = self._env.event()
            yield self._wanted
        return self._free_since_s.popleft()

    def give_back(self) -> None:
        """Note that a user has become free."""
        if not self._is_bounded:
            return
        self._free_since_s.append(self._env.now)
        if self._wanted is not None:
            self._wanted.succeed()
            self._wanted = None
