"""Steps as CUDA graphs, filled up to the sizes that engines capture.

A step of decodes is one graph where its attention can be part of it, as that of
`SplitKernel` and of flash attention can; a step with prompts is a graph for each layer,
with attention between them, as vLLM runs both by default. Graphs of one stack never run
at once: they read their inputs and put what lies between them in the same places, and
share the memory of all else. A row that fills a step up has no keys and writes its own
into a block that is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from calibrate.gpu.attention import PROGRAMS_PER_SM
from calibrate.graphs import GRAPH_SIZES, GRAPH_TOKENS
from calibrate.kernels.paged import PagedBatch
from calibrate.replay.pool import layered, without_gaps
from calibrate.replay.stack import Inputs, into_caches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from calibrate.kernels.triton_decode import DecodePlan
    from calibrate.replay.packing import Packed
    from calibrate.replay.pool import Caches, Kernel
    from calibrate.replay.stack import Attend, Stack, Write

    Planned = Callable[[PagedBatch], Kernel]
    """Enqueues what is planned on the device, and returns attention of a layer."""

T = TypeVar("T")

NOWHERE = 1 << 30
"""Where a split begins that has no keys: beyond all contexts, within 32 bits."""
MOST_GRAPHS = 160
"""Graphs of decodes that are kept; each holds the activations of its batch."""


def padded_size(num_tokens: int) -> int | None:
    """Return the captured size for so many tokens; None beyond the largest."""
    return next((size for size in GRAPH_SIZES if size >= num_tokens), None)


def captured(memory: Any, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of what `run` enqueues on the current stream, and its result.

    `memory` is a handle of `torch.cuda.graph_pool_handle`. Not `torch.cuda.graph`: it
    collects garbage and empties the allocator's cache each time.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=memory)
    try:
        found = run()
    finally:
        graph.capture_end()
    return graph, found


# -- inputs in fixed places ----------------------------------------------------------


class Column:
    """A column on the device, written through pinned memory of the host."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        pinned = device.type == "cuda"
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.host = self._pinned.numpy()

    def send(self, count: int) -> None:
        """Copy the first rows to the device, without waiting."""
        self.device[:count].copy_(self._pinned[:count], non_blocking=True)


class Places:
    """Inputs of a step of up to `GRAPH_TOKENS` tokens, and what lies between pieces.

    No sequence has the pool's last block. `width` is in blocks, that of the longest
    table.
    """

    def __init__(self, stack: Stack, caches: Caches, width: int) -> None:
        geometry, most = stack.geometry, GRAPH_TOKENS
        keys = caches[0][0]
        device = keys.device
        self.caches = caches
        self._nowhere = (keys.shape[0] - 1) * keys.shape[1]
        self._ops = stack.ops
        self.tokens, self.positions, self.slots, self.last_rows = (
            Column((most,), torch.int64, device) for _ in range(4)
        )
        self._contexts = Column((most,), torch.int32, device)
        self._starts = Column((most + 1,), torch.int32, device)
        self._tables = Column((most, width), torch.int32, device)
        heads = (most, geometry.num_heads, geometry.head_dim)
        self.attended = torch.zeros(heads, dtype=keys.dtype, device=device)
        total = geometry.gemms["qkv"][0]
        self.qkv = torch.zeros((most, total), dtype=keys.dtype, device=device)

    def fill(self, packed: Packed, padded: int) -> None:
        """Write a step's inputs, filled up to `padded` tokens, without waiting.

        Numpy writes them: torch may wake all of its threads for a hundred numbers.
        """
        count, num_seqs = packed.num_tokens, packed.num_queries
        for column, values, rest in (
            (self.tokens, packed.tokens, 0),
            (self.positions, packed.positions, 0),
            (self.slots, packed.slots, self._nowhere),
        ):
            column.host[:count] = values
            column.host[count:padded] = rest
            column.send(padded)
        self.last_rows.host[:num_seqs] = packed.last_rows
        self.last_rows.send(num_seqs)
        self._contexts.host[:num_seqs] = packed.context_lens
        self._contexts.host[num_seqs:padded] = 0
        self._contexts.send(padded)
        # sequences that fill a batch of decodes up have a token each
        self._starts.host[1 : num_seqs + 1] = packed.last_rows + 1
        more = padded - num_seqs
        self._starts.host[num_seqs + 1 : padded + 1] = count + 1 + np.arange(more)
        self._starts.send(padded + 1)
        self._tables.host[:num_seqs, : packed.tables.shape[1]] = packed.tables
        self._tables.send(num_seqs)

    def inputs(self, num_tokens: int) -> Inputs:
        return Inputs(
            self.tokens.device[:num_tokens],
            self.positions.device[:num_tokens],
            self.slots.device[:num_tokens],
            self.last_rows.device,
        )

    def write(self, inputs: Inputs) -> Write:
        return into_caches(self._ops, self.caches, inputs.slots)

    def batch(
        self, query_lens: tuple[int, ...], context_lens: tuple[int, ...]
    ) -> PagedBatch:
        """Return a batch over the first layer's caches, its queries yet to come."""
        count = len(query_lens)
        return PagedBatch(
            self.attended[: sum(query_lens)],
            *self.caches[0],
            self._tables.device[:count],
            query_lens,
            context_lens,
            self._starts.device[: count + 1],
            self._contexts.device[:count],
        )


# -- graphs --------------------------------------------------------------------------


class DecodeGraph:
    """The pass of a batch of decodes, as one graph.

    It is captured for a step that fills its places: the kernels run on it before.
    Without `memory`, as on a CPU, nothing is captured and the same is called.
    """

    def __init__(
        self, stack: Stack, places: Places, count: int, planned: Planned, memory: Any
    ) -> None:
        self._stack, self._places = stack, places
        self._inputs = places.inputs(count)
        self._batch = places.batch((1,) * count, (0,) * count)
        self._planned = planned
        self._graph: torch.cuda.CUDAGraph | None = None
        if memory is not None:
            self._pass()  # kernels are compiled, workspaces allocated
            torch.cuda.synchronize(places.qkv.device)
            self._graph, self._hidden = captured(memory, self._pass)

    def _pass(self) -> Tensor:
        kernel = self._planned(self._batch)
        attend = layered(kernel, self._batch, self._places.caches)
        write = self._places.write(self._inputs)
        return self._stack.hidden(self._inputs, write, attend)

    def run(self) -> Tensor:
        """Enqueue the pass; return hidden states, padded rows included."""
        if self._graph is None:
            return self._pass()
        self._graph.replay()
        return self._hidden


class PiecesGraph:
    """The pass of so many tokens, as graphs between which its attention is launched.

    As `DecodeGraph` it is captured for a step that fills its places; until that step
    is run its own keys are wrong.
    """

    def __init__(self, stack: Stack, places: Places, count: int, memory: Any) -> None:
        self._stack, self._places = stack, places
        self._inputs = places.inputs(count)
        self._attended = places.attended[:count]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if memory is not None:
            self._pass(lambda *_: self._attended)
            torch.cuda.synchronize(places.qkv.device)
            self._hidden = self._captured(memory)

    def _pass(self, attend: Attend) -> Tensor:
        return self._stack.hidden(
            self._inputs, self._places.write(self._inputs), attend
        )

    def _captured(self, memory: Any) -> Tensor:
        write = self._places.write(self._inputs)
        qkv = self._places.qkv[: len(self._attended)]
        pieces = self._stack.pieces(self._inputs, write, qkv)
        graph, found = captured(memory, lambda: next(pieces))
        self._graphs.append(graph)
        for _ in self._stack.layers:
            graph, found = captured(memory, lambda: pieces.send(self._attended))
            self._graphs.append(graph)
        return found

    def run(self, attend: Attend, num_tokens: int) -> Tensor:
        """Enqueue the pass; return hidden states, padded rows included.

        `attend` takes the step's own tokens and leaves their output in `attended`.
        """

        def attend_own(layer: int, query: Tensor) -> Tensor:
            attend(layer, query[:num_tokens])
            return self._attended

        if not self._graphs:
            return self._pass(attend_own)
        query = self._stack.queries(self._places.qkv[:num_tokens])
        for layer, graph in enumerate(self._graphs[:-1]):
            graph.replay()
            attend(layer, query)
        self._graphs[-1].replay()
        return self._hidden


# -- split_kv in a graph -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that a graph of decodes is captured for."""

    num_seqs: int
    num_items: int = 0
    split_len: int = 0
    single: bool = False


def round_up(count: int) -> int:
    """Return the next of four sizes an octave: not many more, and not many graphs."""
    size = 64
    while size < count:
        quarter = 1 << max(0, size.bit_length() - 3)
        size += quarter
    return size


def padded_plan(
    context_lens: Sequence[int], num_kv_heads: int, num_sms: int, device: torch.device
) -> tuple[DecodePlan, Shape]:
    """Cut contexts, padded to a captured batch size, as a graph can.

    The number of splits is rounded up; those too many begin behind every context, so
    that they find nothing to do.
    """
    from calibrate.kernels.triton_decode import (  # noqa: PLC0415
        DecodePlan,
        DecodeShape,
        split_length,
    )
    from calibrate.kernels.triton_support import next_power_of_2  # noqa: PLC0415

    programs = PROGRAMS_PER_SM * num_sms
    tiles = DecodeShape()
    split_len = next_power_of_2(
        split_length(context_lens, num_kv_heads, programs, tiles)
    )
    single = max(context_lens) <= split_len
    # numpy, as torch wakes all of its threads for a hundred numbers: milliseconds
    counts = [1 if single else -(-length // split_len) for length in context_lens]
    firsts = np.cumsum([0, *counts], dtype=np.int32)
    seqs = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = (np.arange(len(seqs), dtype=np.int32) - firsts[seqs]) * split_len
    num_items = len(counts) if single else round_up(len(seqs))
    shape = Shape(len(context_lens), num_items, split_len, single)
    items = np.full((2, num_items), [[0], [NOWHERE]], dtype=np.int32)
    items[:, : len(seqs)] = seqs, starts
    item_seqs, item_starts = torch.from_numpy(items).to(device)
    first_items = torch.from_numpy(firsts).to(device)
    padded = (item_seqs, item_starts, first_items)
    return DecodePlan(*padded, split_len, single, tiles), shape


class SplitKernel:
    """Attention in splits whose plan lies in one place, from step to step."""

    def __init__(self, plan: DecodePlan) -> None:
        self._plan = plan

    def __call__(self, batch: PagedBatch) -> Kernel:
        from calibrate.kernels.triton_decode import (  # noqa: PLC0415
            DecodeWorkspace,
            paged_decode,
        )

        workspace = DecodeWorkspace(batch.query, self._plan)
        return lambda out, here: paged_decode(
            out, without_gaps(here), self._plan, workspace
        )

    def fill(self, plan: DecodePlan) -> None:
        for mine, new in (
            (self._plan.item_seqs, plan.item_seqs),
            (self._plan.item_starts, plan.item_starts),
            (self._plan.first_items, plan.first_items),
        ):
            if mine is not new:
                mine.copy_(new)
