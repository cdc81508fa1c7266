"""One side of SGLang's prefillers and decoders, step by step; the other is played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.scheduler.log.lines import names_of
from sim.scheduler.sglang.decode import DecodeScheduler
from sim.scheduler.sglang.prefill import PrefillScheduler
from sim.scheduler.sglang.requests import Mode
from sim.scheduler.sglang.rooms import Room
from sim.studies.conformance.engines import SglangEngine
from sim.studies.conformance.sglang import SglangDriver

if TYPE_CHECKING:
    from sim.scheduler.log.lines import Line
    from sim.scheduler.request import Request
    from sim.scheduler.sglang.requests import SglangOutput
    from sim.studies.conformance.workload import DecisionWorkload


@dataclass(slots=True, eq=False)
class PlayedRoom(Room):
    """A `Room` of which one side is played; times are steps.

    Parameters
    ----------
    transfer_delay
        Steps from the last page's sending to its coming.

    Attributes
    ----------
    begin_step
        Of that sending, or of the slots that it goes to; -1 before it.
    """

    transfer_delay: int = 0
    begin_step: int = -1

    def has_come(self, step: int) -> bool:
        """Whether all is there by a step."""
        return 0 <= self.begin_step <= step - self.transfer_delay


class SideDriver(SglangDriver):
    """`SglangDriver` of an engine that only prefills, or only decodes."""

    def __init__(self, workload: DecisionWorkload, *, check: bool = False) -> None:
        super().__init__(workload, check=check)
        self._rooms: dict[Request, PlayedRoom] = {}
        for raw in workload.requests:
            delay, request = raw.route_delay or 0, self._requests[raw.id]
            room = PlayedRoom(
                float(raw.arrival_step + delay),
                transfer_delay=raw.transfer_delay or 0,
            )
            request.kv_transfer_params = {"bootstrap_room": room}
            self._rooms[request] = room
            self._most_idle = max(
                self._most_idle, 3 + delay + (raw.transfer_delay or 0)
            )

    def _is_at_rest(self) -> bool:
        return not any(self._log.beside().values())

    def _call(self, step: int) -> Line:
        line = super()._call(step) | self._log.beside()
        return line | {"free_end": self._log.free()}


class PrefillDriver(SideDriver):
    """Of an engine that only prefills."""

    _kind = PrefillScheduler
    scheduler: PrefillScheduler

    def __init__(self, workload: DecisionWorkload, *, check: bool = False) -> None:
        one = [each.model_copy(update={"output_len": 1}) for each in workload.requests]
        super().__init__(workload.model_copy(update={"requests": one}), check=check)
        self._cut: set[Request] = set()

    def _abort(self, request: Request) -> bool:
        if request in self.scheduler.in_flight:
            self._cut.add(request)
            return True
        return super()._abort(request)

    def _schedule(self, step: int) -> SglangOutput:
        for room in self._rooms.values():
            room.is_allocated = step >= room.met_s
        return super()._schedule(step)

    def _call(self, step: int) -> Line:
        line = super()._call(step)
        scheduler = self.scheduler
        # what was sent ends at the decoder
        line.pop("fin", None)
        ended = [each for each in scheduler.ended if each not in scheduler.in_flight]
        if ended:
            line["fin"] = names_of(ended, self.names)
        sent: dict[str, list[int | bool]] = {}
        sends, scheduler.sends = scheduler.sends, []
        for request, num_pages, is_last in sends:
            name = self.names[request.request_id]
            sent[name] = [sent.get(name, [0])[0] + num_pages, is_last]
            if is_last:
                self._rooms[request].begin_step = step
        scheduler.release(
            [
                each
                for each in scheduler.in_flight
                if each in self._cut or self._rooms[each].has_come(step)
            ]
        )
        self._prove()
        if sent:
            line["send"] = sent
        line.pop("dropped", None)  # the queues tell of it
        return line | self._log.beside() | {"free_end": self._log.free()}


class DecodeDriver(SideDriver):
    """Of an engine that only decodes."""

    _kind = DecodeScheduler
    scheduler: DecodeScheduler

    def __init__(self, workload: DecisionWorkload, *, check: bool = False) -> None:
        super().__init__(workload, check=check)
        self.scheduler.gives_up = False
        self._joined: Line = {}

    def _schedule(self, step: int) -> SglangOutput:
        """Let requests join, which is no step of its own, and form the decodes."""
        scheduler = self.scheduler
        for room in self._rooms.values():
            room.has_arrived = room.has_come(step)
        self._joined = {}
        output = super()._schedule(step)
        for request in scheduler.allocated:
            self._rooms[request].begin_step = step
        scheduler.allocated = []
        if output.mode is not Mode.PREBUILT or not scheduler.settings.makes_plans:
            return output
        self._joined = self._log.joined(output)
        self._update(step, output)
        return super()._schedule(step)

    def _call(self, step: int) -> Line:
        line = super()._call(step) | self._joined
        line.pop("dropped", None)
        return line


def side_driver(workload: DecisionWorkload, *, check: bool = False) -> SideDriver:
    """Return the driver of the side that a workload names."""
    engine = workload.engine
    assert isinstance(engine, SglangEngine)
    prefills = engine.disaggregation_mode == "prefill"
    return (PrefillDriver if prefills else DecodeDriver)(workload, check=check)
