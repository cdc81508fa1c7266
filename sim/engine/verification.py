"""The model's verdict on drafts: some are accepted, and one token follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sim.engine.sampling import InFlightSampler, finish, last_num_tokens

if TYPE_CHECKING:
    from sim.scheduler.base import ScheduledDrafts, SchedulerOutput
    from sim.scheduler.request import Request
    from workloads.acceptance import Acceptance


class Verified(NamedTuple):
    """The drafts of a request in a step, and how many were accepted."""

    request: Request
    num_drafts: int
    num_accepted: int


_NONE = None, 0, 0
"""Drafts of a request that had none."""


class SpeculativeSampler(InFlightSampler):
    """Lets outputs appear where steps verify drafts.

    ::

        drafts of a step       accepted ones, in a row | rejected ones
        outputs                as many                 | and one more
        what counts            outputs as far as the request's end

    Parameters
    ----------
    scheduler
        It says of each step, when it has ended, whose tokens count, and is told of
        rejected drafts and of those for the next step.
    acceptance
        Says how many drafts are accepted, and proposed.

    Attributes
    ----------
    delivery
        Of the latest step.
    num_new_tokens
        Outputs that each request of the delivery got.
    verified
        Of each request of that step that had drafts, in batch order; of those that had
        ended before, too.
    """

    def __init__(self, scheduler: Any, acceptance: Acceptance) -> None:
        super().__init__(scheduler)
        self._acceptance = acceptance
        self._num_cut: dict[Request, int] = {}  # outputs behind the end, of the last
        self.num_new_tokens: list[int] = []
        self.verified: list[Verified] = []

    def __call__(
        self, output: SchedulerOutput, step: int, end_s: float
    ) -> list[Request]:
        """Give tokens; see `sample`."""
        assert output.drafts is not None
        delivery = self.delivery = self._scheduler.deliver(output)
        self.verified = self._verify(output.drafts)
        verified = {each.request: each for each in self.verified}
        stale = set(delivery.stale)
        reject, proposes = self._scheduler.reject, not self._scheduler.proposes_ahead
        num_cut: dict[Request, int] = {}
        self.num_new_tokens = []
        finished: list[Request] = []
        for request in delivery.requests:
            _, num_drafts, num_accepted = verified.get(request, _NONE)
            num_outputs = num_accepted + 1
            last = last_num_tokens(request)
            # A prompt that fills the longest sequence, admitted unchecked, gets one.
            num_room = last - request.num_tokens
            num_new_tokens = (
                num_outputs if num_outputs <= num_room else max(num_room, 1)
            )
            if request.num_tokens == request.num_prompt_tokens:
                request.note_first_token(end_s)
            request.note_tokens(step, num_new_tokens)
            self.num_new_tokens.append(num_new_tokens)
            num_behind = num_outputs - num_new_tokens
            if num_drafts + num_behind > num_accepted and request not in stale:
                reject(request, num_drafts - num_accepted, num_behind)
            if request.num_tokens >= last:
                num_cut[request] = num_behind
                request.end_streak()
                finish(request, end_s)
                finished.append(request)
            elif proposes:
                self._propose(request)
        self._num_cut = num_cut
        return finished

    def _verify(self, drafts: ScheduledDrafts) -> list[Verified]:
        # Outputs in the order of execution, those behind its end among them.
        num_cut, padding = self._num_cut, drafts.padding
        num_accepted = self._acceptance.num_accepted
        return [
            Verified(
                request,
                num_drafts,
                0
                if request in padding
                else num_accepted(
                    request.parent_id,
                    request.num_output_tokens + num_cut.get(request, 0),
                    num_drafts,
                ),
            )
            for request, num_drafts in drafts.num_tokens.items()
        ]

    def _propose(self, request: Request) -> None:
        num_drafts = self._acceptance.num_proposed(
            request.parent_id,
            request.num_output_tokens,
            self._scheduler.num_speculative_tokens,
        )
        self._scheduler.propose(request, num_drafts)
