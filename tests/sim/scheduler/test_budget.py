"""The budget of a call of the V0 scheduler, in literals."""

from __future__ import annotations

import pytest

from sim.errors import SchedulerError
from sim.scheduler.v0.budget import SchedulingBudget


def test_what_is_entered_is_spent() -> None:
    budget = SchedulingBudget(token_budget=10, max_num_seqs=3)
    budget.add_num_batched_tokens("a", 6, num_cached_tokens=32)
    budget.add_num_seqs("a", 2)
    assert budget.num_batched_tokens == 6
    assert budget.num_cached_tokens == 32  # costs nothing
    assert budget.num_curr_seqs == 2
    assert budget.remaining_token_budget() == 4
    assert budget.can_schedule(num_new_tokens=4, num_new_seqs=1)
    assert not budget.can_schedule(num_new_tokens=5, num_new_seqs=1)
    assert not budget.can_schedule(num_new_tokens=4, num_new_seqs=2)


def test_a_request_is_entered_once() -> None:
    budget = SchedulingBudget(10, 3)
    for _ in range(2):
        budget.add_num_batched_tokens(7, 6, 1)
        budget.add_num_seqs(7, 2)
    assert (budget.num_batched_tokens, budget.num_curr_seqs) == (6, 2)
    assert budget.num_cached_tokens == 1


def test_what_is_taken_back_can_be_entered_again() -> None:
    budget = SchedulingBudget(10, 3)
    budget.add_num_batched_tokens("a", 6)
    budget.add_num_seqs("a", 2)
    for _ in range(2):  # the second time there is nothing to take back
        budget.subtract_num_batched_tokens("a", 6)
        budget.subtract_num_seqs("a", 2)
    assert (budget.num_batched_tokens, budget.num_curr_seqs) == (0, 0)
    budget.add_num_batched_tokens("a", 10)
    assert budget.remaining_token_budget() == 0


def test_misuse_is_refused_and_changes_nothing() -> None:
    budget = SchedulingBudget(10, 3)
    budget.add_num_batched_tokens("a", 2)
    budget.add_num_seqs("a", 1)
    with pytest.raises(SchedulerError, match="num_batched_tokens must be at least 0"):
        budget.add_num_batched_tokens("b", -1)
    with pytest.raises(SchedulerError, match="num_cached_tokens must be at least 0"):
        budget.add_num_batched_tokens("b", 1, -1)
    with pytest.raises(SchedulerError, match="num_curr_seqs must be at least 0"):
        budget.add_num_seqs("b", -1)
    with pytest.raises(SchedulerError, match="no more than the 2 tokens"):
        budget.subtract_num_batched_tokens("a", 3)
    with pytest.raises(SchedulerError, match="no more than the 1 sequences"):
        budget.subtract_num_seqs("a", 2)
    with pytest.raises(SchedulerError, match="num_new_seqs must be at least 1"):
        budget.can_schedule(num_new_tokens=1, num_new_seqs=0)
    with pytest.raises(ValueError, match="token_budget must be at least 0"):
        SchedulingBudget(-1, 3)
    assert (budget.num_batched_tokens, budget.num_curr_seqs) == (2, 1)
    budget.add_num_batched_tokens("b", 8)
    assert budget.remaining_token_budget() == 0
