"""The copies between engines of a decision workload, with durations in steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sim.scheduler.v1.connectors.base import TransferReport
from sim.scheduler.v1.connectors.settings import KVRole, KVTransferSettings
from sim.studies.conformance.fields import Count, Pair, Positive, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import Pull, StepPulls

Chooses = Literal["round_robin", "random", "least_requests", "power_of_two"]
"""A router that knows the requests it has sent, and nothing else."""

ROLES = {"prefill": KVRole.PRODUCER, "decode": KVRole.CONSUMER}
"""Of the engines of a pair, by their names in a workload."""


class PairSide(Table):
    """The configuration of an engine of a pair; a step stands for a second."""

    kv_role: Literal["kv_producer", "kv_consumer"]
    kv_lease_duration: Positive = 30
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    asks_tier_first: bool = False

    def settings(self) -> KVTransferSettings:
        """Return the settings that schedulers take."""
        return KVTransferSettings(
            KVRole(self.kv_role),
            self.kv_lease_duration,
            self.kv_load_failure_policy,
            self.asks_tier_first,
        )


class PairPace(Table):
    """The way of requests between engines that prefill and engines that decode.

    `router` chooses among prefillers when a request arrives, and `decode_router` among
    decoders when it gets there, or before its prefiller.
    `pull` is how long a pull takes, in steps: so many, and one more for so many blocks.
    Requests in `lost` never reach a decoder, and pulls in `fail_pulls`, counted from 0
    at each decoder, bring nothing. With `asks_tier_first` an engine that has a CPU tier
    loads what that has, and pulls where it has nothing; without it, it pulls.
    """

    kv_lease_duration: Positive = 30
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    router: Chooses = "round_robin"
    decode_router: Chooses = "round_robin"
    order: Literal["prefill_first", "decode_first"] = "prefill_first"
    route_delay: Count = 0
    pull: Pair = (0, 0)
    lost: list[str] = Field(default_factory=list)
    fail_pulls: list[Count] = Field(default_factory=list)
    asks_tier_first: bool = False

    def side(self, name: str) -> PairSide:
        """Return the configuration of the engine of that name."""
        return PairSide(
            kv_role=ROLES[name].value,
            kv_lease_duration=self.kv_lease_duration,
            kv_load_failure_policy=self.kv_load_failure_policy,
            asks_tier_first=self.asks_tier_first,
        )


@dataclass(slots=True)
class Messages:
    """Messages of consumers to a producer since its last step, by request id.

    Attributes
    ----------
    read
        Requests whose blocks may go.
    wanted
        Requests whose leases are to be extended.
    """

    read: set[int] = field(default_factory=set)
    wanted: set[int] = field(default_factory=set)


class ProducerWorker:
    """Holds blocks until they have been read, or until their lease ends."""

    def __init__(self, pace: PairPace, messages: Messages) -> None:
        self._extension = pace.kv_lease_duration * 2 // 3
        self._messages = messages
        self._expiries: dict[Request, float] = {}  # in order of finishing

    def step(self, step: int, transfers: StepPulls) -> TransferReport:
        expiries, messages = self._expiries, self._messages
        expiries.update(transfers.sends)
        extended = step + self._extension
        read: list[Request] = []
        expired: list[Request] = []
        for request in list(expiries):
            if request.request_id in messages.wanted:
                expiries[request] = max(expiries[request], extended)
            is_read = request.request_id in messages.read
            if is_read or step >= expiries[request]:
                del expiries[request]
                (read if is_read else expired).append(request)
        messages.read.clear()
        messages.wanted.clear()
        return TransferReport(moved=read + expired, expired=expired)


class ConsumerWorker:
    """Reads blocks, as many requests at once as ask for it.

    Parameters
    ----------
    pace
        How long that takes.
    mail
        Messages to each producer, by the name that requests have for it.
    """

    def __init__(self, pace: PairPace, mail: Mapping[str | None, Messages]) -> None:
        self._steps, self._blocks_per_step = pace.pull
        self._failing = set(pace.fail_pulls)
        self._mail = mail
        self._num_pulls = 0
        self._pulling: list[tuple[int, int, Pull]] = []  # by end and number

    def step(self, step: int, transfers: StepPulls) -> TransferReport:
        for pull in transfers.pulls:
            if pull.waits:
                self._begin(pull, step)
            else:
                self._let_go(pull)
        for source, requests in (transfers.heartbeat or {}).items():
            self._mail[source].wanted.update(each.request_id for each in requests)
        moved, failed = [], []
        while self._pulling and self._pulling[0][0] <= step:
            _, number, pull = heappop(self._pulling)
            moved.append(pull.request)
            if number in self._failing:
                failed.append(pull.request)
            else:
                self._let_go(pull)
        return TransferReport(moved=moved, failed=failed)

    def _let_go(self, pull: Pull) -> None:
        """Tell the producer that the blocks of a request may go."""
        self._mail[pull.remote_engine].read.add(pull.request.request_id)

    def _begin(self, pull: Pull, step: int) -> None:
        size = self._blocks_per_step
        end = step + self._steps + (sum(pull.num_by_group) // size if size else 0)
        heappush(self._pulling, (end, self._num_pulls, pull))
        self._num_pulls += 1
