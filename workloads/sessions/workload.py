"""Sessions: conversations and agents, whose requests wait for one another.

A kind of session is one method, `SessionKind.requests`: arrival times in, requests out.
When sessions begin is an arrival process as for single requests; when a turn is sent
follows, in the simulation, from the end of the turn before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads._checks import check_role, positive
from workloads.arrivals import (
    MAX_REQUESTS,
    ArrivalProcess,
    arrival_times_s,
    check_stop,
)
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError
from workloads.requests.chains import gathered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from workloads.spec import RequestSpec


@runtime_checkable
class SessionKind(Protocol):
    """A kind of sessions: it makes the requests of each."""

    def requests(
        self, arrivals_s: Sequence[float], streams: Streams
    ) -> Iterable[RequestSpec]:
        """Yield the requests of one session for each arrival.

        Parameters
        ----------
        arrivals_s
            When sessions begin, in seconds, never falling.
        streams
            The only randomness to use, under names that begin with ``sessions``.

        Yields
        ------
        RequestSpec
            In any order, each with an id of its own; `previous_id` is a smaller one.
            `session_id` is the position in `arrivals_s`. The arrival of a follow-up
            does not matter: it is computed anew.
        """


@dataclass(frozen=True, slots=True)
class SessionWorkload:
    """Sessions of one kind that begin at the times of an arrival process.

    Parameters
    ----------
    sessions
        Kind of the sessions.
    arrivals
        When sessions begin.
    num_sessions
        How many sessions; or
    duration_s
        those that begin before this time, in seconds after scaling. Give exactly one.
    rate_scale
        Times at which sessions begin are divided by it; think times stay.
    seed
        Seed of all random streams.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, or not exactly one of
        ``num_sessions`` and ``duration_s`` is given.
    """

    sessions: SessionKind
    arrivals: ArrivalProcess
    num_sessions: int | None = None
    duration_s: float | None = None
    rate_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        method = "requests(self, arrivals_s, streams)"
        check_role("sessions", self.sessions, SessionKind, method)
        check_role("arrivals", self.arrivals, ArrivalProcess, "times_s(self, rng)")
        check_stop(self.num_sessions, self.duration_s, "sessions")
        remedy = "give a factor, such as 2.0 for twice the sessions"
        positive("rate_scale", self.rate_scale, remedy)
        Streams(self.seed)

    def requests(self) -> Sequence[RequestSpec]:
        streams = Streams(self.seed)
        arrivals_s = arrival_times_s(
            self.arrivals,
            streams.generator("arrivals"),
            self.num_sessions,
            self.duration_s,
            self.rate_scale,
        )
        requests = gathered(self._checked(arrivals_s, streams))
        if not len(requests):
            raise WorkloadError(
                f"{type(self.sessions).__name__}.requests must yield requests; got "
                "none; mend it"
            )
        return requests

    def _checked(
        self, arrivals_s: Sequence[float], streams: Streams
    ) -> Iterator[RequestSpec]:
        """Yield the requests of the sessions, not kept here."""
        for number, request in enumerate(
            self.sessions.requests(arrivals_s, streams), start=1
        ):
            _check_request(self.sessions, request, len(arrivals_s))
            if number > MAX_REQUESTS:
                raise WorkloadError(
                    f"a workload may hold {MAX_REQUESTS} requests; these "
                    f"{len(arrivals_s)} sessions have more; lower their number"
                )
            yield request


def _check_request(kind: SessionKind, request: RequestSpec, num_sessions: int) -> None:
    """Hold a kind of session to its contract, as far as `gathered` does not."""
    if request.previous_id is None and not 0 <= request.arrival_s < math.inf:
        problem = f"finite arrivals from 0; got {request.arrival_s!r} s"
    elif request.num_output_tokens < 1 or request.num_prompt_tokens < 1:
        problem = "prompts and outputs of at least 1 token; got "
        problem += f"{request.num_prompt_tokens} and {request.num_output_tokens}"
    elif not 0 <= (request.session_id or 0) < num_sessions:
        problem = f"session_id from 0 to {num_sessions - 1}; got {request.session_id}"
    else:
        return
    raise WorkloadError(
        f"{type(kind).__name__}.requests must yield {problem}, request "
        f"{request.request_id}; mend it"
    )
