"""Engines that compute prompts for others, or read them from others, on the clock."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from sim.costs.pricing import batch_total_of
from sim.engine.beside import ReportedSteps, joined_reports, nothing
from sim.scheduler.v1.connectors.base import StepPulls, TransferReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.costs.base import CostModel, StepCost
    from sim.fleet.network import Flow, Network
    from sim.results.fleet.pulls import PullLog
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import Pull
    from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler


class BlockSizes(NamedTuple):
    """A block of one KV cache group, as a transfer moves it.

    Attributes
    ----------
    num_tokens
        That it holds.
    num_bytes
        Over all GPUs of an engine.
    num_descriptors
        Pieces on each GPU, which are asked for one by one.
    """

    num_tokens: int
    num_bytes: float
    num_descriptors: int


class Lot(NamedTuple):
    """Blocks that a transfer moves, of all groups.

    Attributes
    ----------
    num_blocks, num_tokens
        Blocks, and tokens of the group that has the most.
    num_bytes
        Over all GPUs of an engine.
    num_descriptors
        On each GPU.
    """

    num_blocks: int
    num_tokens: int
    num_bytes: float
    num_descriptors: int


_ROUNDING_S: Final = 1e-6
"""More than what rounding may add to a sum of times."""

NOTHING_MOVED: Final = Lot(0, 0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class PullRules:
    """Sizes and fixed times of a pull, beside its share of the links.

    Parameters
    ----------
    sizes
        Of a block, by group.
    latency_s, descriptor_s
        Before the first byte: of a pull, and of each of its descriptors.
    handshake_s
        Of the first pull between two engines.
    """

    sizes: tuple[BlockSizes, ...]
    latency_s: float = 0.0
    descriptor_s: float = 0.0
    handshake_s: float = 0.0

    def lot(self, num_blocks: Sequence[int]) -> Lot:
        """Return so many blocks of each group; nothing at all is none of any."""
        moved = list(zip(num_blocks, self.sizes, strict=bool(num_blocks)))
        return Lot(
            sum(number for number, _ in moved),
            max((number * size.num_tokens for number, size in moved), default=0),
            sum(number * size.num_bytes for number, size in moved),
            sum(number * size.num_descriptors for number, size in moved),
        )

    def fixed_s(self, lot: Lot, *, is_first: bool) -> float:
        """Return the seconds before the first byte."""
        descriptors_s = self.descriptor_s * lot.num_descriptors
        return self.latency_s + descriptors_s + self.handshake_s * is_first


class PairSteps(ReportedSteps):
    """Steps of an engine of a pair; what has ended is reported with a step's output.

    ::

        step is formed   what is reported with the outputs of those before that have
                         ended; then the batch, and the pulls that it asks for begin
        just then        the workers look what has ended since they looked last
        its output       ... and it is reported

    Workers do that when they launch a step, on the host: also where the GPU has one
    in flight.

    Parameters
    ----------
    scheduler
        Says what is read and held, and is told what has ended.
    cost_model
        Prices the batch; transfers do not slow it.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/worker/kv_connector_model_runner_mixin.py``.
    """

    def __init__(self, scheduler: ConnectorScheduler, cost_model: CostModel) -> None:
        super().__init__(scheduler)
        self._cost_model = cost_model
        self._batch_total = batch_total_of(cost_model)
        self.is_dead = False
        self.on_free: Callable[[], object] = nothing
        self._batches: Any = None  # in flight, where there may be several
        self._polled = deque[TransferReport]()  # by steps, the oldest first

    def join(self, batches: Any) -> None:
        self._batches = batches

    @property
    def has_news(self) -> bool:
        return any(polled.moved for polled in self._polled)

    @property
    def asks(self) -> bool:
        return False

    @property
    def awaits(self) -> bool:
        scheduler = self.scheduler
        return scheduler.num_waiting > 0 and scheduler.awaits_transfers

    @property
    def holds(self) -> bool:
        """Whether it keeps blocks for another engine; `on_free` tells the end."""
        return False

    def begin(self, now_s: float) -> None:
        self._begin(now_s)
        self._polled.append(self._poll(now_s))

    def step(self, shape: BatchShape) -> StepCost:
        return self._cost_model.step(shape)

    def batch_total(self, *shape: int) -> float:
        return self._batch_total(*cast("Any", shape))

    @property
    def will_report(self) -> bool:
        """Whether something has ended that was not reported yet."""
        return self.has_news or self._has_ended()

    def quiet_until_s(self) -> float:
        """Return from when on calls may do something by themselves, in seconds."""
        return inf

    def quiet_steps(self, most: int) -> int:
        return 0 if self.will_report else self.scheduler.quiet_steps(most)

    def taken(self, now_s: float) -> TransferReport | None:
        return self._taken(
            now_s, 0 if self._batches is None else self._batches.num_steps
        )

    def _taken(self, now_s: float, num_in_flight: int) -> TransferReport | None:
        """Take what was seen when steps were launched, but for those in flight."""
        taken: TransferReport | None = None
        while len(self._polled) > num_in_flight:
            polled = self._polled.popleft()
            if polled.moved:
                self._note(polled, now_s)
                taken = joined_reports(taken, polled)
        return taken

    def rest(self, now_s: float) -> None:
        if not self.scheduler.num_waiting:  # it looks again and again
            super().rest(now_s)

    def begin_to_rest(self, now_s: float) -> None:
        self._begin(now_s)

    def rested(self, now_s: float) -> TransferReport | None:
        self._polled.append(self._poll(now_s))
        return self._taken(now_s, 0)

    def _note(self, polled: TransferReport, now_s: float) -> None:
        """Take note of what is reported."""

    def note_told(self, report: TransferReport | None) -> None:
        """Take note that the scheduler was told of it."""

    @abstractmethod
    def _begin(self, now_s: float) -> None:
        """Do as `begin`, without a look at what has ended."""

    @abstractmethod
    def _poll(self, now_s: float) -> TransferReport:
        """Return the transfers that the workers see ended."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether the workers will see something."""


class ProducerSteps(PairSteps):
    """Steps of an engine that computes prompts, and holds them until they are read.

    Parameters
    ----------
    scheduler, cost_model
        See `PairSteps`.
    place
        Of the engine.
    lease_s
        How long blocks are held that no consumer asks for.
    log
        Told of leases that ended.

    Attributes
    ----------
    leases
        When the blocks of a prompt are given up, in seconds, in order of finishing.
    """

    def __init__(
        self,
        scheduler: ConnectorScheduler,
        cost_model: CostModel,
        place: int,
        lease_s: float,
        log: PullLog,
    ) -> None:
        super().__init__(scheduler, cost_model)
        self.place = place
        self.leases: dict[Request, float] = {}
        self._lease_s = lease_s
        self._log = log
        self._read: set[Request] = set()

    @property
    def holds(self) -> bool:
        return bool(self.scheduler.connector.pairing.held)

    def told(self, prompt: Request) -> None:
        """Hear that a prompt has been read, or is not wanted."""
        if not self.is_dead and prompt in self.scheduler.connector.pairing.held:
            self._read.add(prompt)
            self.wake()

    def extend(self, prompt: Request, now_s: float) -> None:
        """Hear that a prompt is wanted still."""
        if prompt in self.leases:
            until_s = now_s + 2 / 3 * self._lease_s
            self.leases[prompt] = max(self.leases[prompt], until_s)

    def wake_s(self, now_s: float) -> float:
        return max(min(self.leases.values(), default=inf), now_s)

    def tell(self, report: TransferReport | None) -> None:
        super().tell(report)
        self.note_told(report)

    def note_told(self, report: TransferReport | None) -> None:
        if report is not None and report.moved and not self.holds:
            self.on_free()

    def _has_ended(self) -> bool:
        return bool(self._read)

    def _begin(self, now_s: float) -> None:
        asked = self.scheduler.transfers
        assert isinstance(asked, StepPulls)
        self.leases.update(asked.sends)

    def _poll(self, now_s: float) -> TransferReport:
        leases, read = self.leases, self._read
        if not leases or not (read or now_s >= min(leases.values())):
            return TransferReport()
        moved = [
            each for each, end_s in leases.items() if each in read or now_s >= end_s
        ]
        expired = [each for each in moved if each not in read]
        for each in moved:
            del leases[each]
        read.difference_update(moved)
        self._log.num_expired += len(expired)
        return TransferReport(moved=moved, expired=expired)


@dataclass(slots=True, eq=False)
class _Read:
    """A pull in flight."""

    request: Request
    source: ProducerSteps
    prompt: Request
    lot: Lot
    begin_s: float
    end_s: float = float("nan")
    has_failed: bool = False
    flow: Flow | None = field(default=None, repr=False)


class ConsumerSteps(PairSteps):
    """Steps of an engine that reads prompts from producers, and decodes.

    A request says in ``kv_transfer_params`` where: ``remote_engine`` are the
    `ProducerSteps`, ``remote_request`` the prompt there.

    Parameters
    ----------
    scheduler, cost_model
        See `PairSteps`.
    place
        Of the engine.
    network
        Over which it reads.
    rules
        What a pull takes besides.
    log
        Told of pulls.
    """

    def __init__(  # noqa: PLR0917 - the parts of a decoder
        self,
        scheduler: ConnectorScheduler,
        cost_model: CostModel,
        place: int,
        network: Network,
        rules: PullRules,
        log: PullLog,
    ) -> None:
        super().__init__(scheduler, cost_model)
        self.place = place
        self._network = network
        self._rules = rules
        self._log = log
        self._known: set[ProducerSteps] = set()
        self._ended: list[_Read] = []
        self._seen: dict[Request, _Read] = {}  # and not reported
        self.reads: dict[_Read, None] = {}

    @property
    def asks(self) -> bool:
        scheduler = self.scheduler
        return bool(
            scheduler.failed  # and nobody has been told
            or scheduler.connector.pairing.asks
            or any(each.has_failed for each in (*self._ended, *self._seen.values()))
        )

    def _has_ended(self) -> bool:
        return bool(self._ended)

    def quiet_until_s(self) -> float:
        next_s: float = self.scheduler.connector.pairing.next_heartbeat_s
        return next_s - _ROUNDING_S

    @property
    def will_report(self) -> bool:
        """See `PairSteps.will_report`; and whether something is said again."""
        return super().will_report or self._network.env.now >= self.quiet_until_s()

    def wake_s(self, now_s: float) -> float:
        if not self.scheduler.num_waiting or self._is_stuck():
            return inf
        return max(float(self.scheduler.connector.pairing.next_heartbeat_s), now_s)

    def _is_stuck(self) -> bool:
        """Whether even an empty pool does not hold the request that waits first.

        The release renews leases for it for ever; here they end, and with them the run.
        """
        scheduler = self.scheduler
        moves = self.reads or self._ended or self._seen or scheduler.num_running
        return not moves and scheduler.cache_usage().num_physical_blocks == 0

    def _begin(self, now_s: float) -> None:
        asked = self.scheduler.transfers
        assert isinstance(asked, StepPulls)
        for pull in asked.pulls:
            if not pull.waits:
                pull.remote_engine.told(_prompt_of(pull.request))
            else:
                self._pull(pull, now_s)
        source: ProducerSteps
        for source, requests in (asked.heartbeat or {}).items():
            for request in requests:
                source.extend(_prompt_of(request), now_s)

    def _pull(self, pull: Pull, now_s: float) -> None:
        source: ProducerSteps = pull.remote_engine
        prompt, lot = _prompt_of(pull.request), self._rules.lot(pull.num_by_group)
        read = _Read(pull.request, source, prompt, lot, now_s)
        self.reads[read] = None
        if source.is_dead:
            self._end(read, has_failed=True)
            return
        fixed_s = self._rules.fixed_s(lot, is_first=source not in self._known)
        self._known.add(source)
        read.flow = self._network.begin(
            source.place,
            self.place,
            lot.num_bytes,
            fixed_s,
            lambda: self._end(read),
        )

    def _end(self, read: _Read, *, has_failed: bool = False) -> None:
        del self.reads[read]
        read.end_s, read.has_failed = self._network.env.now, has_failed
        self._ended.append(read)
        if not has_failed:
            read.source.told(read.prompt)
        self.wake()

    def refuse(self, request: Request) -> None:
        """Let the producer hear of a prompt that was refused here."""
        self.scheduler.refuse(request)
        self.wake()

    def fail_from(self, source: PairSteps) -> None:
        """Let all pulls fail from a producer that has died."""
        for read in [each for each in self.reads if each.source is source]:
            assert read.flow is not None
            self._network.cancel(read.flow)
            self._end(read, has_failed=True)

    def die(self) -> None:
        """Give up all pulls: the engine is gone, and leases will end."""
        self.is_dead = True
        for read in self.reads:
            assert read.flow is not None
            self._network.cancel(read.flow)
        self.reads.clear()

    def _note(self, polled: TransferReport, now_s: float) -> None:
        for request in polled.moved:
            self._log.note(self._seen.pop(request), self.place, now_s)

    def _poll(self, now_s: float) -> TransferReport:
        seen, self._ended = self._ended, []
        self._seen |= {each.request: each for each in seen}
        return TransferReport(
            moved=[each.request for each in seen],
            failed=[each.request for each in seen if each.has_failed],
        )


def _prompt_of(request: Request) -> Request:
    """Return the request of a prompt at the producer that computed it."""
    parameters: Any = request.kv_transfer_params
    prompt: Request = parameters["remote_request"]
    return prompt
