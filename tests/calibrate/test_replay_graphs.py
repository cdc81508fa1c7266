"""Steps filled up to the sizes of graphs give what the same steps give alone."""

from __future__ import annotations

from copy import copy
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests.calibrate.missing import torch_only

torch_only()

# ruff: noqa: E402
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from calibrate.gpu.attention import MAX_SPLITS, Engines
from calibrate.graphs import GRAPH_SIZES, GRAPH_TOKENS
from calibrate.kernels import torch_ops
from calibrate.replay.executor import TorchExecutor
from calibrate.replay.graphs import padded_size
from calibrate.replay.log import Query, Step
from calibrate.replay.setup import tiny_executor
from calibrate.replay.tokens import ReplayError
from tests.calibrate.flash import stand_in
from tests.calibrate.replays import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Queries = Sequence[tuple[int, int]]

FACTS = facts(num_gpu_blocks=256, max_model_len=1024)
FLASH = {"decode_attention": "flash_attn", "mixed_attention": "flash_attn"}
PLAIN = {"decode_attention": "sdpa", "mixed_attention": "sdpa"}
DECODES: Queries = ((1, 40), (1, 7), (1, 300))
MIXED: Queries = ((1, 40), (70, 90), (1, 300), (5, 5))
"""Query tokens and context of each sequence."""


def step_of(queries: Queries, seed: int) -> Step:
    """Return a step over random blocks."""
    blocks = iter(np.random.default_rng(seed).permutation(256).tolist())
    found = tuple(
        Query(str(n), str(n), count, context, tuple(islice(blocks, -(-context // 16))))
        for n, (count, context) in enumerate(queries)
    )
    return Step(seed, 0.0, 0.0, found, (), (), (), ())


class Pair:
    """The same stack over the same pool, with graphs and without."""

    def __init__(self, variants: dict[str, str]) -> None:
        self.plain = tiny_executor(FACTS, 0)
        self.pool = self.plain.pool
        self.pool.normal_(generator=torch.Generator().manual_seed(1))
        engines = Engines(torch.device("cpu"), 3, None)
        self.graphs = TorchExecutor(
            self.plain.stack, self.plain.moves, engines, variants, use_graphs=True
        )

    def error_of(self, queries: Queries, seed: int) -> float:
        step = step_of(queries, seed)
        rng = np.random.default_rng(seed)
        tokens: list[NDArray[np.int64]] = [
            rng.integers(0, 61, count) for count, _ in queries
        ]
        expected = self.plain.logits(step, tokens)
        self.pool[:, :, -1] = float("nan")  # nobody reads where padded rows write
        got = self.graphs.logits(step, tokens)
        assert got.shape == expected.shape
        return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("queries", [DECODES, MIXED])
def test_steps_in_pieces_give_what_they_give_alone(queries: Queries) -> None:
    pair = Pair(PLAIN)
    assert pair.graphs.variants["graphs"] == "in pieces"
    for seed in (0, 1):  # the second finds the rows of the first in its places
        assert pair.error_of(queries[seed:], seed) < 1e-5
    assert set(pair.graphs._pieces) == {
        padded_size(sum(count for count, _ in queries[seed:])) for seed in (0, 1)
    }


class Recording(TorchFunctionMode):
    """Operations on a CPU, run again over the same memory as a graph of CUDA is."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and remember its tensors."""
        del types
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run all again; what was new memory is written in its place."""
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def recorded(memory: object, run: Callable[[], Any]) -> tuple[Recording, Any]:
    del memory
    with Recording() as graph:
        found = run()
    return graph, found


def test_captured_pieces_read_and_write_in_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs know the memory of the first step only, and take turns in it."""
    monkeypatch.setattr("calibrate.replay.graphs.captured", recorded)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    pair = Pair(PLAIN)
    pair.graphs._memory = object()
    for seed, queries in enumerate((MIXED, DECODES, MIXED[:3], DECODES[:2], MIXED)):
        assert pair.error_of(queries, seed) < 1e-5
    pieces = list(pair.graphs._pieces.values())
    assert len(pieces) < 5
    layers = len(pair.plain.stack.layers)
    assert all(len(graph._graphs) == layers + 1 for graph in pieces)


def test_captured_decodes_read_what_a_later_step_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One graph of four rows: three sequences, then four others, then two."""
    made = stand_in(monkeypatch)
    monkeypatch.setattr("calibrate.replay.graphs.captured", recorded)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    pair = Pair(FLASH)
    pair.graphs._memory = object()
    for seed, queries in enumerate((DECODES, [*DECODES, (1, 90)], DECODES[1:])):
        assert pair.error_of(queries, seed) < 1e-5
    assert [shape.num_seqs for shape in pair.graphs._decodes] == [4, 2]
    assert len(made.plans) == 4  # to warm up and to capture, twice


def norm_in_place(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Norm as an engine's fused kernel does: the sum and the normed are overwritten."""
    hidden.copy_(torch_ops.rms_norm_add(hidden, residual, weight))
    return hidden


def test_kernels_that_norm_in_place_give_the_same() -> None:
    pair = Pair(PLAIN)
    fused: Any = ModuleType("fused")
    fused.__dict__.update(vars(torch_ops), rms_norm_add=norm_in_place)
    pair.graphs.stack = copy(pair.plain.stack)
    pair.graphs.stack.ops = fused
    assert pair.error_of(MIXED, 0) < 1e-5
    assert pair.error_of([(GRAPH_TOKENS, 520), (1, 9)], 1) < 1e-5


def test_decodes_are_one_graph_that_flash_attention_is_scheduled_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As engines capture it: splits and contexts at most what they ever are."""
    made = stand_in(monkeypatch)
    pair = Pair(FLASH)
    assert pair.graphs.variants["graphs"] == "decodes whole, prompts in pieces"
    assert pair.error_of(DECODES, 0) < 1e-5
    layers = len(pair.plain.stack.layers)
    assert len(made.plans) == 1
    assert len(made.calls) == layers
    (plan,) = made.plans
    assert plan["batch_size"] == 4  # the next captured size
    assert (plan["max_seqlen_q"], plan["num_splits"]) == (1, MAX_SPLITS)
    assert plan["max_seqlen_k"] == FACTS.max_model_len
    for call in made.calls:
        assert call["scheduler_metadata"].item() == 1
        assert call["max_seqlen_k"] == FACTS.max_model_len
    assert pair.error_of(DECODES[1:], 1) < 1e-5
    assert [shape.num_seqs for shape in pair.graphs._decodes] == [4, 2]


def test_prompts_are_pieces_around_attention_of_the_steps_own_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stand_in(monkeypatch)
    pair = Pair(FLASH)
    assert pair.error_of(MIXED, 0) < 1e-5
    (plan,) = made.plans
    assert plan["batch_size"] == len(MIXED)
    assert (plan["max_seqlen_q"], plan["max_seqlen_k"]) == (70, 300)
    assert plan["num_splits"] == MAX_SPLITS


def test_what_is_larger_than_all_graphs_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stand_in(monkeypatch)
    pair = Pair(FLASH)
    assert padded_size(GRAPH_TOKENS + 1) is None
    assert pair.error_of([(GRAPH_TOKENS, 520), (1, 9)], 0) < 1e-5
    assert not pair.graphs._pieces
    assert made.plans[0]["num_splits"] == 0  # it may allocate what it wants


def test_a_graph_that_gives_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step of each size is held against its kernels without a graph."""
    pair = Pair(PLAIN)
    assert pair.graphs.time(step_of(MIXED, 0), 1).wall_s > 0.0
    assert pair.graphs.worst_graph_error < 1e-5
    monkeypatch.setattr(
        "calibrate.replay.graphs.PiecesGraph.run",
        lambda self, attend, count: self._places.attended[:128].flatten(1).neg(),
    )
    with pytest.raises(ReplayError, match=r"step 1: .*; replay with --no-graphs"):
        pair.graphs.time(step_of(DECODES, 1), 1)


def test_captured_sizes_are_those_of_the_release() -> None:
    from sim.costs.roofline.graphs import release_sizes  # noqa: PLC0415
    from sim.scheduler.v1 import V1  # noqa: PLC0415

    assert release_sizes(V1.graphs, "0.26", 256, 8192) == GRAPH_SIZES
