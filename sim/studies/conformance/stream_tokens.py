"""The token ids of decision workloads, which seeds spell out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.hashing import NONE_HASH, hash_block

if TYPE_CHECKING:
    from collections.abc import Sequence

_BRANCH_SEEDS = 1_000_000


def token(seed: int, index: int) -> int:
    """Return token `index` of the stream of `seed`."""
    mixed = seed * 1000003 + index * 7919 + (seed ^ index) * 31
    return 10 + mixed % 49979


class StreamTokens:
    """Prompt and output of a request, as real token ids."""

    __slots__ = ("_out_seed", "_prompt")

    def __init__(self, prompt: Sequence[tuple[int, int]], out_seed: int) -> None:
        self._prompt = [
            token(seed, index) for seed, length in prompt for index in range(length)
        ]
        self._out_seed = out_seed

    def prompt(self) -> list[int]:
        return self._prompt

    def output(self, branch: int, index: int) -> int:
        return token(self._out_seed + _BRANCH_SEEDS * branch, index)

    def extend_block_hashes(
        self,
        block_hashes: list[int],
        num_blocks: int,
        block_size: int,
        num_lookahead_tokens: int = 0,
    ) -> None:
        parent = block_hashes[-1] if block_hashes else NONE_HASH
        num_prompt_tokens = len(self._prompt)
        for index in range(len(block_hashes), num_blocks):
            start = index * block_size
            end = start + block_size + num_lookahead_tokens
            ids = self._prompt[start:end] + [
                self.output(0, position - num_prompt_tokens)
                for position in range(max(start, num_prompt_tokens), end)
            ]
            parent = hash_block(parent, tuple(ids))
            block_hashes.append(parent)
