"""The token ids of decision workloads, which seeds spell out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.tokens import ListTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

_BRANCH_SEEDS = 1_000_000


def token(seed: int, index: int) -> int:
    """Return token `index` of the stream of `seed`."""
    mixed = seed * 1000003 + index * 7919 + (seed ^ index) * 31
    return 10 + mixed % 49979


class StreamTokens(ListTokens):
    """Prompt and output of a request, as real token ids: outputs have no end."""

    __slots__ = ("_out_seed",)

    def __init__(self, prompt: Sequence[tuple[int, int]], out_seed: int) -> None:
        super().__init__(
            [token(seed, index) for seed, length in prompt for index in range(length)]
        )
        self._out_seed = out_seed

    def output(self, branch: int, index: int) -> int:
        return token(self._out_seed + _BRANCH_SEEDS * branch, index)

    def ids(self, start: int, end: int) -> Sequence[int]:
        num_prompt_tokens = self.num_prompt_tokens
        later = range(max(start, num_prompt_tokens), end)
        outputs = [self.output(0, index - num_prompt_tokens) for index in later]
        return [*self.tokens[start:end], *outputs]
