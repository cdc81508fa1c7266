"""A request inside the engine: its life cycle, its progress, its cache table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    """Holds blocks that a KV connector fills."""
    FINISHED_STOPPED = "finished_stopped"
    """Generated all that the workload had for it."""
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    """Cut at max_model_len or max_tokens."""
    FINISHED_ABORTED = "finished_aborted"
    """Withdrawn by its client."""
    FINISHED_REJECTED = "finished_rejected"
    """Could never be served, or no further; refused with a reason."""
    FINISHED_ERROR = "finished_error"
    """Blocks that it was to load could not be loaded."""

    leads_to: tuple[RequestStatus, ...]
    """The legal next ones: `TRANSITIONS`, without hashing, which enums do slowly."""

    @property
    def is_finished(self) -> bool:
        """Whether the life of the request is over."""
        return not self.leads_to


_S = RequestStatus
_FINISHED = frozenset(
    {
        _S.FINISHED_STOPPED,
        _S.FINISHED_LENGTH_CAPPED,
        _S.FINISHED_ABORTED,
        _S.FINISHED_REJECTED,
        _S.FINISHED_ERROR,
    }
)
_SERVED = frozenset({_S.FINISHED_STOPPED, _S.FINISHED_LENGTH_CAPPED})

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset(
        {
            _S.RUNNING,
            _S.WAITING_FOR_REMOTE_KVS,
            _S.FINISHED_REJECTED,
            _S.FINISHED_ABORTED,
        }
    ),
    _S.RUNNING: _SERVED | {_S.PREEMPTED, _S.SWAPPED, _S.FINISHED_ABORTED},
    # Two generations ignore what has grown too long to be computed or swapped in again.
    # Or both get their last token of a step that was in flight when that happened.
    _S.PREEMPTED: _SERVED
    | {
        _S.RUNNING,
        _S.WAITING_FOR_REMOTE_KVS,
        _S.FINISHED_REJECTED,
        _S.FINISHED_ABORTED,
    },
    _S.SWAPPED: _SERVED | {_S.RUNNING, _S.FINISHED_REJECTED, _S.FINISHED_ABORTED},
    _S.WAITING_FOR_REMOTE_KVS: frozenset(
        {_S.WAITING, _S.PREEMPTED, _S.FINISHED_ERROR, _S.FINISHED_ABORTED}
    ),
    **{status: frozenset() for status in _FINISHED},
}
"""The legal transitions of `RequestStatus`."""

for _status, _targets in TRANSITIONS.items():
    _status.leads_to = tuple(_targets)


class IllegalTransitionError(RuntimeError):
    """A request was moved to a status that its own does not lead to."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, as schedulers read them.

    Parameters
    ----------
    n
        Sequences returned.
    best_of
        Sequences sampled, or the beam width; None for `n`.
    use_beam_search
        Beam search instead of parallel sampling.
    max_tokens
        Most output tokens a sequence, or None for the engine's limit.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    max_tokens: int | None = None

    @property
    def width(self) -> int:
        """Sequences that the group grows to."""
        return self.n if self.best_of is None else self.best_of


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
        Length at which the model will end it. Only `sim.engine.sampling` may read it
        (invariant 4).
    max_output_tokens
        The client's own limit, part of `max_num_tokens`; None for none.
    num_sequences
        Continuations of the prompt: parallel samples, or the beam width.
    use_beam_search
        Whether the continuations are beams.
    oracle_branch_num_tokens, beam_seed, beam_percent
        Length at which each continuation ends (empty: all as `oracle_num_tokens`), and
        what the beam search will choose; for `sim.engine.group_sampling` only.
    parent_id
        The workload's request; several of the engine's share it where every sample is
        a request of its own. None for its own id.
    kv_transfer_params
        What the client says to a KV connector, under vLLM's names; None for nothing.
    ignore_eos
        Whether the client says that it writes all of its `max_output_tokens`.

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
        `sim.engine.sampling`'s own: no sampled token below this length needs a look.
    on_end
        Called with the request when it has left the engine, finished or not.
    on_first_token
        Called with the request when it is known when its first token appears.
    num_generated_tokens
        Tokens generated by all sequences, dropped beams included; kept for groups of
        sequences, else 0.
    order
        Place among running requests, as their scheduler counts admissions.
    table, base_tokens, joined_step, due_step
        The fast path's own: the cache tables, what the decode clock keeps, the step of
        the latest first token and that of the last one (-1 while unknown).
    streaks
        Runs of consecutive steps that each gave a token: ``(first, last)`` steps.
    """

    __slots__ = (
        "_streak_num_tokens",
        "_streak_step",
        "arrival_s",
        "base_tokens",
        "beam_percent",
        "beam_seed",
        "block_hashes",
        "block_table",
        "due_step",
        "finish_s",
        "first_scheduled_s",
        "first_token_s",
        "ignore_eos",
        "joined_step",
        "kv_transfer_params",
        "max_num_tokens",
        "max_output_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_generated_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_quiet_tokens",
        "num_recompute_tokens",
        "num_recomputed_tokens",
        "num_sequences",
        "num_tokens",
        "num_tokens_at_event",
        "on_end",
        "on_first_token",
        "oracle_branch_num_tokens",
        "oracle_num_tokens",
        "order",
        "parent_id",
        "priority",
        "reason",
        "request_id",
        "status",
        "streaks",
        "table",
        "tokens",
        "use_beam_search",
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
        max_output_tokens: int | None = None,
        num_sequences: int = 1,
        use_beam_search: bool = False,
        oracle_branch_num_tokens: tuple[int, ...] = (),
        beam_seed: int = 0,
        beam_percent: int = 0,
        parent_id: int | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
    ) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.num_prompt_tokens = num_prompt_tokens
        self.tokens = tokens
        self.max_num_tokens = max_num_tokens
        self.oracle_num_tokens = oracle_num_tokens
        self.priority = priority
        self.max_output_tokens = max_output_tokens
        self.num_sequences = num_sequences
        self.use_beam_search = use_beam_search
        self.oracle_branch_num_tokens = oracle_branch_num_tokens
        self.beam_seed = beam_seed
        self.beam_percent = beam_percent
        self.parent_id = request_id if parent_id is None else parent_id
        self.kv_transfer_params = kv_transfer_params
        self.ignore_eos = ignore_eos

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
        self.num_generated_tokens = 0

        self.on_end: Callable[[Request], object] | None = None
        self.on_first_token: Callable[[Request], object] | None = None
        self.num_tokens_at_event = 0
        self.streaks: list[tuple[int, int]] = []
        self._streak_step = -1
        self._streak_num_tokens = 0

        self.table: Any = None
        self.order = 0
        self.base_tokens = 0
        self.joined_step = -1
        self.due_step = -1

    def __repr__(self) -> str:
        return f"Request({self.request_id})"

    def again(self) -> Request:
        """Return it as it was when it arrived, for another engine."""
        return Request(
            request_id=self.request_id,
            arrival_s=self.arrival_s,
            num_prompt_tokens=self.num_prompt_tokens,
            tokens=self.tokens,
            max_num_tokens=self.max_num_tokens,
            oracle_num_tokens=self.oracle_num_tokens,
            priority=self.priority,
            max_output_tokens=self.max_output_tokens,
            num_sequences=self.num_sequences,
            use_beam_search=self.use_beam_search,
            oracle_branch_num_tokens=self.oracle_branch_num_tokens,
            beam_seed=self.beam_seed,
            beam_percent=self.beam_percent,
            parent_id=self.parent_id,
            kv_transfer_params=self.kv_transfer_params,
            ignore_eos=self.ignore_eos,
        )

    def end_after_prefill_of(self, num_prompt_tokens: int) -> None:
        """Leave so many tokens of the prompt, and one behind it; nothing has begun."""
        self.num_prompt_tokens = self.num_tokens = num_prompt_tokens
        self.max_num_tokens = self.oracle_num_tokens = num_prompt_tokens + 1

    def note_first_token(self, time_s: float) -> None:
        """Take note of when the first token appears."""
        self.first_token_s = time_s
        if self.on_first_token is not None:
            self.on_first_token(self)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def sampling_params(self) -> SamplingParams:
        """Its parameters for generations that schedule sequences."""
        return SamplingParams(
            n=self.num_sequences,
            best_of=self.num_sequences,
            use_beam_search=self.use_beam_search,
        )

    def move_to(self, status: RequestStatus) -> None:
        """Change the status.

        Raises
        ------
        IllegalTransitionError
            If the present status does not lead there; nothing changes.
        """
        if status not in self.status.leads_to:
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

    def note_token(self, step: int) -> None:
        """Note that `step` gives a token, which ends a run if it skipped a step."""
        if (
            self._streak_step < 0
            or self._streak_step + self.num_tokens - self._streak_num_tokens != step - 1
        ):
            self.end_streak()
            self.num_tokens += 1
            self.begin_streak(step)
        else:
            self.num_tokens += 1

    def note_tokens(self, step: int, num_tokens: int) -> None:
        """Note that `step` gives tokens; a run is one of steps, not of tokens."""
        self.note_token(step)
        self.num_tokens += num_tokens - 1
        self._streak_num_tokens += num_tokens - 1

    def note_runs(self, runs: Sequence[tuple[int, int]], num_new_tokens: int) -> None:
        """Note that each step of some runs gave a token, all of which are counted.

        The runs come after all steps noted so far, in order, and do not touch.
        """
        num_tokens, self.num_tokens = self.num_tokens, self.num_tokens - num_new_tokens
        begin, end = runs[0]
        begun = self._streak_step
        if (
            begun >= 0
            and begun + self.num_tokens - self._streak_num_tokens == begin - 1
        ):
            begin = begun
        else:
            self.end_streak()
        if len(runs) > 1:
            self.streaks.append((begin, end))
            self.streaks += runs[1:-1]
            begin, end = runs[-1]
        self.num_tokens = num_tokens
        self._streak_step = begin
        self._streak_num_tokens = num_tokens - (end - begin)

    @property
    def is_streaking(self) -> bool:
        """Whether the latest step that could give a token did."""
        return self._streak_step >= 0
