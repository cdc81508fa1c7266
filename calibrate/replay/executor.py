"""Steps on a device: uploaded, moved, computed, sampled, under a stopwatch."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from calibrate.gpu.tasks import refusing
from calibrate.kernels import torch_ops
from calibrate.replay.compare import Timing
from calibrate.replay.graphs import (
    CAPTURED,
    MOST_GRAPHS,
    DecodeGraph,
    Shape,
    SharedMemory,
    padded_plan,
    padded_size,
)
from calibrate.replay.packing import pack
from calibrate.replay.pool import paged_attend, step_batch
from calibrate.replay.stack import Inputs, into_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from calibrate.gpu.attention import Engines
    from calibrate.replay.log import Step
    from calibrate.replay.packing import Packed
    from calibrate.replay.pool import Moves
    from calibrate.replay.stack import Attend, Stack

    Forward = Callable[[], Tensor]


class TorchExecutor:
    """Runs steps on a stack over the pool of `moves`.

    Parameters
    ----------
    moves
        The pool is one block larger than the schedule's: padded rows write there.
    variants
        Of "decode_attention" and "mixed_attention", which takes prompts, too.
    use_graphs
        Whether steps of decodes are CUDA graphs; only with "split_kv" on a GPU.
    """

    def __init__(
        self,
        stack: Stack,
        moves: Moves,
        engines: Engines,
        variants: Mapping[str, str],
        use_graphs: bool,
    ) -> None:
        self.stack = stack
        self.moves = moves
        self.pool = moves.pool
        self._engines = engines
        self._variants = dict(variants)
        self._on_gpu = self.pool.device.type == "cuda"
        is_split = variants["decode_attention"] == "split_kv"
        self.uses_graphs = use_graphs and self._on_gpu and is_split
        self._graphs: OrderedDict[Shape, DecodeGraph] = OrderedDict()
        self._memory = self._shared_memory() if self.uses_graphs else None
        self._stream = torch.cuda.Stream(self.pool.device) if self._on_gpu else None
        vocab = stack.geometry.vocab_size
        self._noise = torch.empty((0, vocab), device=self.pool.device)
        self._width = max(1, -(-len(stack.turns) // self.pool.shape[3]))

    @property
    def variants(self) -> dict[str, str]:
        graphs = "decodes" if self.uses_graphs else "none"
        return self._variants | self.moves.variants | {"graphs": graphs}

    def _shared_memory(self) -> SharedMemory:
        stack = self.stack
        size = (CAPTURED[-1], stack.geometry.vocab_size)
        logits = torch.empty(size, dtype=stack.dtype, device=stack.device)
        return SharedMemory(torch.cuda.graph_pool_handle(), logits)

    # -- one step -----------------------------------------------------------------

    def logits(
        self, step: Step, tokens: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        """Execute a step.

        Return logits (num_queries, vocabulary) of the last tokens.
        """
        with self._current():
            for call in self.moves.calls(step):
                call()
            if not step.queries:
                return np.zeros((0, self.stack.geometry.vocab_size))
            packed = pack(step, tokens, self.pool.shape[3])
            logits = self._prepared(packed)()[: packed.num_queries]
            return np.asarray(logits.double().cpu().numpy(), dtype=np.float64)

    def time(self, step: Step, repeats: int) -> Timing:
        """Execute a step once unseen, then `repeats` times; return the medians.

        A step may be repeated: it writes and moves the same again. Token ids are made
        up.
        """
        with refusing(self.pool.device), self._current():
            rows = [self._once(step) for _ in range(repeats + 1)][1:]
        return Timing(
            *(statistics.median(column) for column in zip(*rows, strict=True))
        )

    def _current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _once(self, step: Step) -> Timing:
        packed = self._packed(step) if step.queries else None
        moves = self.moves.calls(step)
        watch = _CudaWatch() if self._on_gpu else _Watch()
        begin_s = watch.begin()
        forward = self._prepared(packed) if packed is not None else None
        watch.mark()
        for call in moves:
            call()
        watch.mark()
        sampled = None
        if forward is not None and packed is not None:
            sampled = self._sample(forward(), packed.num_queries)
        moves_s, rest_s = watch.end()
        if sampled is not None:
            sampled.tolist()  # an engine needs them on the host to go on
        return Timing(time.perf_counter() - begin_s, moves_s + rest_s, moves_s)

    def _packed(self, step: Step) -> Packed:
        vocab = self.stack.geometry.vocab_size
        rng = np.random.default_rng(step.number)
        tokens = [rng.integers(0, vocab, query.num_tokens) for query in step.queries]
        return pack(step, tokens, self.pool.shape[3])

    def _sample(self, logits: Tensor, num_queries: int) -> Tensor:
        if len(self._noise) < num_queries:
            vocab = self.stack.geometry.vocab_size
            self._noise = torch.empty((num_queries, vocab), device=self.pool.device)
        return torch_ops.sample(logits[:num_queries], self._noise[:num_queries])

    # -- the forward pass ------------------------------------------------------------

    def _prepared(self, packed: Packed) -> Forward:
        """Upload a step's inputs; return what enqueues its forward pass."""
        padded = padded_size(packed.num_queries) if packed.is_decode else None
        if self.uses_graphs and padded is not None:
            return self._in_graph(packed, padded)
        inputs = self._inputs(packed)
        attend = self._attend(packed)
        write = into_pool(self.stack.ops, self.pool, inputs.slots)
        return lambda: self.stack.forward(inputs, write, attend)

    def _attend(self, packed: Packed) -> Attend:
        batch = step_batch(packed, self.pool, self.stack.geometry.num_heads)
        operation = "decode_attention" if packed.is_decode else "mixed_attention"
        return paged_attend(self._variants[operation], batch, self.pool, self._engines)

    def _inputs(self, packed: Packed) -> Inputs:
        columns = (packed.tokens, packed.positions, packed.slots, packed.last_rows)
        return Inputs(*(self._upload(column) for column in columns))

    def _upload(self, column: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(column).to(self.pool.device, non_blocking=True)

    def _in_graph(self, packed: Packed, padded: int) -> Forward:
        contexts = [*packed.context_lens, *[0] * (padded - packed.num_queries)]
        geometry, device = self.stack.geometry, self.pool.device
        plan, shape = padded_plan(
            contexts, geometry.num_kv_heads, self._engines.num_sms, device
        )
        graph = self._graphs.get(shape)
        if graph is None:
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.popitem(last=False)
            graph = DecodeGraph(
                self.stack,
                self.pool,
                shape,
                plan,
                width=self._width,
                memory=self._memory,
            )
            self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        graph.fill(packed, plan)
        return graph.run


class _Watch:
    """Seconds between marks, by the host's clock."""

    def __init__(self) -> None:
        self._marks_s: list[float] = []

    def begin(self) -> float:
        """Return the host's clock, the device idle."""
        return time.perf_counter()

    def mark(self) -> None:
        self._marks_s.append(time.perf_counter())

    def end(self) -> tuple[float, float]:
        """Return the seconds between the two marks, and from the second to now."""
        first, second = self._marks_s
        return second - first, time.perf_counter() - second


class _CudaWatch:
    """The same between events of the device."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def begin(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self) -> None:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        self._marks.append(mark)

    def end(self) -> tuple[float, float]:
        self.mark()
        first, second, last = self._marks
        last.synchronize()
        between = first.elapsed_time(second), second.elapsed_time(last)
        return between[0] / 1e3, between[1] / 1e3
