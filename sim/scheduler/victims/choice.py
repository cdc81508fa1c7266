"""A victim policy at work: views go in, a checked victim comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.errors import SchedulerError
from sim.scheduler.views import RunningRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request
    from sim.scheduler.victims.base import VictimPolicy
    from sim.scheduler.views import Holdings


class VictimChoice:
    """Asks a policy, and sees to it that the engine gets on (invariant 7).

    Two requests that take each other's blocks before either gets a token would go on
    for ever: prompts in mid-way where the one with most blocks goes, say. So a request
    that was preempted and has got no token since is not offered again, as long as
    others are. Where there are no others, the latest arrival goes: the earliest then
    keeps its blocks until it has a token. Policies that always spare one need none of
    this.

    Parameters
    ----------
    policy
        The policy that chooses.
    holdings
        What the cache knows of running requests.

    Attributes
    ----------
    reason
        Of its preemptions, for the record.
    """

    def __init__(self, policy: VictimPolicy, holdings: Holdings) -> None:
        self.policy = policy
        name = type(policy).__name__
        self.reason: str = getattr(
            policy, "reason", f"no free block for a running request; {name} chose"
        )
        self._protects = not getattr(policy, "always_spares_one", False)
        self._holdings = holdings
        self._num_output_tokens: dict[int, int] = {}

    def victim(self, running: Iterable[Request], needs: Request) -> Request:
        """Return the request of `running` to preempt for `needs` to get blocks."""
        candidates, noted = list(running), self._num_output_tokens
        if noted:
            offered = [
                each
                for each in candidates
                if each.request_id not in noted or not self._is_protected(each)
            ]
            if not offered:
                return max(candidates, key=_arrival)
            candidates = offered
        holdings = self._holdings
        views = [RunningRequest(each, holdings) for each in candidates]
        own = (
            views[candidates.index(needs)]
            if needs in candidates
            else RunningRequest(needs, holdings)
        )
        chosen = self.policy.choose(views, own)
        return self._checked(chosen, candidates)

    def note(self, victim: Request) -> None:
        """Take note of a preemption, before the victim loses anything."""
        if self._protects:
            num_tokens = self._holdings.num_output_tokens(victim)
            self._num_output_tokens[victim.request_id] = num_tokens

    def forget(self, request: Request) -> None:
        """Drop a request that has left."""
        self._num_output_tokens.pop(request.request_id, None)

    def _is_protected(self, request: Request) -> bool:
        """Whether a request has got no token since it was preempted."""
        last = self._num_output_tokens[request.request_id]
        return last == self._holdings.num_output_tokens(request)

    def _checked(self, chosen: object, candidates: list[Request]) -> Request:
        if isinstance(chosen, RunningRequest):
            request_id = chosen.request_id
            for request in candidates:
                if request.request_id == request_id:
                    return request
        raise SchedulerError(
            f"preemption_victim: choose must return one of the {len(candidates)} "
            f"running requests that it is given, got {str(chosen)[:60]}; mend "
            f"{type(self.policy).__name__}"
        )


def _arrival(request: Request) -> tuple[float, int]:
    return request.arrival_s, request.request_id
