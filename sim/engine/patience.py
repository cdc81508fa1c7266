"""Clients that do not wait for ever: timeouts, and requests that are sent again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sim.engine.clock import ARRIVAL_PRIORITY, At

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import simpy

    from sim.engine.clients import Client, Server
    from sim.engine.requests import RequestFactory
    from sim.scheduler.request import Request
    from workloads.spec import RequestSpec

TIMED_OUT: Final = "the client timed out"
"""Reason of a request that its client gave up."""
MAX_RETRY_DELAY_S: Final = 8.0
"""Most seconds between two tries. Source: openai-python ``_constants.py``."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long clients wait for an answer, and how often they ask again.

    Parameters
    ----------
    timeout_s
        Seconds from sending a request until its answer must be complete.
    max_retries
        Tries after the first.
    retry_delay_s
        Seconds between a timeout and the second try; doubled before each further one,
        up to `MAX_RETRY_DELAY_S` or itself.
    """

    timeout_s: float
    max_retries: int = 0
    retry_delay_s: float = 0.5

    def delay_s(self, num_tries: int) -> float:
        """Return the seconds to wait after so many tries."""
        most_s = max(MAX_RETRY_DELAY_S, self.retry_delay_s)
        return float(min(self.retry_delay_s * 2.0 ** (num_tries - 1), most_s))


class _Sent:
    """A server that notes what is handed to it."""

    def __init__(self, server: Server) -> None:
        self.env = server.env
        self.server = server
        self.requests: list[Request] = []

    @property
    def stop_requested(self) -> bool:
        return self.server.stop_requested

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.server.submit(request)

    def abort(self, request: Request, reason: str) -> None:
        self.server.abort(request, reason)

    def close_arrivals(self) -> None:
        self.server.close_arrivals()


class PatientClient:
    """Withdraws what was not answered in time, and asks again.

    A request of the workload with samples or beams times out as one: all that was sent
    for it is withdrawn. Each try is a request of its own, with the same prompt.

    Attributes
    ----------
    num_timeouts
        Tries that were given up.
    num_given_up
        Requests of the workload whose last try was.
    num_retried
        Requests of the engine that are of a second try or a later one.
    """

    def __init__(self, client: Client, patience: Patience) -> None:
        self.client = client
        self.factory: RequestFactory = client.factory
        self.patience = patience
        self.num_timeouts = 0
        self.num_given_up = 0
        self.num_retried = 0

    def submit(self, engine: Server, spec: RequestSpec) -> simpy.Process:
        return engine.env.process(self.ask(engine, spec))

    def ask(
        self, engine: Server, spec: RequestSpec
    ) -> Generator[simpy.Event, Any, bool]:
        """See `Client.ask`: of a request that was given up, False."""
        env, patience, num_tries = engine.env, self.patience, 0
        while True:
            sent = _Sent(engine)
            asked = spec._replace(arrival_s=env.now)
            answer = env.process(self.client.ask(sent, asked))
            yield answer | At(env, env.now + patience.timeout_s, ARRIVAL_PRIORITY)
            if answer.triggered:
                self._note(sent, num_tries)
                return bool(answer.value)
            for request in sent.requests:
                engine.abort(request, TIMED_OUT)
            self.num_timeouts += 1
            yield answer  # the engine withdraws between two steps
            self._note(sent, num_tries)
            num_tries += 1
            if num_tries > patience.max_retries or engine.stop_requested:
                self.num_given_up += 1
                return False
            delay_s = patience.delay_s(num_tries)
            yield At(env, env.now + delay_s, ARRIVAL_PRIORITY)

    def _note(self, sent: _Sent, num_tries: int) -> None:
        if num_tries:
            self.num_retried += len(sent.requests)

    def num_requests(self, specs: Sequence[RequestSpec]) -> int:
        """Return how many requests the engine will see, were none sent again."""
        return self.client.num_requests(specs)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of requests whose clients waited too long."""
        return {
            "clients": {
                "timeout_s": self.patience.timeout_s,
                "max_retries": self.patience.max_retries,
                "num_timeouts": self.num_timeouts,
                "num_retried": self.num_retried,
                "num_given_up": self.num_given_up,
            }
        }
