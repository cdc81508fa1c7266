"""A request inside the engine: its life cycle, its progress, its cache table."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.block import KVCacheBlock
    from cache.tokens import TokenIds


class RequestStatus(Enum):
    """Where a request stands; `TRANSITIONS` lists the legal moves."""

    WAITING = "waiting"
    """Arrived, never scheduled; holds no block."""
    RUNNING = "running"
    """Admitted; holds blocks."""
    PREEMPTED = "preempted"
    """Lost its blocks and waits to be computed again."""
    SWAPPED = "swapped"
    """Its blocks are on the CPU."""
    FINISHED_STOPPED = "finished_stopped"
    """Generated all that the workload had for it."""
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    """Cut at max_model_len or max_tokens."""
    FINISHED_ABORTED = "finished_aborted"
    """Withdrawn by its client."""
    FINISHED_REJECTED = "finished_rejected"
    """Could never have been served; refused on arrival with a reason."""

    @property
    def is_finished(self) -> bool:
        """Whether the life of the request is over."""
        return self in _FINISHED


_S = RequestStatus
_FINISHED = frozenset(
    {
        _S.FINISHED_STOPPED,
        _S.FINISHED_LENGTH_CAPPED,
        _S.FINISHED_ABORTED,
        _S.FINISHED_REJECTED,
    }
)
_SERVED = frozenset({_S.FINISHED_STOPPED, _S.FINISHED_LENGTH_CAPPED})

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.FINISHED_REJECTED, _S.FINISHED_ABORTED}),
    _S.RUNNING: _SERVED | {_S.PREEMPTED, _S.SWAPPED, _S.FINISHED_ABORTED},
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.FINISHED_ABORTED}),
    _S.SWAPPED: frozenset({_S.RUNNING, _S.FINISHED_ABORTED}),
    **{status: frozenset() for status in _FINISHED},
}
"""The legal transitions of `RequestStatus`."""


class IllegalTransitionError(RuntimeError):
    """A request was moved to a status that its own does not lead to."""


class Request:
    """A request as the engine holds it.

    Parameters
    ----------
    request_id
        Position in arrival order; also the order of equal arrivals.
    arrival_s
        Arrival time in seconds.
    num_prompt_tokens
        Length of the prompt.
    tokens
        Identity of prompt and output.
    max_num_tokens
        min(prompt + max_tokens, max_model_len): the length at which the engine stops
        it at the latest. Policies may see this one.
    oracle_num_tokens
        Length at which the model will end it. Only `sim.generation` may read it
        (invariant 4).

    Attributes
    ----------
    num_tokens
        Prompt plus generated tokens so far.
    num_computed_tokens
        Tokens whose KV entries are in the cache.
    num_recompute_tokens
        Tokens below this position have been computed before (a preemption threw them
        away).
    num_tokens_at_event
        `sim.generation`'s own: no sampled token below this length needs a look.
    streaks
        Runs of consecutive steps that each gave a token: ``(first, last)`` steps.
    """

    __slots__ = (
        "_streak_num_tokens",
        "_streak_step",
        "arrival_s",
        "block_hashes",
        "block_table",
        "finish_s",
        "first_scheduled_s",
        "first_token_s",
        "max_num_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_quiet_tokens",
        "num_recompute_tokens",
        "num_recomputed_tokens",
        "num_tokens",
        "num_tokens_at_event",
        "oracle_num_tokens",
        "priority",
        "reason",
        "request_id",
        "status",
        "streaks",
        "tokens",
    )

    def __init__(
        self,
        *,
        request_id: int,
        arrival_s: float,
        num_prompt_tokens: int,
        tokens: TokenIds,
        max_num_tokens: int,
        oracle_num_tokens: int,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.num_prompt_tokens = num_prompt_tokens
        self.tokens = tokens
        self.max_num_tokens = max_num_tokens
        self.oracle_num_tokens = oracle_num_tokens
        self.priority = priority

        self.status = RequestStatus.WAITING
        self.reason = ""
        self.num_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        self.block_table: list[KVCacheBlock] = []
        self.block_hashes: list[int] = []
        self.num_cached_blocks = 0
        self.num_quiet_tokens = 0

        self.first_scheduled_s = math.nan
        self.first_token_s = math.nan
        self.finish_s = math.nan
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_recompute_tokens = 0
        self.num_recomputed_tokens = 0

        self.num_tokens_at_event = 0
        self.streaks: list[tuple[int, int]] = []
        self._streak_step = -1
        self._streak_num_tokens = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def move_to(self, status: RequestStatus) -> None:
        """Change the status.

        Raises
        ------
        IllegalTransitionError
            If the present status does not lead there; nothing changes.
        """
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransitionError(
                f"request {self.request_id} cannot go from {self.status.value} to "
                f"{status.value}"
            )
        self.status = status

    def preempt(self) -> int:
        """Give up all computed tokens; the table must have been freed.

        Returns
        -------
        int
            Number of computed tokens lost.
        """
        self.move_to(RequestStatus.PREEMPTED)
        num_lost_tokens = self.num_computed_tokens
        self.num_recompute_tokens = max(self.num_recompute_tokens, num_lost_tokens)
        self.num_computed_tokens = 0
        self.num_preemptions += 1
        self.end_streak()
        return num_lost_tokens

    def begin_streak(self, step: int) -> None:
        """Note that `step` gives a token and that following steps may, too."""
        self._streak_step = step
        self._streak_num_tokens = self.num_tokens

    def end_streak(self) -> None:
        """Note that the last token's step was the last of its run, if any.

        Within a streak every step gives one token, so the last step follows from
        the length and nothing is kept per token.
        """
        if self._streak_step >= 0:
            last = self._streak_step + self.num_tokens - self._streak_num_tokens
            self.streaks.append((self._streak_step, last))
            self._streak_step = -1
        self.num_tokens_at_event = 0

    @property
    def is_streaking(self) -> bool:
        """Whether the latest step that could give a token did."""
        return self._streak_step >= 0
