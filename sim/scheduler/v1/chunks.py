"""How many tokens of a prompt one call computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.v1.policies import PrefillInterval, SharedPrefillInterval

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.v1.block_tables import BlockTables
    from cache.v1.runs.group_tables import GroupRunTables
    from sim.scheduler.request import Request
    from sim.scheduler.v1.settings import Settings

SET_ASIDE = -1
"""Instead of the first chunk of a head: the scan passes over it."""


class Chunks:
    """Limits of the tokens that one call computes of a prompt, beside its budget.

    Parameters
    ----------
    settings
        Of the scheduler.
    groups
        Block tables that may want chunks to end in certain places, or None.

    Attributes
    ----------
    vary
        Whether limits change from call to call: then `begin_call` is due.
    are_spaced
        Whether calls with prefill are spaced: then `end_call` is due.
    holds_prefill
        Whether this call leaves prefill alone.
    carries_prefill
        Whether it does some; the scheduler says so.
    cut
        Shortens a chunk to where it may end, or None.
    pad
        Returns the tokens of a head that lacks one, empty drafts included, given its
        hits; None if it has no drafts.
    """

    def __init__(
        self, settings: Settings, groups: BlockTables | GroupRunTables | None
    ) -> None:
        self._settings = settings
        self._threshold = settings.long_prefill_token_threshold
        self._last_position = settings.max_model_len - 1
        self._chunks_prompts = settings.enable_chunked_prefill
        self._skips_heads = settings.skips_over_budget_heads
        self._interval = (
            PrefillInterval(settings.prefill_schedule_interval)
            if settings.spaces_prefills
            else None
        )
        self.are_spaced = self._interval is not None
        self.vary = self._threshold > 0 or self.are_spaced
        self.holds_prefill = self.carries_prefill = False
        has_ends = groups is not None and groups.chunk_ends is not None
        self.cut = groups.cut_chunk if groups is not None and has_ends else None
        self.pad: Callable[[int], int] | None = None

    def space_by(self, num_turns: Callable[[], int]) -> None:
        """Space calls with prefill by turns that ranks count together."""
        interval = self._settings.prefill_schedule_interval
        self._interval = SharedPrefillInterval(interval, num_turns)
        self.are_spaced = self.vary = True

    # -- a call ---------------------------------------------------------------

    def begin_call(self, num_requests: int, has_decodes: Callable[[], bool]) -> None:
        """Note the limits of a call.

        Parameters
        ----------
        num_requests
            That run or wait.
        has_decodes
            Says whether decodes are among them.
        """
        if self._interval is not None:
            self.carries_prefill = False
            self.holds_prefill = self._interval.holds(has_decodes=has_decodes())
        settings = self._settings
        self._threshold = settings.long_prefill_token_threshold
        if self._threshold and settings.dialect.spares_lone_requests:
            if num_requests <= 1:
                self._threshold = 0
            elif settings.long_prefill_token_threshold_adaptive:
                share = settings.max_num_batched_tokens // num_requests
                self._threshold = max(self._threshold, share)

    def end_call(self, num_tokens: int, num_backlog: int | None) -> None:
        """Note the tokens that a call scheduled, and the backlog if it looked there."""
        assert self._interval is not None
        if num_backlog is not None and not self.holds_prefill:
            self._interval.saw_queue(num_backlog)
        self._interval.stepped(num_tokens, carries_prefill=self.carries_prefill)

    def pass_quietly(self, num_steps: int) -> None:
        """Note steps of decodes only, while no request waits."""
        assert self._interval is not None
        self._interval.stepped_quietly(num_steps)

    # -- a request ------------------------------------------------------------

    def limited(self, request: Request, num_tokens: int) -> int:
        """Return how many of its next tokens a running request may ask for."""
        if 0 < self._threshold < num_tokens:
            num_tokens = self._threshold
        # The last position is never computed: nothing can be sampled behind it. So
        # a prompt of that length, admitted unchecked, stays in mid-way for ever.
        most = self._last_position - request.num_computed_tokens
        return max(min(num_tokens, most), 0)

    def within(self, budget: int, request: Request, num_asked: int) -> int:
        """Return how many of the tokens that a running prompt asks for it gets."""
        num_tokens = min(num_asked, budget)
        if self.cut is None or not num_tokens:
            return num_tokens
        return self.cut(request, request.num_computed_tokens, num_tokens)

    def first(self, request: Request, num_computed: int, budget: int) -> int:
        """Return how many tokens the head of the queue gets; 0 ends the scan.

        Those before `num_computed` were found, or loaded.
        """
        num_missing_tokens = num_new_tokens = request.num_tokens - num_computed
        if self.holds_prefill and num_missing_tokens > 1:
            return 0
        if num_missing_tokens == 1 and self.pad is not None:
            num_new_tokens = self.pad(num_computed)
            if num_new_tokens > budget:
                return 0
        if 0 < self._threshold < num_new_tokens:
            num_new_tokens = self._threshold
        if num_new_tokens > budget:
            if self._skips_heads:
                return SET_ASIDE
            if not self._chunks_prompts:
                return 0
            num_new_tokens = budget
        if self.cut is not None:
            num_cut_tokens = self.cut(request, num_computed, num_new_tokens)
            if num_cut_tokens < num_new_tokens:  # drafts stay whole, or away
                return min(num_cut_tokens, num_missing_tokens)
        return num_new_tokens
