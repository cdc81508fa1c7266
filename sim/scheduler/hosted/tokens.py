"""Token ids for an engine that wants them, from workloads that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.tokens import TokenRuns

if TYPE_CHECKING:
    from sim.scheduler.request import Request

STOP_TOKEN = 1 << 62
"""The token that ends an output; no workload has it."""

_SEGMENT_BITS = 40
"""Tokens of a segment that are told apart, as a power of two."""


class HostedTokens:
    """Ids that are equal where the tokens of a workload are.

    A segment is numbered when it is first met, so that ids of any two differ.
    """

    def __init__(self, *, has_content: bool) -> None:
        self._has_content = has_content
        self._segments: dict[int, int] = {}

    def prompt(self, request: Request) -> list[int]:
        """Return the ids of a prompt."""
        if not self._has_content:
            return [0] * request.num_prompt_tokens
        prompt = request.tokens.prompt()
        if not isinstance(prompt, TokenRuns):
            return list(prompt)
        ids: list[int] = []
        for segment_id, offset, num_tokens in prompt.pieces:
            start = self._token_id(segment_id, offset)
            ids += range(start, start + num_tokens)
        return ids

    def latest(self, request: Request) -> int:
        """Return the id of the token that was generated last."""
        if not self._has_content:
            return 0
        token = request.tokens.output(0, request.num_output_tokens - 1)
        return token if isinstance(token, int) else self._token_id(*token)

    def _token_id(self, segment_id: int, offset: int) -> int:
        serial = self._segments.setdefault(segment_id, len(self._segments))
        return (serial << _SEGMENT_BITS) + offset
