"""Engines of a pair that have a tier behind their pool, on the clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from sim.engine.beside import ReportedSteps, joined_reports
from sim.scheduler.v1.connectors.base import JobKind

if TYPE_CHECKING:
    from sim.costs.base import StepCost
    from sim.engine.links import Link
    from sim.engine.offloading import OffloadedSteps
    from sim.fleet.network import Network
    from sim.fleet.pulls import PairSteps
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.v1.connectors.base import TransferReport

_WAYS = {"out": (JobKind.STORE,), "in": (JobKind.LOAD, JobKind.SYNC_LOAD)}
"""Copies that go the way of what others read, and of what is read from others."""


class TieredSteps(ReportedSteps):
    """Steps beside which blocks go to a tier and back, and from engine to engine.

    Both workers look around and report as each does alone; the scheduler hears of them
    in one report. Copies slow steps, pulls do not.

    Parameters
    ----------
    side, tier
        The two, of one scheduler.
    port
        Told of copies, where transfers go the same way; None where they do not.
    """

    def __init__(
        self, side: PairSteps, tier: OffloadedSteps, port: SharedPort | None
    ) -> None:
        super().__init__(side.scheduler)
        self.side, self.tier, self.port = side, tier, port
        side.wake = self._wake
        if port is not None:
            tier.on_copies = port.note

    def _wake(self) -> None:
        self.wake()

    def join(self, batches: Any) -> None:
        self.side.join(batches)
        self.tier.join(batches)

    def leave(self) -> None:
        self.tier.leave()
        if self.port is not None:
            self.port.network.give_back(self.port.place)

    @property
    def has_news(self) -> bool:
        return self.side.has_news or self.tier.has_news

    @property
    def asks(self) -> bool:
        # A port that is taken, or free again, is an event of its own.
        return self.port is not None or self.side.asks or self.tier.asks

    @property
    def awaits(self) -> bool:
        return self.side.awaits or self.tier.awaits

    # -- a step ---------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        self.tier.begin(now_s)
        self.side.begin(now_s)

    def quiet_steps(self, most: int) -> int:
        return 0 if self.side.will_report else self.tier.quiet_steps(most)

    def go_on(self, now_s: float) -> bool:
        return self.tier.go_on(now_s)

    def enter_quietly(self, begin_s: float, end_s: float) -> None:
        self.tier.enter_quietly(begin_s, end_s)

    def batch_total(self, *shape: int) -> float:
        return self.tier.batch_total(*shape)

    def step(self, shape: BatchShape) -> StepCost:
        return self.tier.step(shape)

    # -- what has ended -------------------------------------------------------

    def tell(self, report: TransferReport | None) -> None:
        super().tell(report)
        self.side.note_told(report)

    def taken(self, now_s: float) -> TransferReport | None:
        return joined_reports(self.tier.taken(now_s), self.side.taken(now_s))

    def taken_to_rest(self, now_s: float) -> TransferReport | None:
        return joined_reports(
            self.tier.taken_to_rest(now_s), self.side.taken_to_rest(now_s)
        )

    def begin_to_rest(self, now_s: float) -> None:
        self.tier.begin_to_rest(now_s)
        self.side.begin_to_rest(now_s)

    def rested(self, now_s: float) -> TransferReport | None:
        self.tier.rested(now_s)
        if self.scheduler.num_waiting:
            return None
        return self.side.rested(now_s)

    def wake_s(self, now_s: float) -> float:
        return min(self.tier.wake_s(now_s), self.side.wake_s(now_s))


@dataclass(slots=True)
class SharedPort:
    """The port of an engine's GPUs, through which copies and transfers go.

    ::

        GPU --> | stores, first          | --> host
                | what is read, the rest | --> network

    While copies run one way they take what they reach alone, and transfers that way
    share what the link has beyond it. So what goes through the port never exceeds it,
    and no copy, and no step, is later for a transfer that begins in mid-step.

    Parameters
    ----------
    network, place
        Over which is read, and the engine.
    bytes_per_s
        What copies reach, of all GPUs of the engine, by way.
    """

    network: Network
    place: int
    bytes_per_s: dict[str, float]

    def note(self, begin_s: float, link: Link) -> None:
        """Take note of copies from a time on, in seconds; see `OffloadedSteps`."""
        for way, kinds in _WAYS.items():
            end_s = max(link.latest_ends_s[kind] for kind in kinds)
            if any(link.is_copying(kind) for kind in kinds):
                end_s = inf
            if end_s > begin_s or self.network.is_taken(way, self.place):
                rate = self.bytes_per_s[way]
                self.network.take(way, self.place, rate, begin_s, end_s)
