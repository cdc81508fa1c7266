"""An engine with a tier behind its pool that forms steps while others run."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any

from sim.engine.offloading import OffloadedSteps
from sim.scheduler.v1.connectors.base import StepTransfers

if TYPE_CHECKING:
    from sim.costs.base import StepCost
    from sim.engine.links import Copy
    from sim.engine.pipeline import BatchQueue
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.v1.connectors.base import TransferReport


class AheadOffloadedSteps(OffloadedSteps):
    """`OffloadedSteps` of which some are in flight when the next one is formed.

    Copies go by the GPU: what a call asks for begins with its step there, when the one
    ahead of it has ended, and not when it is formed. So stores begin when the step that
    computes them has ended, and the end of a copy is reported with the output of the
    first step that begins on the GPU when it is there.

    Parameters
    ----------
    arguments
        As of `OffloadedSteps`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._batches: BatchQueue | None = None
        self._seen = deque[list[Any]]()  # what steps in flight report, oldest first

    def join(self, batches: Any) -> None:
        self._batches = batches
        batches.beside = self

    @property
    def has_news(self) -> bool:
        return super().has_news or any(self._seen)

    def begin(self, now_s: float) -> None:
        self._has_news = self._rests = False

    def quiet_steps(self, most: int) -> int:
        seen = self._seen
        if self.link.has_ended or any(seen):
            asked = self.scheduler.transfers
            assert isinstance(asked, StepTransfers)
            if asked.stores or asked.loads:  # which the latest step began with
                return 0
            if not self._decodes_go_on(chain.from_iterable(seen)):
                return 0
            assert self._batches is not None
            if seen and seen[-1] and self._batches.num_steps:
                most = min(most, 1)  # then the step in flight reports
        return super().quiet_steps(most)

    def go_on(self, now_s: float) -> bool:
        return self._settle(now_s)

    def enter_quietly(self, begin_s: float, end_s: float) -> None:
        """Let a quiet step begin on the GPU, as `enter` does where it is not hidden."""
        self._seen.append(self.link.poll())
        self._note_tier(begin_s)
        self._end_s = end_s

    def step(self, shape: BatchShape) -> StepCost:
        return self._cost_model.step(shape)

    def enter(self, begin_s: float, total_s: float, *, computes: bool) -> float:
        """Let the step that was formed begin; return what copies add to it, in seconds.

        Parameters
        ----------
        begin_s, total_s
            When it begins on the GPU, and how long it takes alone.
        computes
            Whether it has tokens.
        """
        self._formed_s = begin_s
        self._submit_asked(begin_s)
        seen: list[Copy] = self._polled
        self._seen.append(seen)
        self._polled = []
        more_s = self._run(total_s, computes=computes)
        if more_s and self._steps.is_priced:
            self._steps.added.append((len(self._steps.ends_s), more_s))
        return more_s

    def taken(self, now_s: float) -> TransferReport | None:
        assert self._batches is not None
        self._take_seen(0 if now_s > self._end_s else self._batches.num_steps)
        return super().taken(now_s)

    def taken_to_rest(self, now_s: float) -> TransferReport | None:
        self._take_seen(0)
        return super().taken_to_rest(now_s)

    def _take_seen(self, num_in_flight: int) -> None:
        """Report what steps have seen whose outputs were processed."""
        while len(self._seen) > num_in_flight:
            self._polled = self._polled + self._seen.popleft()
