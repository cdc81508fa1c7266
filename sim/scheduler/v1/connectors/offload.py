"""The offloading connector's record of a request: chunks, jobs and blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.tiers import RequestAccess
from cache.tiers.places import NO_KEYS

if TYPE_CHECKING:
    from cache.tiers.access import SessionHint
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import TransferJob


class Offload:
    """Record of a request, from its first look-up until its last job has ended.

    Attributes
    ----------
    request, access
        It, and what the tier knows of it.
    runs, keys
        Identity of its full blocks; and of its leading whole chunks.
    next_chunk
        The first one that was not stored, loaded or passed over.
    most_tokens
        Leading tokens that may be stored.
    num_local_tokens
        The local hit of its latest look-up.
    loads_in_step
        Whether what that look-up found is to be loaded into its own batch.
    jobs
        In flight.
    has_ended
        Whether it has left the engine.
    """

    __slots__ = (
        "access",
        "has_ended",
        "jobs",
        "keys",
        "loads_in_step",
        "most_tokens",
        "next_chunk",
        "num_local_tokens",
        "request",
        "runs",
    )

    def __init__(
        self,
        request: Request,
        most_tokens: int,
        block_size: int,
        session: SessionHint | None = None,
    ) -> None:
        self.request = request
        self.access = RequestAccess(request.request_id, session)
        self.runs = request.tokens.block_runs(block_size)
        self.keys = NO_KEYS
        self.next_chunk = 0
        self.most_tokens = most_tokens
        self.num_local_tokens = 0
        self.loads_in_step = False
        self.jobs: dict[int, TransferJob] = {}
        self.has_ended = False


def limit_of(request: Request, name: str) -> int | None:
    """Return a limit that came with the request, or None."""
    parameters = request.kv_transfer_params
    return None if parameters is None else parameters.get(name)
