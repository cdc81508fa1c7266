"""Victim policies, which choose the request to preempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import RunningRequest


@runtime_checkable
class VictimPolicy(Protocol):
    """Chooses the request to preempt.

    Two attributes of the class may say more:

    * ``reason``, for the record of each preemption;
    * ``always_spares_one``: whether there is always a running request that it would
      never choose as long as others run, the same one in all calls until it ends. That
      one gets on, so none has to be protected; see `sim.scheduler.victims.choice`.
    """

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return one of `running`, which is not empty.

        Called again, with the others, until the blocks suffice.

        Parameters
        ----------
        running
            Requests that may be preempted, in the engine's running order.
        needs
            The request that found no block. It may be chosen where it is one of
            `running`; it then waits itself.
        """
        ...
