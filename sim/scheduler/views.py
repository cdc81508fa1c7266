"""Read-only views of requests and the engine, for policies.

A policy decides on facts that a real engine knows. So it never gets a request, which
carries the length at which the model will end it, but a view of one (invariant 4).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sim.scheduler.request import Request


Ints = Any  # an array of 64-bit integers; numpy is imported where it is needed


class Holdings(Protocol):
    """Tokens and blocks that a generation's cache has of a running request."""

    def num_output_tokens(self, request: Request) -> int:
        """Tokens generated so far, of all its sequences."""
        ...

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens whose KV entries its blocks hold, of all its sequences."""
        ...

    def num_blocks(self, request: Request) -> int:
        """GPU blocks that it holds, shared ones included."""
        ...

    def num_shared_tokens(self, request: Request) -> int:
        """Leading tokens in blocks that other requests hold, too, and can be found."""
        ...


class RequestView:
    """A request as a policy sees it.

    Attributes
    ----------
    request_id
        Position in arrival order.
    arrival_s
        In seconds.
    priority
        Smaller is more urgent.
    num_prompt_tokens
        Length of the prompt.
    max_num_tokens
        Length at which the engine ends it at the latest, prompt included.
    num_preemptions
        How often it lost its blocks.
    """

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> int:
        return self._request.request_id

    @property
    def arrival_s(self) -> float:
        return self._request.arrival_s

    @property
    def priority(self) -> int:
        return self._request.priority

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        return self._request.max_num_tokens

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self._request.num_output_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and tokens generated so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id})"


class RunningRequest(RequestView):
    """A running request, and what it holds of the cache at this moment."""

    __slots__ = ("_holdings",)

    def __init__(self, request: Request, holdings: Holdings) -> None:
        super().__init__(request)
        self._holdings = holdings

    @property
    def num_output_tokens(self) -> int:
        return self._holdings.num_output_tokens(self._request)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV entries are in the cache, before the step being formed."""
        return self._holdings.num_computed_tokens(self._request)

    @property
    def num_blocks(self) -> int:
        """GPU blocks that it holds, shared ones included."""
        return self._holdings.num_blocks(self._request)

    @property
    def num_recompute_tokens(self) -> int:
        """Tokens that would be computed again if its blocks were taken.

        Those in leading blocks that others hold as well stay cached and do not count.
        Blocks of its own would stay cached, too, but in a pool that is full they are
        the next to be taken, so they count as lost.
        """
        shared = self._holdings.num_shared_tokens(self._request)
        return max(self.num_computed_tokens - shared, 0)


class WaitingRequest(RequestView):
    """The head of the waiting queue, and the free blocks that it would use up.

    Attributes
    ----------
    num_needed_blocks
        To be admitted by the engine's own rules: for the tokens of its first step, or
        for all that are known where the release asks for that.
    num_full_blocks
        For all its known tokens.
    """

    __slots__ = ("num_full_blocks", "num_needed_blocks")

    def __init__(
        self, request: Request, *, num_needed_blocks: int, num_full_blocks: int
    ) -> None:
        super().__init__(request)
        self.num_needed_blocks = num_needed_blocks
        self.num_full_blocks = num_full_blocks


class RunningColumns(NamedTuple):
    """Running requests in columns of integers, in no order that means anything."""

    num_tokens: Ints
    num_output_tokens: Ints
    most_output_tokens: Ints
    num_blocks: Ints

    @classmethod
    def of(cls, running: Iterable[RunningRequest]) -> RunningColumns:
        """Return columns of requests that are seen one by one."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        rows = [
            (
                each.num_tokens,
                each.num_output_tokens,
                each.max_num_tokens - each.num_prompt_tokens,
                each.num_blocks,
            )
            for each in running
        ]
        return cls(*np.array(rows, np.int64).reshape(-1, len(cls._fields)).T)


class ColumnHoldings(Holdings, Protocol):
    """Holdings that have most running requests in columns."""

    @property
    def prefilling(self) -> Mapping[Request, None]:
        """The others, in running order."""
        ...

    def columns(self) -> RunningColumns:
        """Return the columns, the same as long as requests are only admitted."""
        ...


class EngineView:
    """The engine as an admission rule sees it.

    Attributes
    ----------
    num_gpu_blocks
        Size of the pool.
    block_size
        Tokens a block.
    num_available_blocks
        Free blocks, less those that the engine's own ``watermark`` keeps back.
    """

    __slots__ = (
        "_columns",
        "_running",
        "block_size",
        "num_available_blocks",
        "num_gpu_blocks",
    )

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        num_available_blocks: int,
        running: Callable[[], Sequence[RunningRequest]],
        columns: ColumnHoldings | None = None,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.num_available_blocks = num_available_blocks
        self._running = running
        self._columns = columns

    @property
    def columns(self) -> RunningColumns:
        """The running requests but `beside_columns`, to be looked at all at once.

        What is the same object says the same, so what follows from it need not be
        computed again for every request that is admitted in one step.
        """
        if self._columns is None:
            return RunningColumns.of(self.running)
        return self._columns.columns()

    def beside_columns(self, first: int = 0) -> list[RunningRequest]:
        """Return running requests that `columns` lacks, from index `first` on.

        As long as `columns` is the same object, others only join them at the end.
        """
        held = self._columns
        if held is None:
            return []
        return [
            RunningRequest(each, held) for each in islice(held.prefilling, first, None)
        ]

    @property
    def running(self) -> Sequence[RunningRequest]:
        """Running requests in order of admission, those of this step included."""
        return self._running()
