"""Draft tokens of requests: proposed, scheduled, and verified by the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.base import ScheduledDrafts
from sim.scheduler.v1.in_flight import TokensInFlight

if TYPE_CHECKING:
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.v1.in_flight import Delivery


class DraftsInFlight(TokensInFlight):
    """`TokensInFlight` of an engine that verifies draft tokens.

    ::

        missing tokens        | known + placeholders - computed | drafts |
        scheduled             as far as budget and limits go: drafts are cut off first
        placeholders          one for the output, and one for each draft

    A request's drafts are those of its latest step. Each call forgets them, whether it
    schedules them or not. With asynchronous scheduling a drafter proposes as many as it
    can, whose content is not known in the call that schedules them.

    Parameters
    ----------
    num_speculative_tokens
        Most drafts of a request.
    awaits_outputs
        See `TokensInFlight`.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py``.
    """

    def __init__(self, num_speculative_tokens: int, *, awaits_outputs: bool) -> None:
        super().__init__(awaits_outputs=awaits_outputs, decode_interval=1)
        self._most = num_speculative_tokens
        self._proposed: dict[Request, int] = {}
        self._scheduled = ScheduledDrafts({}, set())

    def begin_call(self) -> None:
        super().begin_call()
        self._scheduled = ScheduledDrafts({}, set())

    # -- before a request is scheduled ----------------------------------------

    def num_missing_tokens(self, request: Request) -> int:
        num_missing = super().num_missing_tokens(request)
        return num_missing and num_missing + self._proposed.get(request, 0)

    def propose(self, request: Request, num_tokens: int) -> None:
        """Take drafts for a request's next step, in place of those it has."""
        self._proposed[request] = num_tokens

    # -- what happens to it ---------------------------------------------------

    def scheduled(self, request: Request, num_tokens: int) -> bool:
        num_known = request.num_tokens + self.num_placeholders(request)
        num_drafts = max(request.num_computed_tokens - num_known, 0)
        num_proposed = self._proposed.pop(request, 0)
        brings_output = super().scheduled(request, num_tokens)
        if num_drafts:
            self._scheduled.num_tokens[request] = num_drafts
            if not num_proposed:
                self._scheduled.padding.add(request)
        if brings_output and self._awaits_outputs:
            self._flights[request].num_placeholders += num_drafts
            self._proposed[request] = self._most
        return brings_output

    def take_scheduled(self) -> ScheduledDrafts:
        """Return the drafts of the call."""
        return self._scheduled

    def preempted(self, request: Request) -> None:
        super().preempted(request)
        self._proposed.pop(request, None)

    def ended(self, request: Request) -> None:
        super().ended(request)
        self._proposed.pop(request, None)

    # -- when a step is processed ---------------------------------------------

    def deliver(self, output: SchedulerOutput) -> Delivery:
        delivery = super().deliver(output)
        if not self._awaits_outputs:
            self._delivered = delivery.requests.copy()
            return delivery
        assert output.drafts is not None
        for request in self._delivered:
            num_drafts = output.drafts.num_tokens.get(request, 0)
            self._flights[request].num_placeholders -= num_drafts
        return delivery
