"""Steps on a device: uploaded, moved, computed, sampled, under a stopwatch."""

from __future__ import annotations

import gc
import statistics
import time
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from calibrate.gpu.attention import flash_attention
from calibrate.gpu.tasks import refusing
from calibrate.kernels import reference, torch_ops
from calibrate.replay.compare import Timing
from calibrate.replay.graphs import (
    MOST_GRAPHS,
    DecodeGraph,
    PiecesGraph,
    Places,
    Shape,
    SplitKernel,
    padded_plan,
    padded_size,
)
from calibrate.replay.packing import pack
from calibrate.replay.pool import caches_of, paged_attend, step_batch
from calibrate.replay.stack import Inputs, into_caches
from calibrate.replay.tokens import ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from calibrate.gpu.attention import Engines
    from calibrate.kernels.paged import PagedBatch
    from calibrate.replay.log import Step
    from calibrate.replay.packing import Packed
    from calibrate.replay.pool import Kernel, Moves
    from calibrate.replay.stack import Attend, Stack

    Forward = Callable[[], Tensor]

WHOLE = ("split_kv", "flash_attn")
"""Ways to attend that are part of a graph of decodes."""
GRAPH_TOLERANCE = 0.25
"""Of a row of logits, relative: other kernels for other sizes round otherwise, layer by
layer, while rows of something else differ by as much as they are long."""


class TorchExecutor:
    """Runs steps on a stack over the pool of `moves`.

    Parameters
    ----------
    moves
        The pool is one block larger than the schedule's: padded rows write there.
    variants
        Of "decode_attention" and "mixed_attention", which takes prompts, too.
    use_graphs
        Whether steps of up to `calibrate.graphs.GRAPH_TOKENS` tokens are CUDA graphs;
        on a CPU the same is run, but nothing captured.

    Attributes
    ----------
    worst_graph_error
        Relative error of a row of logits, of the first step of each graph: against the
        same kernels launched one by one.
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
        self.uses_graphs = use_graphs
        self._has_whole = self.uses_graphs and variants["decode_attention"] in WHOLE
        self._caches = caches_of(self.pool)
        self._width = max(1, -(-len(stack.turns) // self.pool.shape[3]))
        self._decodes: OrderedDict[Shape, tuple[DecodeGraph, SplitKernel | None]] = (
            OrderedDict()
        )
        self._pieces: dict[int, PiecesGraph] = {}
        self._held: set[tuple[bool, int | None]] = set()
        self.worst_graph_error = 0.0
        if self.uses_graphs:
            self._places = Places(stack, self._caches, self._width)
            self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._stream = torch.cuda.Stream(self.pool.device) if self._on_gpu else None
        vocab = stack.geometry.vocab_size
        self._noise = torch.empty((0, vocab), device=self.pool.device)

    @property
    def variants(self) -> dict[str, str]:
        graphs = "in pieces" if self.uses_graphs else "none"
        if self._has_whole:
            graphs = "decodes whole, prompts in pieces"
        return self._variants | self.moves.variants | {"graphs": graphs}

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
            logits = self._prepared(packed)()
            return np.asarray(logits.double().cpu().numpy(), dtype=np.float64)

    def time(self, step: Step, repeats: int) -> Timing:
        """Execute a step once unseen, then `repeats` times; return the medians.

        A step may be repeated: it writes and moves the same again. Token ids are made
        up.
        """
        with refusing(self.pool.device), self._current(), _no_collections():
            self._hold(step)
            rows = [self._once(step) for _ in range(repeats + 1)][1:]
        return Timing(
            *(statistics.median(column) for column in zip(*rows, strict=True))
        )

    def _hold(self, step: Step) -> None:
        """Hold a new graph against the same kernels, launched one by one."""
        if not (self.uses_graphs and step.queries):
            return
        packed = self._packed(step)
        key = packed.is_decode, padded_size(packed.num_tokens)
        if key[1] is None or key in self._held:
            return
        self._held.add(key)
        expected = self._launched(packed)().float()
        error = reference.worst_row_error(self._prepared(packed)(), expected)
        self.worst_graph_error = max(self.worst_graph_error, error)
        if not error <= GRAPH_TOLERANCE:
            raise ReplayError(
                f"step {step.number}: its graph gives logits that are off by "
                f"{error:.1e} from those of its kernels launched one by one (at most "
                f"{GRAPH_TOLERANCE}); replay with --no-graphs, and report this"
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
        if forward is not None:
            sampled = self._sample(forward())
        moves_s, rest_s = watch.end()
        if sampled is not None:
            sampled.tolist()  # an engine needs them on the host to go on
        return Timing(time.perf_counter() - begin_s, moves_s + rest_s, moves_s)

    def _packed(self, step: Step) -> Packed:
        vocab = self.stack.geometry.vocab_size
        rng = np.random.default_rng(step.number)
        tokens = [rng.integers(0, vocab, query.num_tokens) for query in step.queries]
        return pack(step, tokens, self.pool.shape[3])

    def _sample(self, logits: Tensor) -> Tensor:
        count = len(logits)
        if len(self._noise) < count:
            self._noise = torch.empty(logits.shape, device=self.pool.device)
        return torch_ops.sample(logits, self._noise[:count])

    # -- the forward pass ------------------------------------------------------------

    def _prepared(self, packed: Packed) -> Forward:
        """Upload a step's inputs; return what enqueues its pass and gives logits."""
        padded = padded_size(packed.num_tokens) if self.uses_graphs else None
        if padded is None:
            return self._launched(packed)
        is_whole = packed.is_decode and self._has_whole
        make = self._decode_graph if is_whole else self._pieces_graph
        return make(packed, padded)

    def _launched(self, packed: Packed) -> Forward:
        inputs = self._inputs(packed)
        batch = step_batch(packed, self.pool, self.stack.geometry.num_heads)
        attend = self._attend(packed, batch)
        write = into_caches(self.stack.ops, self._caches, inputs.slots)
        return lambda: self.stack.forward(inputs, write, attend)

    def _attend(
        self, packed: Packed, batch: PagedBatch, out: Tensor | None = None
    ) -> Attend:
        operation = "decode_attention" if packed.is_decode else "mixed_attention"
        variant = self._variants[operation]
        return paged_attend(variant, batch, self._caches, self._engines, out)

    def _inputs(self, packed: Packed) -> Inputs:
        columns = (packed.tokens, packed.positions, packed.slots, packed.last_rows)
        return Inputs(*(self._upload(column) for column in columns))

    def _upload(self, column: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(column).to(self.pool.device, non_blocking=True)

    def _logits_in_place(self, hidden: Tensor, num_queries: int) -> Tensor:
        """Return the logits of a graph's rows: engines compute them outside of it."""
        return self.stack.logits(hidden, self._places.last_rows.device[:num_queries])

    def _pieces_graph(self, packed: Packed, padded: int) -> Forward:
        self._places.fill(packed, padded)
        graph = self._pieces.get(padded)
        if graph is None:
            graph = PiecesGraph(self.stack, self._places, padded, self._memory)
            self._pieces[padded] = graph
        count = packed.num_tokens
        batch = self._places.batch(packed.query_lens, packed.context_lens)
        attend = self._attend(packed, batch, self._places.attended[:count])
        return lambda: self._logits_in_place(
            graph.run(attend, count), packed.num_queries
        )

    def _decode_graph(self, packed: Packed, padded: int) -> Forward:
        self._places.fill(packed, padded)
        shape, plan = Shape(padded), None
        if self._variants["decode_attention"] == "split_kv":
            contexts = [*packed.context_lens, *[0] * (padded - packed.num_queries)]
            kv_heads, device = self.stack.geometry.num_kv_heads, self.pool.device
            plan, shape = padded_plan(contexts, kv_heads, self._engines.num_sms, device)
        if shape not in self._decodes:
            if len(self._decodes) >= MOST_GRAPHS:
                self._decodes.popitem(last=False)
            split = None if plan is None else SplitKernel(plan)
            planned = split or self._flash_attention
            self._decodes[shape] = (
                DecodeGraph(self.stack, self._places, padded, planned, self._memory),
                split,
            )
        self._decodes.move_to_end(shape)
        graph, split = self._decodes[shape]
        if split is not None and plan is not None:
            split.fill(plan)
        return lambda: self._logits_in_place(graph.run(), packed.num_queries)

    def _flash_attention(self, batch: PagedBatch) -> Kernel:
        return flash_attention(batch, longest=len(self.stack.turns))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's garbage collector out; engines freeze what lives on, too."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
