"""The virtual decode clock: running decodes, advanced by counting steps.

A decode computes one token a step, so what is known of it at a step is a constant plus
the number of the step::

    num_tokens at the start of step s      = base_tokens + s
    num_computed_tokens after it           = base_tokens + s
    it opens a block in steps              s ≡ 1 - base_tokens   (mod block_size)
    it fills a block in steps              s ≡   - base_tokens   (mod block_size)

Nothing is written on a plain step. Requests whose next block opens in the same steps
stand in one bucket, in running order, so a step looks at one bucket (and, where filled
blocks are registered, at its neighbour).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request


class DecodeColumns:
    """Decodes on a clock, in columns that follow them as they join and leave."""

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        self._rows: dict[Request, int] = {}
        self._last: list[Request] = []
        self._table = np.zeros((3, 64), np.int64)

    def join(self, request: Request) -> None:
        row = self._rows[request] = len(self._last)
        self._last.append(request)
        table = self._table
        if row == table.shape[1]:
            import numpy as np  # noqa: PLC0415 - see above

            table = self._table = np.hstack([table, np.zeros_like(table)])
        base_tokens, num_prompt_tokens = request.base_tokens, request.num_prompt_tokens
        table[0, row] = base_tokens
        table[1, row] = base_tokens - num_prompt_tokens
        table[2, row] = request.max_num_tokens - num_prompt_tokens

    def leave(self, request: Request) -> None:
        """Put the last row in the place of that of `request`."""
        row, other = self._rows.pop(request), self._last.pop()
        if other is not request:
            self._rows[other] = row
            self._last[row] = other
            self._table[:, row] = self._table[:, len(self._last)]

    def rows(self, step: int) -> Any:
        """Return tokens and output tokens at the start of `step`, and most of these."""
        rows = self._table[:, : len(self._last)].copy()
        rows[:2] += step
        return rows


class DecodeClock:
    """All running decodes of an engine.

    Parameters
    ----------
    block_size
        Tokens a block.

    Attributes
    ----------
    num_decodes
        Requests on the clock.
    num_base_tokens
        Sum of their `base_tokens`.
    num_unknown_tokens
        Tokens of each that are in flight when a step is formed, and not yet known.
    columns
        What follows them as they join and leave, or None.
    buckets
        By phase, block tables by request, in running order; a request's phase is the
        step, modulo `block_size`, in which it opens a block. A step that goes through
        tables need not touch the requests, which would push others out of the
        processor's cache.
    num_opening
        By phase, how many stand there: in a row, where a bucket is an object.
    """

    __slots__ = (
        "_joined",
        "_joined_step",
        "_last_order",
        "block_size",
        "buckets",
        "columns",
        "num_base_tokens",
        "num_decodes",
        "num_opening",
        "num_unknown_tokens",
    )

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_decodes = 0
        self.num_base_tokens = 0
        self.num_unknown_tokens = 0
        self.columns: DecodeColumns | None = None
        self._last_order = -1  # of all that joined so far
        self._joined: Iterable[Request] = ()  # latest
        self._joined_step = -1
        self.buckets: list[dict[Request, Any]] = [{} for _ in range(block_size)]
        self.num_opening = [0] * block_size

    def join(self, request: Request, first_step: int) -> None:
        """Let `request` decode from `first_step` on; see `join_all`."""
        self.join_all((request,), first_step)

    def join_all(self, requests: Iterable[Request], first_step: int) -> None:
        """Let requests decode from `first_step` on.

        Their `num_tokens` are those known at the start of that step.
        """
        buckets, block_size = self.buckets, self.block_size
        known_step = first_step - self.num_unknown_tokens
        for request in requests:
            base_tokens = request.base_tokens = request.num_tokens - known_step
            self.num_decodes += 1
            self.num_base_tokens += base_tokens
            phase = (1 - base_tokens) % block_size
            self.num_opening[phase] += 1
            bucket = buckets[phase]
            bucket[request] = request.table
            if request.order > self._last_order:
                self._last_order = request.order
            else:  # prompts that ran behind it have completed before
                in_order = sorted(bucket, key=attrgetter("order"))
                bucket.clear()
                bucket.update({each: each.table for each in in_order})
        self._joined, self._joined_step = requests, first_step
        if self.columns is not None:
            for request in requests:
                self.columns.join(request)

    def leave(self, request: Request) -> None:
        """Take `request` off the clock."""
        base_tokens = request.base_tokens
        self.num_decodes -= 1
        self.num_base_tokens -= base_tokens
        if self.columns is not None:
            self.columns.leave(request)
        phase = (1 - base_tokens) % self.block_size
        self.num_opening[phase] -= 1
        del self.buckets[phase][request]

    def wait(self, request: Request) -> None:
        """Let `request` get no token in the step that is being formed."""
        num_tokens, request.num_tokens = request.num_tokens, request.base_tokens
        self.leave(request)
        self.join(request, 1)
        request.num_tokens = num_tokens

    def opening(self, step: int) -> dict[Request, Any]:
        """Return the requests that open a block in `step`, in running order."""
        return self.buckets[step % self.block_size]

    def filling(self, step: int) -> dict[Request, Any]:
        """Return the requests that fill a block in `step`, in running order."""
        return self.buckets[(step + 1) % self.block_size]

    def num_context_tokens(self, step: int) -> int:
        """Return the sum over decodes of the tokens each attends to in `step`."""
        return self.num_base_tokens + self.num_decodes * step

    def settle(self, request: Request, step: int) -> None:
        """Write down the tokens of `request` as they are at the start of `step`."""
        request.num_tokens = request.base_tokens + step
        request.num_computed_tokens = request.num_tokens - 1

    def check(self, running: Iterable[Request]) -> None:
        """Prove counts, phases and order in O(n).

        Parameters
        ----------
        running
            Requests in running order; those that have no `base_tokens` on the clock
            stand behind all decodes.

        Raises
        ------
        InvariantError
            If a count is off, or a bucket holds what it should not.
        """
        order = {request: index for index, request in enumerate(running)}
        held = [request for bucket in self.buckets for request in bucket]
        require(
            len(held) == self.num_decodes
            and sum(request.base_tokens for request in held) == self.num_base_tokens,
            f"decode clock: {len(held)} decodes, {self.num_decodes} counted, or their "
            f"tokens are not {self.num_base_tokens}",
        )
        for phase, bucket in enumerate(self.buckets):
            require(
                len(bucket) == self.num_opening[phase],
                f"decode clock: bucket {phase} holds {len(bucket)} decodes, "
                f"{self.num_opening[phase]} counted",
            )
            positions = [order.get(request, -1) for request in bucket]
            require(
                -1 not in positions and positions == sorted(positions),
                f"decode clock: bucket {phase} is not in running order",
            )
            for request in bucket:
                require(
                    (1 - request.base_tokens) % self.block_size == phase,
                    f"decode clock: request {request.request_id} is in bucket {phase}",
                )
                require(
                    bucket[request] is request.table,
                    f"decode clock: request {request.request_id} has another table",
                )


class AheadDecodeClock(DecodeClock):
    """`DecodeClock` of decodes that are scheduled before their last token is known.

    Of a request that computes its last prompt token in step p, step p + 1 is formed
    before the output of p is known. So in every step one token less is known than is
    computed with it::

        num_tokens at the start of step s      = base_tokens + s - 1
        num_computed_tokens after it           = base_tokens + s

    and a block is findable from the step on that opens the next one.
    """

    __slots__ = ()

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.num_unknown_tokens = 1

    def filling(self, step: int) -> dict[Request, Any]:
        """Return the requests whose full block becomes findable in `step`, in order."""
        opening = self.buckets[step % self.block_size]
        if step != self._joined_step or opening.keys().isdisjoint(self._joined):
            return opening
        # blocks that prompts have filled are findable already
        joined = self._joined
        return {each: opening[each] for each in opening if each not in joined}

    def settle(self, request: Request, step: int) -> None:
        request.num_tokens = request.num_computed_tokens = (
            request.base_tokens + step - 1
        )
