"""Blocks of a request that one engine reads from another, group by group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.v1.specs import MambaSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout, KVCacheSpec
    from sim.scheduler.request import Request

GroupBlockIds = tuple[list[int], ...]
"""Blocks by group; nothing at all where there is nothing to read."""


class Exchange:
    """Says which blocks of a request a producer offers, and a consumer asks for.

    ::

        window 5, blocks of 4, 13 tokens     | 0 .. 3 | 4 .. 7 | 8 .. 11 | 12 |
        held by the producer                   null     null     7         8
        offered: two blocks, and one more               null     7         8
        asked for: the last of what is offered                   11        12

    Null blocks stand where a window has passed; of chunked attention all are offered,
    of states the last one.

    Parameters
    ----------
    layout
        The groups.
    tables
        The blocks of requests, by these groups or of the only one.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl``:
    ``base_scheduler.py`` (`get_exchange_clipped_blocks`).
    """

    def __init__(self, layout: KVCacheLayout, tables: Any) -> None:
        self._tables = tables
        self._has_groups = hasattr(tables, "group_block_ids")
        self._has_states = any(
            isinstance(group.spec, MambaSpec) for group in layout.groups
        )
        self.block_sizes = [group.spec.block_size for group in layout.groups]
        self._most = [_most_blocks(group.spec) for group in layout.groups]

    def num_handed_on(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt a producer computes for a consumer.

        All of them, but for the last one of several where there are states: that of
        the whole prompt is of no use for its last token, which the consumer computes.
        """
        return max(num_prompt_tokens - self._has_states, min(num_prompt_tokens, 1))

    def offered(self, request: Request) -> GroupBlockIds:
        """Return the blocks of a prompt that a producer holds for others."""
        num_tokens = request.num_computed_tokens  # not what a drafter would write
        return self._clipped(
            ids[: -(-num_tokens // size)]
            for ids, size in zip(
                self._block_ids(request, 0), self.block_sizes, strict=True
            )
        )

    def wanted(self, request: Request, num_local_tokens: int) -> GroupBlockIds:
        """Return the blocks of a request that begins to load, behind its own hit."""
        tables = self._tables
        by_group = (
            tables.group_block_ids(request, behind_hits=True)  # each has its own
            if self._has_states
            else self._block_ids(request, num_local_tokens)
        )
        return self._clipped([each for each in ids if each] for ids in by_group)

    def _block_ids(self, request: Request, first_token: int) -> list[list[int]]:
        """Return the block tables from a token on, which begins a block."""
        sizes, tables = self.block_sizes, self._tables
        if not self._has_groups:
            return [tables.block_ids(request, first_token // sizes[0])]
        by_group = tables.group_block_ids(request)
        return [
            ids[first_token // size :]
            for ids, size in zip(by_group, sizes, strict=True)
        ]

    def _clipped(self, by_group: Any) -> GroupBlockIds:
        return tuple(
            ids if most is None else ids[-most:]
            for ids, most in zip(by_group, self._most, strict=True)
        )


def _most_blocks(spec: KVCacheSpec) -> int | None:
    """Return how many blocks of a group are exchanged at most, None for all.

    Of a window as many as it fills, and one more as it need not begin with a block;
    of states the last one.
    """
    if isinstance(spec, MambaSpec):
        return 1
    if not isinstance(spec, SlidingWindowSpec):
        return None
    return -(-spec.sliding_window // spec.block_size) + 1
