"""The scheduler's side of a KV connector: its role, and the jobs of its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.tiers.extents import Hold
    from cache.tiers.places import Ints, Lot
    from sim.scheduler.request import Request


class JobKind(Enum):
    """Which way a job copies."""

    STORE = "store"
    """Out of the GPU's pool, beside later steps."""
    LOAD = "load"
    """Into blocks of a request that waits for it."""
    SYNC_LOAD = "sync_load"
    """Into blocks of a request of the batch, before the step runs."""

    __hash__ = object.__hash__  # keys of many look-ups; that of `Enum` is a call


@dataclass(slots=True, eq=False)
class TransferJob:
    """Blocks that the workers copy.

    Parameters
    ----------
    job_id
        Counted from 0, over all kinds.
    kind
        Which way.
    request
        The request of the blocks.
    first_blocks, num_by_group
        By group: place of the first of them in the request's table, and their number.
    block_ids
        On the GPU, in order, group by group.
    hold, lots
        Chunks at the other end, and those of the request's prompt.
    """

    job_id: int
    kind: JobKind
    request: Request
    first_blocks: Sequence[int]
    num_by_group: Sequence[int]
    block_ids: list[int]
    hold: Hold
    lots: Sequence[Lot]

    @property
    def chunk_ids(self) -> Ints:
        """Places at the other end."""
        return self.hold.chunk_ids


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks that a consumer reads from a producer.

    Parameters
    ----------
    request
        The request of the blocks.
    block_ids
        Its own to be filled, by group; the last so many of `remote_block_ids` are read
        into them.
    remote_block_ids
        All that the producer offers of it.
    waits
        Whether there is anything to read; if not, the producer is only told to let go.
    remote_engine
        The producer, as the request names it.
    """

    request: Request
    block_ids: tuple[list[int], ...]
    remote_block_ids: tuple[list[int], ...]
    waits: bool
    remote_engine: Any

    @property
    def num_by_group(self) -> list[int]:
        """Blocks that are read, by group; nothing where nothing is."""
        return [len(ids) for ids in self.block_ids]


@dataclass(slots=True)
class StepPulls:
    """Pulls, sends and leases that a call asks of the workers of a pair's engine.

    Attributes
    ----------
    pulls
        Of a consumer: pulls that begin.
    sends
        Of a producer: requests whose blocks it begins to hold, and until when, in
        seconds.
    heartbeat
        Of a consumer: requests whose leases are to be extended, by producer; None
        between two.
    """

    pulls: list[Pull] = field(default_factory=list)
    sends: list[tuple[Request, float]] = field(default_factory=list)
    heartbeat: dict[Any, list[Request]] | None = None


@dataclass(slots=True)
class StepTransfers(StepPulls):
    """Transfers that a call of the scheduler asks of the workers, with a tier.

    Of an engine of a pair the others stand here, too.

    Attributes
    ----------
    loads, stores
        Jobs that begin with this step.
    flush
        Jobs that must have ended before the step runs, ascending.
    refused
        Lots without room: the request, and the number of chunks.
    num_below_threshold
        Chunks that were offered too seldom to be stored.
    evicted_lots
        Chunks that made room, in the order in which they went, as columns.
    """

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    flush: list[int] = field(default_factory=list)
    refused: list[tuple[Request, int]] = field(default_factory=list)
    num_below_threshold: int = 0
    evicted_lots: list[Ints] = field(default_factory=list)

    @property
    def evicted_ids(self) -> list[int]:
        """Chunks that made room, as numbers."""
        return [chunk_id for lot in self.evicted_lots for chunk_id in lot.tolist()]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The report of the workers with the output of a step.

    Parameters
    ----------
    done
        Jobs that have ended, failed ones included, in the order of their ends.
    invalid_block_ids
        Blocks on the GPU that loads failed to fill.
    moved
        Of a pair: requests whose pulls have ended, failed ones included, or whose
        blocks are held no more.
    failed
        Requests whose pulls brought nothing.
    expired
        Those of `moved` that were not read in time.
    """

    done: Sequence[int] = ()
    invalid_block_ids: Sequence[int] = ()
    moved: Sequence[Request] = ()
    failed: Sequence[Request] = ()
    expired: Sequence[Request] = ()


class Match(NamedTuple):
    """The hit of a request in a connector, beyond the local hit.

    Attributes
    ----------
    num_tokens
        Tokens that can be loaded; None to be asked again in another call.
    is_async
        Whether the request waits for them outside of batches.
    """

    num_tokens: int | None
    is_async: bool


class BlockIds(Protocol):
    """A request's table, of which most calls need nothing."""

    def __call__(
        self, first: int = 0, stop: int | None = None, *, group: int | None = None
    ) -> list[int]:
        """Return its blocks, from one on and before another one.

        Of one group, with 0 where it has none; or of all, one after the other.
        """
        ...


def no_blocks(
    first: int = 0, stop: int | None = None, *, group: int | None = None
) -> list[int]:
    """Return the table of a request that holds nothing; see `BlockIds`."""
    del first, stop, group
    return []


class Batch(Protocol):
    """The call that a connector is asked to complete."""

    @property
    def now_s(self) -> float:
        """When it was made."""
        ...

    def preempted(self) -> Iterable[Request]:
        """Return the requests that it preempted."""
        ...

    def num_tokens_after(self, requests: Iterable[Request]) -> dict[Request, int]:
        """Return the computed tokens, after this step, of those in the batch.

        In batch order.
        """
        ...

    def new_block_ids(self) -> Iterable[list[int]]:
        """Return the blocks that requests took that ran before the call, by request."""
        ...

    def block_ids(
        self,
        request: Request,
        first: int = 0,
        stop: int | None = None,
        *,
        group: int | None = None,
    ) -> list[int]:
        """Return the table of a request; see `BlockIds`."""
        ...


class KVConnector(Protocol):
    """Where blocks may come from and go to, as the scheduler sees it.

    The calls stand in the order of a request's life. Names are vLLM's.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.
    """

    @property
    def fills_blocks(self) -> bool:
        """Whether it loads: a block must not come free while a step writes it."""
        ...

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request that ends hands its blocks on.

        Then outputs of before a preemption are dropped: it is not to end without them.
        """
        ...

    @property
    def keeps_still(self) -> bool:
        """Whether what it has of a request changes only as it stores, loads and ends.

        Then steps that are quiet need no look at a head that lacks blocks.
        """
        ...

    @property
    def offloading(self) -> Any:
        """The part of it that has a tier, or None."""
        ...

    @property
    def pairing(self) -> Any:
        """The part of it that is one side of a pair, or None."""
        ...

    def keeps_loads(self, request: Request) -> bool:
        """Return whether it has again what a request has loaded, once that was loaded.

        A prompt of one token has none computed then, and is looked up anew. A release
        would load it for ever; here it is taken as it is.
        """
        ...

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping, requests or not."""
        ...

    def on_new_request(self, request: Request) -> None:
        """Note a request that has arrived."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether steps of decodes alone ask nothing of it."""
        ...

    @property
    def ends_quietly(self) -> bool:
        """Whether that stays so when requests end, if a call without any settles it."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return its numbers for a run's summary."""
        ...

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> Match:
        """Look up the head of the queue.

        Parameters
        ----------
        request
            Holds no blocks.
        num_computed_tokens
            Its local hit.
        """
        ...

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Note the table of a request that was admitted or begins to load.

        Parameters
        ----------
        request, block_ids
            It, and its table.
        num_external_tokens
            Tokens to be loaded, as they were matched.
        """
        ...

    def build_connector_meta(self, batch: Batch) -> Any:
        """End a call of the scheduler: say what the workers are to do."""
        ...

    def request_finished(
        self, request: Request, block_ids: BlockIds, num_computed_tokens: int
    ) -> bool:
        """Note a request that ends; its blocks are about to be freed.

        Parameters
        ----------
        request
            Its status is final.
        block_ids
            Its table, as of the last batch that it was in; to be called at once.
        num_computed_tokens
            Tokens whose KV entries stand there.

        Returns
        -------
        bool
            Whether its blocks must be kept until they have been sent.
        """
        ...

    def update_connector_output(self, report: TransferReport) -> list[Request]:
        """Note jobs that have ended; return requests that waited for one, in order."""
        ...

    def check(self) -> None:
        """Prove its invariants in O(n)."""
        ...
