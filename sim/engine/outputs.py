"""What the model does on the fast path: a calendar of the last tokens.

With `sim.engine.sampling` the only place that knows how long an output will be
(invariant 4): the scheduler never looks in here.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from sim.engine.sampling import finish, last_num_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request

NEVER = 1 << 62


class OutputCalendar:
    """The decodes that end, by the step that gives their last token.

    Requests of one step stand in running order, since they enter in that order.

    Attributes
    ----------
    due
        Decodes by step, in running order; none stands where all have left.
    steps
        A heap of its keys.
    next_step
        The first of them: no decode ends earlier; `NEVER` without decodes.
    """

    def __init__(self) -> None:
        self.next_step = NEVER
        self.due: dict[int, dict[Request, None]] = {}
        self.steps: list[int] = []

    def leave(self, request: Request) -> None:
        """Forget a decode that was preempted or aborted."""
        del self.due[request.due_step][request]  # which may leave nobody due then
        request.due_step = -1

    def pop(self, end_s: float) -> list[Request]:
        """Give their last token to the decodes that `next_step` ends; in running order.

        That step must end now.
        """
        steps = self.steps
        step = heappop(steps)
        self.next_step = steps[0] if steps else NEVER
        finished = list(self.due.pop(step))
        for request in finished:
            num_computed_tokens = request.base_tokens + step
            request.num_computed_tokens = num_computed_tokens
            request.num_tokens = num_computed_tokens + 1
            request.due_step = -1
            request.streaks.append((request.joined_step, step))
            finish(request, end_s)
        return finished

    def first_tokens(
        self, requests: Iterable[Request], step: int, end_s: float
    ) -> tuple[list[Request], list[Request]]:
        """Give a token to requests whose last chunk was computed in `step`.

        Returns
        -------
        going_on
            Those that decode from the next step on; the calendar knows until when.
        finished
            Those for which that was the last token.
        """
        going_on: list[Request] = []
        finished: list[Request] = []
        for request in requests:
            num_tokens = request.num_tokens = request.num_tokens + 1
            request.joined_step = step
            if num_tokens == request.num_prompt_tokens + 1:
                request.first_token_s = end_s
            num_left = last_num_tokens(request) - num_tokens
            if num_left > 0:
                self._join(request, step + num_left)
                going_on.append(request)
            else:
                request.streaks.append((step, step))
                finish(request, end_s)
                finished.append(request)
        return going_on, finished

    def _join(self, request: Request, step: int) -> None:
        """Note that `request` gets a token in every step until `step`, its last."""
        request.due_step = step
        due = self.due.get(step)
        if due is not None:
            due[request] = None
            return
        self.due[step] = {request: None}
        heappush(self.steps, step)
        self.next_step = min(self.next_step, step)
