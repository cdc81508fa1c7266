"""Prefillers and decoders that get a request at once, as SGLang's gateway sends it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from sim.fleet.engines import Engines
from sim.fleet.pairs import TwoPools, prompt_of
from sim.fleet.replicas import DIED
from sim.fleet.rooms import Meeting, ReceiverSteps, SenderSteps, meeting_of
from sim.fleet.roster import ReplicaState
from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from sim.engine.loop import Engine
    from sim.fleet.engines import OnEnd
    from sim.fleet.roster import ReplicaEvent
    from sim.scheduler.request import Request


class RoomPairs(TwoPools):
    """Prefillers and decoders that meet in a room for each request.

    ::

        client --> gateway --> prefiller: waits until the decoder has slots, computes
                          |          the prompt, and sends it and a first token
                          +--> decoder: gives it slots, waits, and decodes

    Both are chosen when a request comes, the prefiller first. Where one of them is gone
    the other one lets go of it. Where both die, the first says what becomes of it.

    Notes
    -----
    Source: SGLang 0.5.9, ``disaggregation``; its gateway, ``pd_router.rs``.
    """

    def __init__(self, *parts: Any) -> None:
        self._rooms: dict[int, Meeting] = {}  # of requests that have not ended
        super().__init__(*parts)

    def _heed(self, place: int, engine: Engine) -> None:
        super()._heed(place, engine)
        if isinstance(engine.beside, SenderSteps):
            engine.beside.on_sent = partial(self._sent, place)

    # -- requests -------------------------------------------------------------

    def _hand_over(self, request: Request) -> None:
        """Send a request to both engines."""
        super()._hand_over(request)
        prompt, router, number = prompt_of(request), self.router, request.request_id
        source_place = router.choose_prefill(prompt)
        place = router.choose(request)
        source = cast("SenderSteps", self.engines[source_place].beside)
        target = cast("ReceiverSteps", self.engines[place].beside)
        room = self._rooms[number] = Meeting(
            target.meet(source, self.env.now),
            request=request,
            prompt=prompt,
            source=source,
            target=target,
        )
        request.kv_transfer_params = {"bootstrap_room": room}
        prompt.kv_transfer_params = {"bootstrap_room": room}
        self._places[number] = place
        prompt.on_end = partial(self._prefilled, room)
        self.engines[source_place].submit(prompt)
        if prompt.status is RequestStatus.FINISHED_REJECTED:  # which has its row
            del self._rooms[number], self._places[number]
            router.ended(request, place)
            self._give_back(request, prompt)
            return
        request.on_end = partial(self._ended, place, request.on_end)
        self.engines[place].submit(request)

    def _prefilled(self, room: Meeting, prompt: Request) -> None:
        """Take note that a prompt was computed, or that it will not be."""
        if prompt.status not in _SERVED:
            self.router.ended(prompt, room.source.place)
        room.then()

    def _sent(self, place: int, prompt: Request) -> None:
        """Take note that a prefiller has answered."""
        self.router.ended(prompt, place)

    def _ended(self, place: int, then: OnEnd | None, request: Request) -> None:
        room = self._rooms.pop(request.request_id)
        self._close(room)
        if room.begins_again is None:
            super()._ended(place, then, request)
            return
        Engines._ended(self, place, None if room.begins_again else then, request)
        if room.begins_again:
            self._begin_again(request, then)
        if self.roster.states[place] is ReplicaState.DRAINING:
            self._end_drained(place)
        self._look_for_end()

    def _begin_again(self, request: Request, then: OnEnd | None) -> None:
        """Let a request begin again when its prompt has left, which has its number."""
        room, number = meeting_of(request), request.request_id
        if room.prompt.status.is_finished:
            super()._begin_again(request, then)
            return
        self._places[number] = room.source.place
        again = super()._begin_again

        def begin_again() -> None:
            del self._places[number]
            again(request, then)

        room.then = begin_again

    def _close(self, room: Meeting) -> None:
        """Let the prefiller of a request go of it, if it has something of it yet."""
        if room.has_arrived or room.is_closed:
            return
        room.source.close(room)
        if not room.source.is_dead and not room.prompt.status.is_finished:
            engine = self.engines[room.source.place]
            engine.abort(room.prompt, room.request.reason, goes_on=True)

    # -- replicas -------------------------------------------------------------

    def _die(self, event: ReplicaEvent) -> None:
        place = event.place
        num_tolls, engine = len(self._tolls), self.engines[place]
        side = engine.beside
        if isinstance(side, SenderSteps):  # decoders have the rows
            for prompt in [*engine.recorder.active.values()]:
                engine.abort(prompt, DIED, goes_on=True)
        super()._die(event)
        if len(self._tolls) == num_tolls:
            return  # it was off
        assert isinstance(side, (SenderSteps, ReceiverSteps))
        side.die()
        if isinstance(side, ReceiverSteps):
            return
        for prompt in side.scheduler.in_flight:
            self.router.ended(prompt, place)
        for room in [*self._rooms.values()]:
            is_taken = room.has_arrived or room.is_closed or room.target.is_dead
            if room.source is side and not is_taken:
                self._fail(room, place)

    def _fail(self, room: Meeting, place: int) -> None:
        """Let a request begin again, or go: its prompt was lost with an engine."""
        room.is_closed = True
        room.target.note_lost(room, self.env.now)
        room.begins_again = self._retries(place)
        decoder = self.engines[room.target.place]
        decoder.abort(room.request, DIED, goes_on=room.begins_again)


_SERVED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
