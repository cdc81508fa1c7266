"""Proofs that several schedulers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import require
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def check_queues(
    running: Collection[Request], waiting: Iterable[Request], max_num_seqs: int
) -> None:
    """Prove that requests stand where their status says, and once."""
    require(
        len(running) <= max_num_seqs,
        f"{len(running)} requests run, max_num_seqs is {max_num_seqs}",
    )
    for request in running:
        require(
            request.status is RequestStatus.RUNNING,
            f"request {request.request_id} runs as {request.status.value}",
        )
    for request in waiting:
        require(
            request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and request.num_computed_tokens == 0,
            f"request {request.request_id} waits as {request.status.value} with "
            f"{request.num_computed_tokens} computed tokens",
        )
    ids = [request.request_id for request in (*running, *waiting)]
    require(len(set(ids)) == len(ids), "a request stands twice in the queues")
