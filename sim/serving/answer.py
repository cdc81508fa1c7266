"""Answers that clients wait for, and the error of an engine that has ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.request import Request


class EngineDeadError(RuntimeError):
    """The engine has ended while requests wait; the message says why."""


class Answer:
    """An answer that a client waits for: its prompts times samples, in order.

    Parameters
    ----------
    requests
        The engine's, one for each choice; of a group the same one several times.
    num_prompts
        How many prompts they answer.

    Attributes
    ----------
    num_told
        Tokens of each choice that the client knows of.
    fault
        Why the engine ended before the answer did; empty if it did not.
    """

    def __init__(self, requests: Sequence[Request], num_prompts: int) -> None:
        self.requests = requests
        self.num_prompts = num_prompts
        self.num_told = [0] * len(requests)
        self.fault = ""
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return all(request.status.is_finished for request in self.requests)

    @property
    def refusal(self) -> str:
        """Why the engine refused a part of it; empty if it did not."""
        refused = RequestStatus.FINISHED_REJECTED
        reasons = (r.reason for r in self.requests if r.status is refused)
        return next(reasons, "")

    def stir(self) -> None:
        """Wake its client if there is news."""
        if self.fault or self._has_news():
            self._changed.set()

    def _has_news(self) -> bool:
        for request, told in zip(self.requests, self.num_told, strict=True):
            if request.num_output_tokens > told:
                return True
        return self.is_done

    async def news(self) -> list[tuple[int, int, int]]:
        """Wait for tokens or the end; return choice, first and end of what is new.

        Raises
        ------
        EngineDeadError
            If the engine has ended.
        """
        while not (self.fault or self._has_news()):
            self._changed.clear()
            await self._changed.wait()
        if self.fault:
            raise EngineDeadError(self.fault)
        found = []
        for index, request in enumerate(self.requests):
            first, end = self.num_told[index], request.num_output_tokens
            if end > first:
                found.append((index, first, end))
                self.num_told[index] = end
        return found

    async def end(self) -> None:
        """Wait for all of it."""
        while not self.is_done:
            await self.news()
        await self.news()
