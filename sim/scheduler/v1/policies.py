"""How an admission rule is asked about the head of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.errors import SchedulerError
from sim.scheduler.views import (
    EngineView,
    RequestView,
    RunningRequest,
    WaitingRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sim.scheduler.admission.base import AdmissionRule
    from sim.scheduler.request import Request
    from sim.scheduler.views import Holdings, RunningColumns


class AdmissionDesk:
    """Asks an admission rule, and tells it of the requests that end.

    Parameters
    ----------
    rule
        Decides.
    holdings
        What the cache knows of running requests.
    num_gpu_blocks, block_size
        Of the pool.
    columns
        Returns all running requests at once, where that is quicker than one by one.
    """

    def __init__(
        self,
        rule: AdmissionRule,
        holdings: Holdings,
        num_gpu_blocks: int,
        block_size: int,
        columns: Callable[[], RunningColumns] | None,
    ) -> None:
        self._rule = rule
        self._holdings = holdings
        self._num_gpu_blocks = num_gpu_blocks
        self._block_size = block_size
        self._columns = columns
        self._finished = getattr(rule, "finished", None)

    def admits(
        self,
        head: WaitingRequest,
        num_available_blocks: int,
        running: Iterable[Request],
    ) -> bool:
        """Return what the rule says of a request that the engine's own would admit.

        Parameters
        ----------
        head
            The head of the queue.
        num_available_blocks
            Free blocks, less those that the engine's own watermark keeps back.
        running
            The requests that run.

        Raises
        ------
        SchedulerError
            If the rule says neither yes nor no.
        """
        holdings = self._holdings
        engine = EngineView(
            num_gpu_blocks=self._num_gpu_blocks,
            block_size=self._block_size,
            num_available_blocks=num_available_blocks,
            running=lambda: [RunningRequest(each, holdings) for each in running],
            columns=self._columns,
        )
        answer = self._rule.admits(head, engine)
        if answer not in (True, False):
            raise SchedulerError(
                f"admission: admits must return True or False, got "
                f"{str(answer)[:60]}; mend {type(self._rule).__name__}"
            )
        return bool(answer)

    def finished(self, requests: Iterable[Request]) -> None:
        """Tell the rule of requests that have ended, if it wants to know."""
        if self._finished is not None:
            for request in requests:
                self._finished(RequestView(request))
