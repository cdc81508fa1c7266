"""The offloading connector's record of a request: chunks, jobs and blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cache.tiers import RequestAccess
from cache.tiers.places import NO_KEYS, Keys, Lot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.tiers.access import SessionHint
    from cache.tiers.places import Span
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import BlockIds, TransferJob
    from sim.scheduler.v1.connectors.offload_groups import OffloadGroup


class GroupOffload:
    """The state of a request in one KV cache group.

    Attributes
    ----------
    group
        Its rules.
    runs, keys
        Identity of its full blocks; and of its leading whole chunks.
    next_chunk
        The first one that was not stored, loaded or passed over.
    block_ids
        Of a group with a window: blocks as they were handed out, those that it has left
        behind included, and 0 for what was never there or is someone else's by now.
    held, first_held
        Of another group of a request that has ended: blocks that it held, from one on.
    """

    __slots__ = (
        "block_ids",
        "first_held",
        "group",
        "held",
        "keys",
        "next_chunk",
        "runs",
    )

    def __init__(self, group: OffloadGroup, request: Request) -> None:
        self.group = group
        self.runs = request.tokens.block_runs(group.block_size)
        self.keys = NO_KEYS
        self.next_chunk = 0
        self.block_ids: list[int] = []
        self.held: list[int] = []
        self.first_held = 0

    def know_keys(self, num_tokens: int) -> None:
        """Extend the keys to the whole chunks of so many tokens."""
        group = self.group
        num_chunks = num_tokens // group.chunk_tokens
        if num_chunks > self.keys.stop:
            self.keys = Keys.of_runs(
                *(self.runs, num_chunks, group.blocks_per_chunk),
                group=group.number,
                block_size=group.block_size,
            )

    def follow(self, block_ids: BlockIds) -> None:
        """Take note of blocks that the request has got."""
        self.block_ids += block_ids(len(self.block_ids), group=self.group.number)

    def drop(self, taken: set[int], stop: int) -> None:
        """Forget blocks before one that are still to be stored and were taken."""
        ids = self.block_ids
        first = self.next_chunk * self.group.blocks_per_chunk
        for place in range(first, stop):
            if ids[place] in taken:
                ids[place] = 0

    def num_chunks(self, num_tokens: int, offload: Offload) -> int:
        """Return how many leading chunks of so many tokens it has the blocks of."""
        group = self.group
        num_chunks = num_tokens // group.chunk_tokens
        if group.has_window:
            return min(num_chunks, len(self.block_ids) // group.blocks_per_chunk)
        if offload.has_ended:
            num_held = self.first_held + len(self.held)
            return min(num_chunks, num_held // group.blocks_per_chunk)
        return num_chunks

    def to_store(self, offload: Offload, stop: int, *, dense: bool) -> list[int]:
        """Return the chunks of a window before one that are to be stored."""
        group, size, first = self.group, self.group.blocks_per_chunk, self.next_chunk
        num_prompt_tokens = offload.request.num_prompt_tokens
        prompt_stop = offload.num_stored_tokens(num_prompt_tokens) // group.chunk_tokens
        is_late, last = False, 0
        if dense and offload.has_ended:
            last = stop
            is_late = group.segment_blocks is not None and stop != prompt_stop
        elif dense and stop <= prompt_stop:
            last = prompt_stop
        if is_late and group.segment_blocks:  # which tail is needed is known by now
            num_blocks = stop * size
            begin = num_blocks - num_blocks % group.segment_blocks
            first = min(first, begin // size)
        if stop <= first:
            return []
        boundaries = [num_prompt_tokens - 1]
        if offload.junction:
            boundaries.append(offload.junction)

        def stored(last: int) -> Sequence[int]:
            return group.stored(first * size, stop * size, boundaries, last * size)

        wanted: dict[int, list[int]] = {}
        for block in stored(last):
            wanted.setdefault(block // size, []).append(block)
        before = {block // size for block in stored(prompt_stop)} if is_late else set()
        ids = self.block_ids
        return [
            chunk
            for chunk, blocks in wanted.items()
            if ids[chunk * size + size - 1]
            and all(ids[block] for block in blocks)
            and (chunk >= self.next_chunk or chunk not in before)
        ]

    def blocks_of(
        self, spans: Sequence[Span], block_ids: BlockIds
    ) -> list[tuple[int, int]]:
        """Return place and number of each block of some chunks that is there."""
        found: list[tuple[int, int]] = []
        group, size = self.group, self.group.blocks_per_chunk
        for start, end in spans:
            first, stop = start * size, end * size
            if group.has_window:
                ids = self.block_ids[first:stop]
            elif self.held:
                ids = self.held[first - self.first_held : stop - self.first_held]
            else:
                ids = block_ids(first, stop, group=group.number)
            found += [pair for pair in enumerate(ids, first) if pair[1]]
        return found

    def end(self, block_ids: BlockIds, num_tokens: int) -> bool:
        """Keep the blocks of a request that ends; return whether some may be stored."""
        group, size = self.group, self.group.blocks_per_chunk
        first = self.next_chunk * size
        stop = num_tokens // group.chunk_tokens * size
        if not group.has_window:
            self.first_held = first
            self.held = (
                block_ids(first, stop, group=group.number) if stop > first else []
            )
            return bool(self.held)
        return bool(self.block_ids) and (stop > first or group.tails is not None)


class GroupOffer(NamedTuple):
    """The chunks of a request in a group that may be stored next.

    Attributes
    ----------
    own
        The request in the group.
    lots
        Those that are to be stored.
    stop
        Behind the last one that was looked at.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``
    (`_build_store_jobs`).
    """

    own: GroupOffload
    lots: list[Lot]
    stop: int

    @classmethod
    def of(
        cls, own: GroupOffload, offload: Offload, num_tokens: int, *, dense: bool
    ) -> GroupOffer:
        """Return the offer of so many tokens; `dense` as of `OffloadGroups`."""
        first, stop = own.next_chunk, own.num_chunks(num_tokens, offload)
        if not own.group.has_window:
            own.know_keys(stop * own.group.chunk_tokens)
            lots = [Lot(own.keys, first, stop)] if stop > first else []
            return cls(own, lots, stop)
        chunks = own.to_store(offload, stop, dense=dense)
        own.know_keys(stop * own.group.chunk_tokens)
        lots = []
        for chunk in chunks:
            if lots and lots[-1].stop == chunk:
                lots[-1] = lots[-1]._replace(stop=chunk + 1)
            else:
                lots.append(Lot(own.keys, chunk, chunk + 1))
        return cls(own, lots, stop)


class Offload:
    """Record of a request, from its first look-up until its last job has ended.

    Attributes
    ----------
    request, access
        It, and what the tier knows of it.
    groups
        By number.
    most_tokens
        Leading tokens that may be stored.
    num_local_tokens
        The local hit of its latest look-up.
    junction
        See `cache.v1.groups.lookup.Hit`; of that look-up.
    loads_in_step
        Whether what that look-up found is to be loaded into its own batch.
    jobs
        In flight.
    has_ended, num_ended_tokens
        Whether it has left the engine, and how many of its tokens were computed then.
    """

    __slots__ = (
        "access",
        "groups",
        "has_ended",
        "jobs",
        "junction",
        "loads_in_step",
        "most_tokens",
        "num_ended_tokens",
        "num_local_tokens",
        "request",
    )

    def __init__(
        self,
        request: Request,
        most_tokens: int,
        groups: Sequence[OffloadGroup],
        session: SessionHint | None = None,
    ) -> None:
        self.request = request
        self.access = RequestAccess(request.request_id, session)
        self.groups = [GroupOffload(group, request) for group in groups]
        self.most_tokens = most_tokens
        self.num_local_tokens = 0
        self.junction = 0
        self.loads_in_step = False
        self.jobs: dict[int, TransferJob] = {}
        self.has_ended = False
        self.num_ended_tokens = 0

    @property
    def may_store(self) -> bool:
        """Whether there is, or will be, a chunk that was not stored."""
        return any(
            self.most_tokens >= (own.next_chunk + 1) * own.group.chunk_tokens
            for own in self.groups
        )

    def has_more(self, num_tokens: int) -> bool:
        """Whether so many computed tokens fill a chunk that was not stored."""
        num_tokens = self.num_stored_tokens(num_tokens)
        for own in self.groups:
            if num_tokens // own.group.chunk_tokens > own.next_chunk:
                return True
        return False

    def begin(self) -> None:
        """Begin anew: it holds no blocks, and all its chunks may be stored."""
        for own in self.groups:
            own.next_chunk = 0
            own.block_ids = []

    def num_stored_tokens(self, num_tokens: int) -> int:
        """Return how many of its computed tokens may be stored."""
        return min(num_tokens, self.most_tokens)


def limit_of(request: Request, name: str) -> int | None:
    """Return a limit that came with the request, or None."""
    parameters = request.kv_transfer_params
    return None if parameters is None else parameters.get(name)
