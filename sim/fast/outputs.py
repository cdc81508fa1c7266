"""What the model does on the fast path: a calendar of the last tokens.

With `sim.generation` the only place that knows how long an output will be (invariant
4): the scheduler never looks in here.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from sim.generation import finish, last_num_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.request import Request

NEVER = 1 << 62


class OutputCalendar:
    """The decodes that end, by the step that gives their last token.

    Requests of one step stand in running order, since they enter in that order.
    """

    def __init__(self) -> None:
        self._due: dict[int, dict[Request, None]] = {}
        self._steps: list[int] = []  # a heap; may hold steps that emptied since

    def leave(self, request: Request) -> None:
        """Forget a decode that was preempted or aborted."""
        del self._due[request.due_step][request]
        request.due_step = -1

    def next_step(self) -> int:
        """Return the first step that gives a last token; `NEVER` if none does."""
        steps, due = self._steps, self._due
        while steps:
            if due.get(steps[0]):
                return steps[0]
            due.pop(heappop(steps), None)
        return NEVER

    def pop(self, step: int, end_s: float) -> Sequence[Request]:
        """Give their last token to the decodes that `step` ends; in running order."""
        due = self._due.get(step)
        if not due:
            return ()
        finished = list(due)
        due.clear()
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
            last = last_num_tokens(request)
            if num_tokens < last:
                self._join(request, step + last - num_tokens)
                going_on.append(request)
            else:
                request.streaks.append((step, step))
                finish(request, end_s)
                finished.append(request)
        return going_on, finished

    def _join(self, request: Request, step: int) -> None:
        """Note that `request` gets a token in every step until `step`, its last."""
        request.due_step = step
        due = self._due.get(step)
        if due is None:
            self._due[step] = {request: None}
            heappush(self._steps, step)
        else:
            due[request] = None
