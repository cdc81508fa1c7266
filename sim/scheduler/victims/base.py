"""What a victim policy is: who loses its blocks when a running request needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import RunningRequest


@runtime_checkable
class VictimPolicy(Protocol):
    """Chooses who is preempted.

    Two attributes of the class may say more:

    * ``reason``, for the record of each preemption;
    * ``always_spares_one``: whether there is always a running request that it would
      never choose as long as others run, the same one in all calls until it ends. That
      one gets on, so nobody has to be protected; see `sim.scheduler.victims.choice`.
    """

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return one of `running`, which is not empty.

        Called again, with the others, until the blocks suffice.

        Parameters
        ----------
        running
            Who may be preempted, in the engine's running order.
        needs
            Who found no block. It may be chosen where it is one of `running`; it then
            waits itself.
        """
        ...
