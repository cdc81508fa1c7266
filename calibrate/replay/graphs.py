"""Steps of decodes as CUDA graphs: one a batch size, its inputs written in place.

A graph is a fixed list of launches. Batches are padded to the sizes that engines
capture; a padded row has no keys and writes its own into a block that is never read.
The splits of attention are padded too: their number is rounded up, those too many begin
behind every context, so that they find nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calibrate.gpu.attention import PROGRAMS_PER_SM
from calibrate.kernels.paged import PagedBatch
from calibrate.replay.stack import Inputs, into_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from calibrate.kernels.triton_decode import DecodePlan
    from calibrate.replay.packing import Packed
    from calibrate.replay.stack import Attend, Stack

CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Batch sizes that vLLM captures by default."""
NOWHERE = 1 << 30
"""Where a split begins that has no keys: beyond all contexts, within 32 bits."""
MOST_GRAPHS = 160
"""Graphs that are kept; each holds the activations of its batch."""


def padded_size(num_seqs: int) -> int | None:
    """Return the captured batch size for so many sequences; None beyond the largest."""
    return next((size for size in CAPTURED if size >= num_seqs), None)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that all graphs of a stack share, as they never run at once."""

    pool: Any
    """Handle of their activations, from `torch.cuda.graph_pool_handle`."""
    logits: Tensor
    """(most sequences, vocabulary). Logits of its own would keep each graph's last
    activations from the next: gigabytes over all batch sizes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that a graph is captured for."""

    num_seqs: int
    num_items: int
    split_len: int
    single: bool


def round_up(count: int, least: int = 64) -> int:
    """Return the next of four sizes an octave: not many more, and not many graphs."""
    size = least
    while size < count:
        quarter = 1 << max(0, size.bit_length() - 3)
        size += quarter
    return size


def graph_shape(
    num_items: int, num_seqs: int, split_len: int, *, single: bool
) -> Shape:
    """Return the shape of the graph that a plan over padded contexts fits."""
    if single:
        return Shape(num_seqs, num_seqs, split_len, True)
    return Shape(num_seqs, round_up(num_items), split_len, False)


def padded_plan(
    context_lens: Sequence[int], num_kv_heads: int, num_sms: int, device: torch.device
) -> tuple[DecodePlan, Shape]:
    """Cut contexts, padded to a captured batch size, as a graph can."""
    from calibrate.kernels.triton_decode import plan_decode  # noqa: PLC0415
    from calibrate.kernels.triton_support import next_power_of_2  # noqa: PLC0415

    programs = PROGRAMS_PER_SM * num_sms
    plan = plan_decode(context_lens, num_kv_heads, programs, torch.device("cpu"))
    split_len = next_power_of_2(plan.split_len)
    single = max(context_lens) <= split_len
    # numpy, as torch wakes all of its threads for a hundred numbers: milliseconds
    counts = [1 if single else -(-length // split_len) for length in context_lens]
    firsts = np.cumsum([0, *counts], dtype=np.int32)
    seqs = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = (np.arange(len(seqs), dtype=np.int32) - firsts[seqs]) * split_len
    shape = graph_shape(len(seqs), len(context_lens), split_len, single=single)
    items = np.full((2, shape.num_items), [[0], [NOWHERE]], dtype=np.int32)
    items[:, : len(seqs)] = seqs, starts
    item_seqs, item_starts = torch.from_numpy(items).to(device)
    first_items = torch.from_numpy(firsts).to(device)
    padded = (item_seqs, item_starts, first_items)
    return type(plan)(*padded, split_len, single, plan.shape), shape


class DecodeGraph:
    """The forward pass of a batch of decodes, its inputs in fixed places.

    No sequence has the pool's last block. `plan` is the first one; the next are written
    over it. `width` is in blocks, that of the longest table. Without `memory`, as on a
    CPU, nothing is captured and the same kernels are called.
    """

    def __init__(
        self,
        stack: Stack,
        pool: Tensor,
        shape: Shape,
        plan: DecodePlan,
        *,
        width: int,
        memory: SharedMemory | None,
    ) -> None:
        self._stack, self._pool = stack, pool
        self._plan = plan
        self._shape = shape
        device, count = pool.device, shape.num_seqs
        rows = torch.zeros((3, count), dtype=torch.int64, device=device)
        self._rows = rows
        self._nowhere = (pool.shape[2] - 1) * pool.shape[3]
        last = torch.arange(count, device=device)
        self._inputs = Inputs(rows[0], rows[1], rows[2], last)
        geometry = stack.geometry
        query_shape = (count, geometry.num_heads, geometry.head_dim)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._batch = PagedBatch(
            torch.zeros(query_shape, dtype=pool.dtype, device=device),
            pool[0, 0],
            pool[0, 1],
            torch.zeros((count, width), dtype=torch.int32, device=device),
            (1,) * count,
            (0,) * count,
            starts,
            torch.zeros(count, dtype=torch.int32, device=device),
        )
        self.logits: Tensor | None = None
        self._out = None if memory is None else memory.logits[:count]
        self._graph = None if memory is None else self._captured(memory.pool)

    def _attend(self) -> Attend:
        from calibrate.kernels.triton_decode import (  # noqa: PLC0415
            DecodeWorkspace,
            paged_decode,
        )

        workspace = DecodeWorkspace(self._batch.query, self._plan)

        def attend(layer: int, query: Tensor) -> Tensor:
            out = torch.empty_like(query)
            here = PagedBatch(
                query,
                self._pool[layer, 0],
                self._pool[layer, 1],
                self._batch.block_tables,
                self._batch.query_lens,
                self._batch.context_lens,
                self._batch.query_starts,
                self._batch.contexts,
            )
            paged_decode(out, here, self._plan, workspace)
            return out

        return attend

    def _captured(self, memory: Any) -> torch.cuda.CUDAGraph:
        device = self._pool.device
        self._rows[2] = self._nowhere
        self._forward()  # kernels are compiled, workspaces allocated
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(device)
        with torch.cuda.graph(graph, pool=memory, stream=stream):
            self._forward()
        return graph

    def _forward(self) -> None:
        write = into_pool(self._stack.ops, self._pool, self._inputs.slots)
        self.logits = self._stack.forward(
            self._inputs, write, self._attend(), self._out
        )

    def fill(self, packed: Packed, plan: DecodePlan) -> None:
        """Write a step's inputs into their places, without waiting."""
        count = packed.num_queries
        columns = (packed.tokens, packed.positions, packed.slots)
        rows = torch.zeros((3, self._shape.num_seqs), dtype=torch.int64)
        rows[2] = self._nowhere
        for place, column in enumerate(columns):
            rows[place, :count] = torch.from_numpy(column)
        contexts = torch.zeros(self._shape.num_seqs, dtype=torch.int32)
        contexts[:count] = torch.tensor(packed.context_lens, dtype=torch.int32)
        self._rows.copy_(rows, non_blocking=True)
        self._batch.contexts.copy_(contexts, non_blocking=True)
        tables = torch.from_numpy(packed.tables)
        self._batch.block_tables[:count, : tables.shape[1]].copy_(tables)
        for mine, new in (
            (self._plan.item_seqs, plan.item_seqs),
            (self._plan.item_starts, plan.item_starts),
            (self._plan.first_items, plan.first_items),
        ):
            if mine is not new:
                mine.copy_(new)

    def run(self) -> Tensor:
        """Enqueue the forward pass; return the logits, padded rows included."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._forward()
        assert self.logits is not None
        return self.logits
