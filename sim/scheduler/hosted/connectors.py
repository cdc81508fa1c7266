"""The scheduler of an installed vLLM with one of its KV connectors.

Scheduler and connector are theirs, unmodified; what the workers report is handed in.
Some of their methods are listened to, which tells look-ups in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sim.errors import SchedulerError
from sim.scheduler.hosted.batch_queue import QueuedVllmScheduler
from sim.scheduler.hosted.multi import HostedMultiConnector
from sim.scheduler.hosted.offloading import HostedTierConnector
from sim.scheduler.hosted.pulling import HostedPairConnector
from sim.scheduler.hosted.scheduler import VllmScheduler, request_key
from sim.scheduler.hosted.speculative import SpeculativeVllmScheduler
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.connectors.heads import Look
from sim.scheduler.v1.dialect import LAST_MINOR, dialect_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.hosted.engine import HostedStep
    from sim.scheduler.hosted.scheduler import HostedSettings
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.connectors.base import (
        StepPulls,
        StepTransfers,
        TransferReport,
    )


class OrderedIds(dict[str, None]):
    """Stands for a set of theirs that is walked: in the order of adding."""

    def add(self, key: str) -> None:
        self[key] = None


class HostedConnector(Protocol):
    """A connector of the installed release: its transfers, and the replies to them.

    Its constructor takes the engine, the settings, and all requests by their ids.
    """

    def begin(self, now_s: float) -> StepTransfers | StepPulls:
        """Begin a call; return what is noted in the course of it."""
        ...

    def asked(self, step: HostedStep) -> None:
        """Note the transfers that a call asks for."""
        ...

    def parameters(self, request: Request) -> Mapping[str, Any] | None:
        """Return the parameters that a client would have given their connector."""
        ...

    def reported(
        self, report: TransferReport, now_s: float
    ) -> tuple[Any, list[Request]]:
        """Return a report as theirs, and the requests that waited for a load."""
        ...

    @property
    def awaits_transfers(self) -> bool:
        """Whether jobs in flight will change what can be scheduled."""
        ...


class HostedQueues:
    """Their queues of requests that do not run."""

    def __init__(self, holding: list[Request], fresh: list[Request]) -> None:
        self.holding, self.fresh = holding, fresh

    def __len__(self) -> int:
        return len(self.holding) + len(self.fresh)

    def __iter__(self) -> Iterator[Request]:
        yield from self.holding
        yield from self.fresh


class ConnectedVllmScheduler(VllmScheduler):
    """`VllmScheduler` with a KV connector: a CPU tier, one side of a pair, or both.

    See `sim.scheduler.v1.connectors.scheduler.ConnectorScheduler` for what that is, and
    for the attributes.
    """

    def __init__(self, settings: HostedSettings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        dialect = dialect_of(settings.engine_version)
        if not dialect.knows_offloading:
            raise SchedulerError(
                f"KV connectors are hosted of 0.{LAST_MINOR} only, got "
                f"{dialect.release}; host another release, or leave the CPU tier or "
                f"the pair out"
            )
        self._all: dict[str, Request] = {}
        kind: Any = HostedMultiConnector
        if settings.kv_transfer is None:
            kind = HostedTierConnector
        elif settings.offload is None:
            kind = HostedPairConnector
        self.connector: HostedConnector = kind(self.engine, settings, self._all)
        self.transfers = self.connector.begin(0.0)
        self.looks: list[Look] = []
        self.received: list[Request] = []
        self.failed: list[Request] = []
        self.now_s = 0.0
        self._finished: Sequence[Request] = ()
        self._listen()
        self.engine.scheduler.finished_req_ids = OrderedIds()

    def _listen(self) -> None:
        theirs = self.engine.api.attribute(self.engine.scheduler, "connector")
        look_up = self.engine.api.attribute(theirs, "get_num_new_matched_tokens")

        def look_up_and_note(request: Any, num_local: int) -> Any:
            found = look_up(request, num_local)
            ours = self._all[request.request_id]
            self.looks.append(Look(ours, num_local, found[0]))
            return found

        theirs.get_num_new_matched_tokens = look_up_and_note

    # -- queues ---------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        self._all[request_key(request)] = request
        super().add_request(request)
        num_tokens = self.engine.num_tokens(request_key(request))[0]
        if num_tokens < request.num_prompt_tokens:  # theirs drops the last one
            request.end_after_prefill_of(num_tokens)

    def _parameters(self, request: Request) -> Mapping[str, Any] | None:
        return self.connector.parameters(request)

    @property
    def waiting(self) -> HostedQueues:  # type: ignore[override]
        scheduler = self.engine.scheduler
        return HostedQueues(
            [self._all[each.request_id] for each in scheduler.kv_holding_waiting],
            [self._all[each.request_id] for each in scheduler.waiting],
        )

    @property
    def delayed(self) -> list[Request]:
        """Requests that have ended and still hold blocks."""
        requests = self.engine.scheduler.requests
        return [self._all[key] for key, each in requests.items() if each.is_finished()]

    @property
    def has_finish_notice(self) -> bool:
        """Whether the engine must step, whatever the queues hold."""
        return bool(self.engine.scheduler.has_requests())

    @property
    def awaits_transfers(self) -> bool:
        """Whether jobs in flight will change what can be scheduled."""
        notices = self.engine.scheduler.finished_req_ids
        return bool(self.connector.awaits_transfers or notices)

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        self.now_s = now_s
        self.looks = []
        self.transfers = self.connector.begin(now_s)
        output = super().schedule(now_s)
        self.engine.scheduler.finished_req_ids = OrderedIds()
        assert self._step is not None
        self.connector.asked(self._step)
        output.ignored, self.failed = self.failed, []
        return output

    def offered(self, request: Request) -> tuple[list[int], ...]:
        """Return the blocks of a prompt that a producer holds for others, by group."""
        return self.connector.offered(request)  # type: ignore[attr-defined, no-any-return]

    def update(self, finished: Sequence[Request]) -> None:
        self._finished = finished  # handed on with what the workers report

    def receive(self, report: TransferReport) -> None:
        """Hand on the output of a step, and what the workers report with it."""
        ended_s = [request.finish_s for request in self._finished]
        now_s = max([self.now_s, *ended_s])
        theirs, self.received = self.connector.reported(report, now_s)
        self.engine.kv_connector_output = theirs
        holding = self.waiting.holding
        super().update(self._finished)
        self.failed = [
            request
            for request in holding
            if not self.engine.holds(request_key(request))
        ]
        for request in self.failed:
            request.move_to(RequestStatus.WAITING_FOR_REMOTE_KVS)  # unseen until now
            request.move_to(RequestStatus.FINISHED_ERROR)
            del self._requests[request_key(request)]

    def check(self) -> None:
        """Prove nothing: blocks are held in queues, too, and theirs are theirs."""


class QueuedConnectedVllmScheduler(ConnectedVllmScheduler, QueuedVllmScheduler):
    """`ConnectedVllmScheduler` behind an engine core's queue of batches."""


class SpeculativeConnectedVllmScheduler(
    QueuedConnectedVllmScheduler, SpeculativeVllmScheduler
):
    """`ConnectedVllmScheduler` whose steps verify drafts."""
