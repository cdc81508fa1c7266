"""One allocation that every KV cache is a view of, filled with random values once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from calibrate.kernels.paged import paged_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from calibrate.kernels.paged import PagedBatch
    from calibrate.measurement import Curve, Point


class Arena:
    """Device memory for keys and values, viewed as caches of any geometry.

    Its contents are random: timing on zeros is faster than real data. `num_bytes` are
    of keys and values together.
    """

    def __init__(
        self,
        num_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.flat = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        # a piece at a time: random numbers take workspace
        for piece in self.flat.split(1 << 28):
            piece.normal_(generator=generator)

    def caches(self, at: Curve) -> tuple[Tensor, Tensor]:
        """Return keys and values, (num_blocks, block_size, num_kv_heads, head_dim)."""
        shape = (
            at.constant("block_size"),
            at.constant("num_kv_heads"),
            at.constant("head_dim"),
        )
        page = shape[0] * shape[1] * shape[2]
        half = self.flat.numel() // 2
        num_blocks = half // page
        keys, values = (
            part[: num_blocks * page].view(num_blocks, *shape)
            for part in (self.flat[:half], self.flat[half : 2 * half])
        )
        return keys, values

    def pool(self, num_layers: int, page_bytes: int, num_bytes: int) -> Tensor:
        """Return a pool of all layers, (num_layers, 2, num_blocks, 1, 1, page)."""
        page = page_bytes // self.dtype.itemsize
        num_blocks = num_bytes // page_bytes // (2 * num_layers)
        flat = self.flat[: 2 * num_layers * num_blocks * page]
        return flat.view(num_layers, 2, num_blocks, 1, 1, page)


def lengths(point: Point) -> tuple[list[int], list[int]]:
    """Return query and context lengths of an attention point's sequences.

    A decode whose contexts are not all the longest has one longest; the others share
    the rest evenly. A mixed batch is one chunk, then its decodes.
    """
    axes = point.axes
    if point.curve.operation == "prefill_attention":
        return [axes["query_tokens"]], [axes["past_tokens"] + axes["query_tokens"]]
    if point.curve.operation == "mixed_attention":
        shares = _shares(axes["context_tokens"], axes["num_decodes"])
        query_lens = [axes["query_tokens"], *[1] * len(shares)]
        return query_lens, [axes["past_tokens"] + axes["query_tokens"], *shares]
    longest, num_seqs = axes["longest_context_tokens"], axes["num_seqs"]
    rest = _shares(axes["context_tokens"] - longest, num_seqs - 1)
    return [1] * num_seqs, [longest, *rest]


def _shares(total: int, count: int) -> list[int]:
    """Return `total` in `count` parts that differ by one at most."""
    return [total // count + (index < total % count) for index in range(count)]


def batches(
    arena: Arena,
    at: Curve,
    lens: tuple[Sequence[int], Sequence[int]],
    wanted: int,
    generator: torch.Generator,
) -> list[PagedBatch]:
    """Return batches of equal lengths over blocks that no two share, as many as fit."""
    query_lens, context_lens = lens
    caches = arena.caches(at)
    size = at.constant("block_size")
    counts = torch.tensor([-(-length // size) for length in context_lens])
    needed = int(counts.sum())
    total = caches[0].shape[0]
    order = torch.randperm(total, generator=generator, device=arena.device)
    width = max(1, int(counts.max()))
    held = torch.arange(width)[None, :] < counts[:, None]
    made = []
    for number in range(max(1, min(wanted, total // max(1, needed)))):
        tables = torch.zeros(held.shape, dtype=torch.int32, device=arena.device)
        mine = order[number * needed : (number + 1) * needed]
        tables[held.to(arena.device)] = mine.to(torch.int32)
        shape = (sum(query_lens), at.constant("num_heads"), at.constant("head_dim"))
        query = torch.empty(shape, dtype=arena.dtype, device=arena.device)
        query.normal_(generator=generator)
        made.append(paged_batch(query, caches, tables, query_lens, context_lens))
    return made
