"""Engines that come and go while they serve: deaths, maintenance, slow replicas."""

from __future__ import annotations

from collections import deque
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

from sim.engine.clock import ARRIVAL_PRIORITY, At
from sim.fleet.engines import Engines, Router
from sim.fleet.roster import EventKind, ReplicaEvent, ReplicaState, Roster, Toll
from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Sequence

    import simpy

    from sim.engine.loop import Engine
    from sim.fleet.engines import OnEnd
    from sim.scheduler.request import Request

DIED: Final = "the replica died"
"""Reason of a request that was lost with its engine."""
NONE_READY: Final = "no replica is ready, and none will be"
"""Reason of a request that no engine can take."""


class Scaler(Protocol):
    """Decides how many replicas a pool has, and when it looks again."""

    pool: str  # its name
    next_s: float  # when it looks at engines again

    def wake(self) -> None:
        """Hear that a request came."""

    def reconcile(self) -> None:
        """Replace replicas that died."""

    def most_reversals_an_hour(self) -> int:
        """Return how often it turned in the worst hour."""

    def summary(self) -> dict[str, Any]:
        """Return its decisions, for the summary of the run."""


class ChangingRouter(Router, Protocol):
    """A router of engines that come and go."""

    def set_ready(self, places: Sequence[int]) -> None:
        """Choose among these places from now on; at least one.

        What it believes of the others is void: they come back as new engines.
        """
        ...


class Replicas(Engines):
    """Engines of which some are not there all the time.

    A request in an engine that dies leaves it between two steps. It begins again at
    once, from its prompt, where the router sends it, with the arrival that it had; or
    it is lost. While no engine is ready requests wait for the next one that will be,
    and are rejected if there is none. A replica that comes back is a new engine, and
    goes on with the recorder of the old one.

    Parameters
    ----------
    env, engines, router
        See `Engines`.
    events
        What happens to them.
    renew
        Returns the engine that takes the place of one that has ended.
    slow
        Sets how much longer the steps of the engine at a place take from now on.
    off
        Places of engines that are not there at first; all others are ready.
    replicas
        Places of the engines of replicas that have several: data-parallel ranks, which
        come and go together.

    Attributes
    ----------
    roster
        The state of each.
    held
        From when until when requests waited for an engine to be there.
    autoscalers
        Woken by what comes; they start replicas, and take them out.
    num_submitted
        Requests that have been handed over, those that began again included.
    num_refused
        Requests that no engine could take.
    """

    router: ChangingRouter

    def __init__(  # noqa: PLR0917 - the parts of a fleet
        self,
        env: simpy.Environment,
        engines: list[Engine],
        router: ChangingRouter,
        events: Sequence[ReplicaEvent],
        renew: Callable[[int, Engine], Engine],
        slow: Callable[[int, Engine, float], None],
        off: Collection[int] = (),
        replicas: Iterable[Sequence[int]] = (),
    ) -> None:
        super().__init__(env, engines, router)
        self.engines: list[Engine] = engines
        self._ranks: list[Sequence[int]] = [(place,) for place in range(len(engines))]
        for ranks in replicas:
            for place in ranks:
                self._ranks[place] = ranks
        self.roster = Roster(len(engines))
        self.autoscalers: list[Scaler] = []
        self._planned_s: dict[int, float] = {}  # ends of starts, and of drains
        self.num_submitted = self.num_refused = 0
        self._is_wanted = [True] * len(engines)
        self._events = sorted(events, key=lambda event: event.time_s)
        self._next_event_s = self._events[0].time_s if events else inf
        self._renew = renew
        self._slow = slow
        self._num_to_come = sum(e.kind is EventKind.START for e in events)
        self._tolls: list[Toll] = []
        self._toll_of: dict[int, Toll] = {}
        self._held: deque[Request] = deque()
        self._held_since_s: dict[int, float] = {}
        self.held: list[tuple[float, float]] = []
        self._again: dict[int, Request] = {}
        self._observed: list[tuple[int, Callable[[Engine], None], bool]] = []
        self._is_closed = False
        self._is_over = env.event()
        self.done = env.process(self._end())
        self._plan_change(self._next_event_s)
        for place in off:
            if self.roster.states[place] is not ReplicaState.OFF:
                self._move(place, ReplicaState.OFF)
            engines[place].close_arrivals()
        env.process(self._happen())

    # -- requests -------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Hand over a request that arrives now, or let it wait for an engine."""
        self.num_submitted += 1
        for autoscaler in self.autoscalers:
            autoscaler.wake()
        if self._serves():
            self._hold_no_more(request)
            self._hand_over(request)
        elif self._num_to_come or self.autoscalers:
            self._held.append(request)
            self._held_since_s.setdefault(request.request_id, self.env.now)
        else:
            self._hold_no_more(request)
            self.num_refused += 1
            self._leave(request, RequestStatus.FINISHED_REJECTED, NONE_READY)

    def _hold_no_more(self, request: Request) -> None:
        since_s = self._held_since_s.pop(request.request_id, None)
        if since_s is not None:
            self.held.append((since_s, self.env.now))

    def _serves(self) -> bool:
        """Whether an engine of each kind that a request needs is ready."""
        return bool(self.roster.ready)

    def _hand_over(self, request: Request) -> None:
        super().submit(request)

    def abort(self, request: Request, reason: str) -> None:
        request = self._again.get(request.request_id, request)
        if request in self._held:
            self._held.remove(request)
            self._hold_no_more(request)
            self._leave(request, RequestStatus.FINISHED_ABORTED, reason)
        else:
            super().abort(request, reason)

    def _leave(self, request: Request, status: RequestStatus, reason: str) -> None:
        """Record the end of a request that is at no engine, with the first one."""
        request.reason = reason
        request.move_to(status)
        recorder = self.engines[0].recorder
        recorder.arrived(request)
        recorder.left(request, self.env.now)
        on_end, request.on_end = request.on_end, None
        if on_end is not None:
            on_end(request)
        self._look_for_end()

    def _ended(self, place: int, then: OnEnd | None, request: Request) -> None:
        state = self.roster.states[place]
        is_victim = state is ReplicaState.DYING and request.reason == DIED
        if is_victim and self._retries(place):
            super()._ended(place, None, request)
            self._begin_again(request, then)
            return
        super()._ended(place, then, request)
        if state is ReplicaState.DRAINING:
            self._end_drained(place)
        self._look_for_end()

    def _retries(self, place: int) -> bool:
        """Count a request that a death took, and say whether it begins again."""
        toll = self._toll_of[place]
        toll.num_retried += toll.event.retries
        toll.num_lost += not toll.event.retries
        return toll.event.retries

    def _begin_again(self, request: Request, then: OnEnd | None) -> None:
        again = self._again[request.request_id] = request.again()
        again.on_end = partial(self._ended_again, request, then)
        self.submit(again)

    def _ended_again(
        self, request: Request, then: OnEnd | None, again: Request
    ) -> None:
        """Let the client, which has the first request, see how the second ended."""
        if self._again.get(request.request_id) is again:
            del self._again[request.request_id]
        request.status, request.reason = again.status, again.reason
        request.num_tokens = again.num_tokens
        if then is not None:
            then(request)

    # -- replicas -------------------------------------------------------------

    def _happen(self) -> Generator[simpy.Event, None, None]:
        for event in self._events:
            self._plan_change(event.time_s)
            yield At(self.env, event.time_s, ARRIVAL_PRIORITY)
            if event.kind is EventKind.SLOW:
                engine = self.engines[event.place]
                engine.between_steps(
                    partial(self._slow, event.place, engine, event.factor)
                )
            elif event.kind is EventKind.DIE:
                self._die(event)
            elif event.kind is EventKind.DRAIN:
                self._drain(self.ranks_of(event.place)[0])
            else:
                place = self.ranks_of(event.place)[0]
                self._is_wanted[place] = True
                self.env.process(self._start(place))
        self._plan_change(inf)

    def _plan_change(self, next_event_s: float) -> None:
        """Say when requests may come that do not arrive: of engines that are dying."""
        self._next_event_s = next_event_s
        is_dying = ReplicaState.DYING in self.roster.states
        planned_s = min(self._planned_s.values(), default=inf)
        self.next_change_s = -inf if is_dying else min(next_event_s, planned_s)

    def ranks_of(self, place: int) -> Sequence[int]:
        """Return the places of a replica's engines; the first one stands for it."""
        return self._ranks[place]

    def _die(self, event: ReplicaEvent) -> None:
        ranks = self.ranks_of(event.place)
        place = ranks[0]
        self._is_wanted[place] = False
        if self.roster.states[place] in {ReplicaState.DYING, ReplicaState.OFF}:
            return
        toll = Toll(event)
        self._toll_of |= dict.fromkeys(ranks, toll)
        self._tolls.append(toll)
        if self.roster.states[place] is ReplicaState.STARTING:
            self._move(place, ReplicaState.OFF)
            return
        self._move(place, ReplicaState.DYING)
        dying = set(ranks)
        for each in ranks:
            engine = self.engines[each]
            for request in [*engine.recorder.active.values()]:
                engine.abort(request, DIED, goes_on=event.retries)
            if engine.beside is not None:
                engine.between_steps(engine.beside.leave)
            died = partial(self._died, each, dying)
            if engine.done.processed:  # all is served, and others end still
                died(engine.done)
            else:
                engine.done.callbacks.append(died)
        self._let_end(ranks)

    def _died(self, place: int, dying: set[int], _: simpy.Event) -> None:
        """Take note that an engine of a replica has ended its last step."""
        dying.remove(place)
        if not dying:
            self._move(place, ReplicaState.OFF)

    def _let_end(self, ranks: Sequence[int]) -> None:
        """Let the engines of a replica end when they have nothing left to do."""
        for place in ranks:
            engine = self.engines[place]
            engine.close_arrivals()
            if engine.pace is not None:
                engine.pace.close()

    def _drain(self, place: int) -> None:
        self._is_wanted[place] = False
        if self.roster.states[place] is ReplicaState.READY:
            self._move(place, ReplicaState.DRAINING)
            self._end_drained(place)

    def _end_drained(self, place: int) -> None:
        ranks = self.ranks_of(place)
        if any(self._is_needed(self.engines[each]) for each in ranks):
            return
        self._move(place, ReplicaState.OFF)
        for each in ranks:
            _leave_at_end(self.engines[each])
        self._let_end(ranks)

    def _is_needed(self, engine: Engine) -> bool:
        """Whether an engine that drains has something left to do."""
        return bool(engine.recorder.active)

    def _start(self, place: int) -> Generator[simpy.Event, None, None]:
        """Let a replica be ready: the engine that was drained, or a new one."""
        is_new = self.roster.states[place] is not ReplicaState.DRAINING
        if is_new:
            yield from self._dones(place)
        self._num_to_come -= 1
        if self._is_wanted[place] and not self._is_over.triggered:
            if is_new:
                self._replace(place)
            self._move(place, ReplicaState.READY)
        self._hand_over_held()

    def _dones(self, place: int) -> list[simpy.Event]:
        """Return when the engines of a replica have ended."""
        return [self.engines[each].done for each in self.ranks_of(place)]

    def _replace(self, place: int) -> None:
        """Let new engines take the places of those of a replica that has ended."""
        for each in self.ranks_of(place):
            engine = self.engines[each]
            self.ended.setdefault(each, []).append(engine)
            new = self.engines[each] = self._renew(each, engine)
            for every_steps, observer, is_of_each in self._observed:
                if is_of_each or not each:
                    new.observe(every_steps, observer)

    def _hand_over_held(self) -> None:
        # One by one: a refused one must not end a run in which others are held.
        for _ in range(len(self._held)):
            self.submit(self._held.popleft())

    def _move(self, place: int, state: ReplicaState) -> None:
        """Change the state of a replica, and say so to the router."""
        roster = self.roster
        before = roster.ready
        for each in self.ranks_of(place):
            roster.move(each, state, self.env.now)
        self._planned_s.pop(place, None)
        self._plan_change(self._next_event_s)
        ready = roster.ready
        if ready and ready != before:
            self.router.set_ready(ready)
        if state is ReplicaState.OFF and not self._is_over.triggered:
            for autoscaler in self.autoscalers:
                autoscaler.reconcile()

    # -- what autoscalers see and do --------------------------------------------

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine."""
        return len(self._held)

    def launch(self, place: int, start_s: float) -> None:
        """Let a replica be ready in so many seconds, at a place where nothing is."""
        self.roster.check(place, ReplicaState.OFF)
        self._move(place, ReplicaState.STARTING)
        self._is_wanted[place] = True
        self._plan(place, self.env.now + start_s, self._launched, self._dones(place))

    def take_out(self, place: int, drain_s: float) -> None:
        """Drain a replica, or end its start; what it has after `drain_s` moves on."""
        if self.roster.states[place] is ReplicaState.STARTING:
            self._is_wanted[place] = False
            self._move(place, ReplicaState.OFF)
            return
        self.roster.check(place, ReplicaState.READY)
        self._drain(place)
        if drain_s < inf and self.roster.states[place] is ReplicaState.DRAINING:
            self._plan(place, self.env.now + drain_s, self._die_drained)

    def _plan(
        self,
        place: int,
        time_s: float,
        then: Callable[[int], None],
        events: Sequence[simpy.Event] = (),
    ) -> None:
        """Call `then` at a time and after events, if the state lasts until then."""
        self._planned_s[place] = time_s
        self._plan_change(self._next_event_s)
        self.env.process(self._come(place, time_s, then, events))

    def _come(
        self,
        place: int,
        time_s: float,
        then: Callable[[int], None],
        events: Sequence[simpy.Event],
    ) -> Generator[simpy.Event, Any, None]:
        num_changes = len(self.roster.changes)
        yield At(self.env, time_s, ARRIVAL_PRIORITY)
        yield from events
        if not (self.roster.has_moved(place, num_changes) or self._is_over.triggered):
            then(place)

    def _launched(self, place: int) -> None:
        self._replace(place)
        self._move(place, ReplicaState.READY)
        self._hand_over_held()

    def _die_drained(self, place: int) -> None:
        self._die(ReplicaEvent(self.env.now, EventKind.DIE, place))

    # -- the end --------------------------------------------------------------

    def observe(self, every_steps: int, observer: Callable[[Engine], None]) -> None:
        self._observed.append((every_steps, observer, False))
        super().observe(every_steps, observer)

    def observe_each(
        self, every_steps: int, observer: Callable[[Engine], None]
    ) -> None:
        self._observed.append((every_steps, observer, True))
        super().observe_each(every_steps, observer)

    def close_arrivals(self) -> None:
        """Say that nothing will arrive any more, but for what begins again."""
        self._is_closed = True
        self._look_for_end()

    def _look_for_end(self) -> None:
        is_served = self._is_closed and not (self._places or self._held)
        if (is_served or self.stop_requested) and not self._is_over.triggered:
            self._is_over.succeed()

    def _request_stop(self, *, value: bool) -> None:
        super()._request_stop(value=value)
        self._look_for_end()

    def _end(self) -> Generator[simpy.Event, Any, None]:
        """End all engines when nothing is left to do."""
        yield self._is_over
        super().close_arrivals()
        yield self.env.all_of([engine.done for engine in self.engines])

    def summary(self) -> dict[str, Any]:
        """Return the events, and the fate of requests."""
        now_s = self.env.now
        return {
            "events": [
                {
                    "time_s": event.time_s,
                    "kind": event.kind.value,
                    "engine": event.place,
                }
                | self._cost_of(event)
                for event in self._events
                if event.time_s <= now_s
            ],
            "num_retried": sum(toll.num_retried for toll in self._tolls),
            "num_lost": sum(toll.num_lost for toll in self._tolls),
            "num_refused": self.num_refused,
            "up_s": self.roster.up_s(now_s),
        } | (
            {"autoscalers": [each.summary() for each in self.autoscalers]}
            if self.autoscalers
            else {}
        )

    def _cost_of(self, event: ReplicaEvent) -> dict[str, Any]:
        if event.kind is EventKind.SLOW:
            return {"factor": event.factor}
        for toll in self._tolls:
            if toll.event is event:
                return {"num_retried": toll.num_retried, "num_lost": toll.num_lost}
        return {}


def _leave_at_end(engine: Engine) -> None:
    """Let the host of an engine go when its copies have ended."""
    beside, done = engine.beside, engine.done
    if beside is None:
        return
    if done.processed:  # before others that it keeps pace with
        beside.leave()
    else:
        done.callbacks.append(lambda _: beside.leave())
