"""Tokens that are scheduled before the output of the step ahead of them is known.

The engine core keeps a queue of batches: with asynchronous scheduling it forms a step
while the one before runs, with pipeline parallelism one for each stage. So a request
may have tokens in flight when it is looked at again::

    known tokens          | prompt and outputs that were processed            |
    computed tokens       | known ... in flight: counted from the call on     |
    placeholders          outputs that steps in flight will bring (asynchronous only)
    stale tokens          in flight since before a preemption
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request


class Flight:
    """Tokens in flight of one request; see the head of this file.

    Attributes
    ----------
    num_tokens, num_stale_tokens, num_placeholders
        Scheduled and not processed, those of them from before a preemption, and outputs
        awaited.
    is_chunk
        Whether its latest tokens were a part of its prompt with more to come.
    eligible_call
        The first call in which it may decode again.
    """

    __slots__ = (
        "eligible_call",
        "is_chunk",
        "num_placeholders",
        "num_stale_tokens",
        "num_tokens",
    )

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_stale_tokens = 0
        self.num_placeholders = 0
        self.is_chunk = False
        self.eligible_call = 0


class Delivery(NamedTuple):
    """Requests of a step by the fate of their tokens, in batch order."""

    requests: list[Request]
    """They get a token."""
    stale: list[Request]
    """They have been preempted since: a token of theirs counts all the same."""
    wasted: list[Request]
    """They have ended meanwhile: a token of theirs is dropped."""


class TokensInFlight:
    """All requests of an engine with several steps in flight.

    Parameters
    ----------
    awaits_outputs
        Asynchronous scheduling: a decode is scheduled again before its last token is
        known. Otherwise it waits for it.
    decode_interval
        Calls from one decode of a request to its next, at least.

    Attributes
    ----------
    drops_stale
        Whether outputs of before a preemption are dropped rather than delivered.
    num_wasted_tokens
        Outputs that were dropped so far, their requests having ended.
    deferred
        Requests that have been passed over in the queue since they were preempted.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py``.
    """

    def __init__(self, *, awaits_outputs: bool, decode_interval: int) -> None:
        self._awaits_outputs = awaits_outputs
        self._decode_interval = decode_interval if awaits_outputs else 0
        self._flights: dict[Request, Flight] = {}
        self._call = 0
        self._delivered: list[Request] = []
        self.drops_stale = False
        self.deferred: set[Request] = set()
        self.num_wasted_tokens = 0

    def begin_call(self) -> None:
        self._call += 1

    # -- before a request is scheduled ----------------------------------------

    def num_missing_tokens(self, request: Request) -> int:
        """Return how many tokens a running request could compute now, 0 for none."""
        num_missing = request.num_tokens - request.num_computed_tokens
        flight = self._flights.get(request)
        if flight is None:
            return num_missing
        num_awaited = flight.num_placeholders
        if num_awaited and (
            request.num_computed_tokens + 2 - num_awaited >= request.max_num_tokens
        ):
            return 0  # the step in flight brings its last token
        if self._call < flight.eligible_call:
            return 0
        return num_missing + num_awaited

    def num_placeholders(self, request: Request) -> int:
        flight = self._flights.get(request)
        return 0 if flight is None else flight.num_placeholders

    def num_processed_tokens(self, request: Request) -> int:
        """Return its computed tokens without those in flight."""
        flight = self._flights.get(request)
        num_in_flight = 0 if flight is None else flight.num_tokens
        return max(request.num_computed_tokens - num_in_flight, 0)

    def is_chunk(self, request: Request) -> bool:
        flight = self._flights.get(request)
        return flight is not None and flight.is_chunk

    def defers(self, request: Request) -> bool:
        """Whether a waiting request must first get a token of before; noted if so."""
        flight = self._flights.get(request)
        if flight is None or not flight.num_stale_tokens:
            return False
        self.deferred.add(request)
        return True

    # -- what happens to it ---------------------------------------------------

    def scheduled(self, request: Request, num_tokens: int) -> bool:
        """Note tokens of a batch, counted as computed; True if they bring an output."""
        flight = self._flights.get(request)
        if flight is None:
            flight = self._flights[request] = Flight()
        flight.num_tokens += num_tokens
        num_known = request.num_tokens + flight.num_placeholders
        flight.is_chunk = request.num_computed_tokens < num_known
        if not flight.is_chunk and self._awaits_outputs:
            flight.num_placeholders += 1
            flight.eligible_call = self._call + self._decode_interval
        return not flight.is_chunk

    def preempted(self, request: Request) -> None:
        flight = self._flights.get(request)
        if flight is not None:
            flight.num_stale_tokens = flight.num_tokens
            flight.num_placeholders = 0

    def ended(self, request: Request) -> None:
        self._flights.pop(request, None)
        self.deferred.discard(request)

    # -- when a step is processed ---------------------------------------------

    def deliver(self, output: SchedulerOutput) -> Delivery:
        """Take the oldest step out of flight; say which of its tokens count."""
        delivery = Delivery([], [], [])
        bring_output = dict.fromkeys(output.completing)
        self._delivered = []
        for request, num_tokens in zip(
            output.scheduled, output.num_scheduled_tokens, strict=True
        ):
            flight = self._flights.get(request)
            if flight is None:
                if request in bring_output:
                    delivery.wasted.append(request)
                    self.num_wasted_tokens += 1
                continue
            flight.num_tokens -= num_tokens
            is_stale = flight.num_stale_tokens > 0
            if is_stale:
                flight.num_stale_tokens -= num_tokens
                delivery.stale.append(request)
            if request in bring_output and not (is_stale and self.drops_stale):
                delivery.requests.append(request)
                if not is_stale and self._awaits_outputs:
                    flight.num_placeholders -= 1
                    self._delivered.append(request)
        return delivery

    def take_delivered(self) -> list[Request]:
        """Return running requests whose awaited tokens have been given them, once."""
        delivered, self._delivered = self._delivered, []
        return delivered
