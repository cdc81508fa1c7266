"""Tokens planned for running requests in a batch, before any is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.scheduler.request import Request


class Plan:
    """Tokens that running requests get in the batch that is being formed.

    Parameters
    ----------
    budget
        Tokens that may be scheduled.
    counts_decodes
        Whether decodes draw from it; otherwise one token each was set aside for them.

    Attributes
    ----------
    num_tokens
        By request; of prompts only unless decodes are counted.
    num_to_pass
        Requests that come next and get no token.
    ends
        Whether no request behind gets a token: blocks are awaited that come free later.
    """

    __slots__ = ("budget", "counts_decodes", "ends", "num_to_pass", "num_tokens")

    def __init__(self, budget: int, *, counts_decodes: bool) -> None:
        self.budget = budget
        self.counts_decodes = counts_decodes
        self.num_tokens: dict[Request, int] = {}
        self.num_to_pass = 0
        self.ends = False

    def add(self, request: Request, num_tokens: int, *, is_decode: bool) -> None:
        if self.counts_decodes or not is_decode:
            self.budget -= num_tokens
            self.num_tokens[request] = num_tokens

    def give_back(self, victim: Request, *, is_decode: bool) -> None:
        """Take back what a victim was to get."""
        self.budget += self.num_tokens.pop(victim, 0)
        if is_decode and not self.counts_decodes:
            self.budget += 1
