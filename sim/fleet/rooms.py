"""SGLang's prefillers, which send prompts, and decoders that had slots before."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, cast

from sim.engine.beside import Beside, nothing
from sim.fleet.pulls import NOTHING_MOVED, Lot
from sim.scheduler.sglang.rooms import Room, Send, room_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.costs.base import CostModel, StepCost
    from sim.engine.pipeline import BatchQueue
    from sim.fleet.network import Flow, Network
    from sim.fleet.pulls import PullRules
    from sim.results.fleet.pulls import PullLog
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.request import Request
    from sim.scheduler.sglang.decode import DecodeScheduler
    from sim.scheduler.sglang.prefill import PrefillScheduler


@dataclass(slots=True, eq=False)
class Meeting(Room):
    """A `Room` with both sides, and what was sent: a row of the log of transfers.

    Attributes
    ----------
    is_closed
        Whether nothing of it is wanted any more.
    begins_again
        Whether the request begins again, as its prefiller has died; None if it has not.
    then
        What waits until the prompt has left its engine.
    """

    request: Request = field(kw_only=True)
    prompt: Request = field(kw_only=True)
    source: SenderSteps = field(kw_only=True)
    target: ReceiverSteps = field(kw_only=True)
    num_blocks: int = 0
    lot: Lot = NOTHING_MOVED
    begin_s: float = float("nan")
    end_s: float = float("nan")
    has_failed: bool = False
    is_closed: bool = False
    begins_again: bool | None = None
    then: Callable[[], object] = nothing


class RoomSteps(Beside):
    """Steps of one side; its scheduler looks at its rooms before each batch.

    Parameters
    ----------
    scheduler
        One side's.
    cost_model
        Prices the batch; transfers do not slow it.
    place
        Of the engine.

    Attributes
    ----------
    is_dead
        Whether the engine is gone.
    on_free
        Called when it holds nothing more for others.
    """

    scheduler: Any

    def __init__(self, scheduler: Any, cost_model: CostModel, place: int) -> None:
        super().__init__(scheduler)
        self._cost_model = cost_model
        self._batches: BatchQueue | None = None
        self.place = place
        self.is_dead = False
        self.on_free: Callable[[], object] = nothing

    def join(self, batches: Any) -> None:
        self._batches = batches

    @property
    def has_news(self) -> bool:
        return False

    @property
    def asks(self) -> bool:
        return False

    @property
    def awaits(self) -> bool:
        return bool(self.scheduler.num_waiting or self.scheduler.num_swapped)

    @property
    def holds(self) -> bool:
        """Whether it keeps slots for another engine; `on_free` tells the end."""
        return False

    def may_rest(self, now_s: float) -> bool:
        is_in_flight = self._batches is not None and self._batches.has_steps
        rests = self._look(now_s)
        self.drains = rests and is_in_flight
        return rests and not is_in_flight

    @abstractmethod
    def _look(self, now_s: float) -> bool:
        """Look around in the rooms; return whether there is no batch to form."""

    def form(self, now_s: float) -> tuple[int, ...]:
        return self.schedule(now_s).shape[:6]

    def quiet_steps(self, most: int) -> int:
        del most
        return 0

    def step(self, shape: BatchShape) -> StepCost:
        return self._cost_model.step(shape)

    def batch_total(self, *shape: int) -> float:
        return self.step(cast("Any", shape)).total_s

    def report(self, now_s: float) -> None:
        """Do nothing: a scheduler sees by itself what has come."""

    def rest(self, now_s: float) -> None:
        self.report(now_s)

    def wake_s(self, now_s: float) -> float:
        del now_s
        return inf

    def quiet_until_s(self) -> float:
        return inf

    def die(self) -> None:
        """Note that the engine is gone."""
        self.is_dead = True


class SenderSteps(RoomSteps):
    """Steps of a prefiller; what it computes is sent when a step has ended.

    What goes to one decoder goes one after the other, in the order in which it was
    computed.

    Parameters
    ----------
    scheduler, cost_model, place
        See `RoomSteps`.
    network
        The links.
    rules
        What each lot of pages takes besides.

    Attributes
    ----------
    on_sent
        Called with a prompt when it has been sent, or given up.

    Notes
    -----
    Source: SGLang 0.5.9, ``disaggregation/mooncake/conn.py`` (`transfer_worker`): a
    queue for each decoder's session, of four that sessions share in the release.
    """

    scheduler: PrefillScheduler

    def __init__(
        self,
        scheduler: PrefillScheduler,
        cost_model: CostModel,
        place: int,
        network: Network,
        rules: PullRules,
    ) -> None:
        super().__init__(scheduler, cost_model, place)
        self._network = network
        self._rules = rules
        self._lots: dict[ReceiverSteps, deque[Send]] = {}  # the first one is sent
        self._flows: dict[ReceiverSteps, Flow] = {}
        self._over: list[Meeting] = []  # sent or closed, and not seen
        self.on_sent: Callable[[Request], object] = nothing

    @property
    def holds(self) -> bool:
        return bool(self.scheduler.in_flight)

    def _look(self, now_s: float) -> bool:
        self.report(now_s)
        return self.scheduler.rests()

    def schedule(self, now_s: float) -> SchedulerOutput:
        self.report(now_s)
        output = self.scheduler.schedule(now_s)
        self._begin(now_s)
        return output

    def report(self, now_s: float) -> None:
        self._begin(now_s)
        over, self._over = self._over, []
        held = self.scheduler.in_flight
        gone = [*dict.fromkeys(each.prompt for each in over if each.prompt in held)]
        if gone:
            self.scheduler.release(gone)
            for prompt in gone:
                self.on_sent(prompt)
            if not held:
                self.on_free()

    def _begin(self, now_s: float) -> None:
        """Send what was computed."""
        sends, self.scheduler.sends = self.scheduler.sends, []
        for send in sends:
            room = meeting_of(send.request)
            if room.is_closed:
                self._note_over(room)
                continue
            if not room.num_blocks:
                room.begin_s = now_s
            room.num_blocks += send.num_pages
            lots = self._lots.setdefault(room.target, deque())
            lots.append(send)
            if len(lots) == 1:
                self._send_next(room.target)

    def _send_next(self, target: ReceiverSteps) -> None:
        lot = self._rules.lot((self._lots[target][0].num_pages,))
        self._flows[target] = self._network.begin(
            self.place,
            target.place,
            lot.num_bytes,
            self._rules.fixed_s(lot, is_first=False),
            lambda: self._sent(target),
        )

    def _sent(self, target: ReceiverSteps) -> None:
        send = self._lots[target].popleft()
        room = meeting_of(send.request)
        if send.is_last and not room.is_closed:
            room.end_s, room.has_arrived = self._network.env.now, True
            room.num_cached_tokens = room.prompt.num_cached_tokens
            self._note_over(room)
            target.wake()
        if self._lots[target]:
            self._send_next(target)

    def _note_over(self, room: Meeting) -> None:
        self._over.append(room)
        self.wake()

    def close(self, room: Meeting) -> None:
        """Send nothing more of a prompt, and let go of what was computed of it."""
        room.is_closed = True
        if self.is_dead:
            return
        lots = self._lots.get(room.target)
        if lots:
            first = lots[0]
            left = [each for each in lots if meeting_of(each.request) is not room]
            self._lots[room.target] = deque(left)
            if left[:1] != [first]:
                self._network.cancel(self._flows[room.target])
                if left:
                    self._send_next(room.target)
        self._note_over(room)

    def die(self) -> None:
        super().die()
        self.on_sent = nothing
        for target, lots in self._lots.items():
            if lots:
                self._network.cancel(self._flows[target])
        self._lots.clear()


class ReceiverSteps(RoomSteps):
    """Steps of a decoder; its slots are there before a prompt is computed.

    Parameters
    ----------
    scheduler, cost_model, place
        See `RoomSteps`.
    rules
        How long the first request takes that a prefiller and this engine have together,
        and what all move.
    log
        Told of what has arrived.
    """

    scheduler: DecodeScheduler

    def __init__(
        self,
        scheduler: DecodeScheduler,
        cost_model: CostModel,
        place: int,
        rules: PullRules,
        log: PullLog,
    ) -> None:
        super().__init__(scheduler, cost_model, place)
        self._rules = rules
        self._log = log
        self._met_s: dict[SenderSteps, float] = {}

    def meet(self, source: SenderSteps, now_s: float) -> float:
        """Return when it has reached a prefiller, in seconds."""
        met_s = self._met_s.setdefault(source, now_s + self._rules.handshake_s)
        return max(met_s, now_s)

    def _look(self, now_s: float) -> bool:
        rests = self.scheduler.rests(now_s)
        self._tell(now_s)
        return rests

    def rest(self, now_s: float) -> None:
        self._look(now_s)  # slots of what was withdrawn are freed when it is looked at

    def schedule(self, now_s: float) -> SchedulerOutput:
        output = self.scheduler.schedule(now_s)
        self._tell(now_s)
        if (
            self._batches is not None
            and not output.num_batched_tokens
            and not output.is_known
        ):
            # all that a prebuilt batch takes is the host's, and no step hides it
            self._batches.hold_host(now_s + self.step(output.shape).total_s)
        return output

    def _tell(self, now_s: float) -> None:
        """Tell prefillers of slots that are there, and the log of what has come."""
        scheduler = self.scheduler
        for request in scheduler.allocated:
            meeting_of(request).source.wake()
        for request in scheduler.joined:
            self._note(meeting_of(request), now_s)
        scheduler.allocated, scheduler.joined = [], []

    def note_lost(self, room: Meeting, now_s: float) -> None:
        """Take note of a prompt that was being sent by an engine that died."""
        if room.num_blocks:
            room.end_s, room.has_failed = now_s, True
            self._note(room, now_s)

    def _note(self, room: Meeting, now_s: float) -> None:
        room.lot = self._rules.lot((room.num_blocks,))
        self._log.note(room, self.place, now_s)

    def wake_s(self, now_s: float) -> float:
        rooms = [room_of(each.request) for each in self.scheduler.preallocating]
        return min((each.met_s for each in rooms if each.met_s > now_s), default=inf)


def meeting_of(request: Request) -> Meeting:
    """Return the room of a request or of its prompt."""
    return cast("Meeting", room_of(request))
