"""What a scheduler call may still spend: tokens and sequences."""

from __future__ import annotations

from sim.errors import SchedulerError


class SchedulingBudget:
    """Tokens and sequences of one scheduler call, entered under request ids.

    A request is counted once: what is added under an id that is there already changes
    nothing, so sequences that run can be entered ahead of their turn.

    Source: vLLM 0.7.3, ``vllm/core/scheduler.py``.
    """

    __slots__ = (
        "_ids_of_seqs",
        "_ids_of_tokens",
        "max_num_seqs",
        "num_batched_tokens",
        "num_cached_tokens",
        "num_curr_seqs",
        "token_budget",
    )

    def __init__(self, token_budget: int, max_num_seqs: int) -> None:
        _not_negative(token_budget=token_budget, max_num_seqs=max_num_seqs)
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.num_batched_tokens = 0
        # Tokens that were found in the prefix cache; they cost nothing.
        self.num_cached_tokens = 0
        self.num_curr_seqs = 0
        self._ids_of_tokens: set[int | str] = set()
        self._ids_of_seqs: set[int | str] = set()

    def can_schedule(self, *, num_new_tokens: int, num_new_seqs: int) -> bool:
        """Whether so many tokens and sequences still fit."""
        _not_negative(num_new_tokens=num_new_tokens)
        if num_new_seqs < 1:
            raise SchedulerError(
                f"num_new_seqs must be at least 1, got {num_new_seqs}: a group without "
                f"sequences has nothing to schedule"
            )
        return (
            self.num_batched_tokens + num_new_tokens <= self.token_budget
            and self.num_curr_seqs + num_new_seqs <= self.max_num_seqs
        )

    def remaining_token_budget(self) -> int:
        """Return the tokens left; negative if decodes alone exceeded the budget."""
        return self.token_budget - self.num_batched_tokens

    def add_num_batched_tokens(
        self, req_id: int | str, num_batched_tokens: int, num_cached_tokens: int = 0
    ) -> None:
        """Enter a request's tokens, unless it has entered some."""
        if req_id in self._ids_of_tokens:
            return
        if num_batched_tokens < 0 or num_cached_tokens < 0:
            _not_negative(
                num_batched_tokens=num_batched_tokens,
                num_cached_tokens=num_cached_tokens,
            )
        self._ids_of_tokens.add(req_id)
        self.num_batched_tokens += num_batched_tokens
        self.num_cached_tokens += num_cached_tokens

    def subtract_num_batched_tokens(
        self, req_id: int | str, num_batched_tokens: int
    ) -> None:
        """Take back what a request entered; nothing to do if it did not."""
        _not_negative(num_batched_tokens=num_batched_tokens)
        if req_id in self._ids_of_tokens:
            _not_more(num_batched_tokens, self.num_batched_tokens, "tokens")
            self._ids_of_tokens.remove(req_id)
            self.num_batched_tokens -= num_batched_tokens

    def add_num_seqs(self, req_id: int | str, num_curr_seqs: int) -> None:
        """Enter a request's sequences, unless it has entered some."""
        if req_id in self._ids_of_seqs:
            return
        if num_curr_seqs < 0:
            _not_negative(num_curr_seqs=num_curr_seqs)
        self._ids_of_seqs.add(req_id)
        self.num_curr_seqs += num_curr_seqs

    def subtract_num_seqs(self, req_id: int | str, num_curr_seqs: int) -> None:
        """Take back what a request entered; nothing to do if it did not."""
        _not_negative(num_curr_seqs=num_curr_seqs)
        if req_id in self._ids_of_seqs:
            _not_more(num_curr_seqs, self.num_curr_seqs, "sequences")
            self._ids_of_seqs.remove(req_id)
            self.num_curr_seqs -= num_curr_seqs


def _not_negative(**values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise SchedulerError(f"{name} must be at least 0, got {value}")


def _not_more(num: int, most: int, what: str) -> None:
    if num > most:
        raise SchedulerError(
            f"no more than the {most} {what} that are entered can be taken back, got "
            f"{num}"
        )
