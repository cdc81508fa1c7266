"""Calendars of decodes that pause together, while prompts are computed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar

from sim.engine.sampling import AheadCalendar, OutputCalendar, last_num_tokens
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.base import Preemption, Scheduler


class PausingCalendar(OutputCalendar):
    """`OutputCalendar` of decodes all of which get a token in a step, or none.

    A pause moves all that is due by a step. When the tokens of a request came follows
    from the pauses, when it ends.
    """

    _lag: ClassVar[int] = 0
    """Steps from the one that gives a token to the one at whose end it is there."""

    def __init__(self) -> None:
        super().__init__()
        self._pauses: list[int] = []

    def wait(self, requests: Iterable[Request], step: int) -> None:
        """Note that no decode gets a token in `step`."""
        del requests  # all of them
        self._pauses.append(step)
        first = step + self._lag
        moved: dict[int, list[Request]] = {}
        for due_step, of_step in self.due.items():
            if due_step < first:
                moved[due_step] = of_step
                continue
            for request in of_step:
                request.due_step = due_step + 1
            moved[due_step + 1] = of_step
        self.due = moved
        steps = self.steps  # still a heap: their order stays
        steps[:] = [due + 1 if due >= first else due for due in steps]

    def forget_preempted(self, preemptions: Iterable[Preemption], step: int) -> None:
        """Forget the decodes that the batch of `step` preempted.

        A token of theirs that is in flight is lost.
        """
        for preemption in preemptions:
            request = preemption.request
            if request.due_step >= 0:
                self.leave(request)
                self._note_streaks(request, step - 1 - self._lag)

    def pop(self, end_s: float) -> list[Request]:
        step = heappop(self.steps)
        finished = self.due.pop(step)
        for request in finished:
            num_tokens = last_num_tokens(request)
            if num_tokens <= request.num_prompt_tokens:  # one all the same
                num_tokens = request.num_prompt_tokens + 1
            request.num_tokens = num_tokens
            request.num_computed_tokens = num_tokens - 1
            request.due_step = -1
            self._note_streaks(request, step - self._lag)
            request.finish_s = end_s
            request.status = (
                RequestStatus.FINISHED_STOPPED
                if num_tokens >= request.oracle_num_tokens
                else RequestStatus.FINISHED_LENGTH_CAPPED
            )
        return finished

    def _note_streaks(self, request: Request, last_step: int) -> None:
        """Note in which steps a request got tokens, since its prompt was computed."""
        first, pauses = request.joined_step, self._pauses
        if last_step < first:
            return
        streaks = request.streaks
        begin = bisect_right(pauses, first)
        for step in pauses[begin : bisect_left(pauses, last_step + 1, begin)]:
            if first < step:
                streaks.append((first, step - 1))
            first = step + 1
        if first <= last_step:
            streaks.append((first, last_step))


class AheadPausingCalendar(PausingCalendar, AheadCalendar):
    """`PausingCalendar` where a step is formed before the last output is there.

    A last token of step e makes its request leave when step e + 1 was formed. If that
    is one of decodes, the request got a slot in it in vain, whatever ended it.
    """

    _lag = 1

    def begin(self, requests: Iterable[Request], step: int) -> list[Request]:
        """Take note of requests whose last chunk is in `step`; all are in the next."""
        begun = list(requests)
        due = self.due
        for request in begun:
            num_tokens = request.num_tokens
            request.joined_step = step
            if num_tokens == request.num_prompt_tokens:
                self.begun.append(request)
            num_left = last_num_tokens(request) - num_tokens
            last_step = request.due_step = step + max(num_left, 1)
            if last_step in due:
                due[last_step].append(request)
            else:
                due[last_step] = [request]
                heappush(self.steps, last_step)
        return begun

    def pop_known(self, end_s: float, finished: list[Request]) -> list[Request]:
        finished += self.pop(end_s)
        return []


def calendar_of(scheduler: Scheduler, *, is_ahead: bool) -> OutputCalendar:
    """Return the calendar of a scheduler's decodes, with a step in flight or none."""
    if getattr(scheduler, "decodes_pause", False):
        return AheadPausingCalendar() if is_ahead else PausingCalendar()
    if not is_ahead:
        return OutputCalendar()
    return AheadCalendar(drops_stale=getattr(scheduler, "drops_stale", False))
