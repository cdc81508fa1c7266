"""Whether a log is executed as it is meant: all logits against dense attention.

A tiny stack executes every step: prompts in chunks, decodes, swaps, copies on write,
recomputations, shared blocks. Each logit vector it gives must be that of one dense
forward pass over the sequence's own tokens, which knows no blocks. Pools begin poisoned
with NaN, so that a block that is read before it was written shows, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from calibrate.replay.setup import tiny_executor
from calibrate.replay.stack import Inputs
from calibrate.replay.tokens import MadeUpTexts, ReplayError, TokenPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from calibrate.replay.log import Facts, Query, Step
    from calibrate.replay.stack import Stack
    from calibrate.replay.tokens import Texts

_CHUNK = 256
"""Queries whose scores are held at once."""
TOLERANCE = 1e-9
"""Of the relative error; both ways compute in double precision."""


def dense_logits(stack: Stack, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the logits at every position of a text, (num_tokens, vocabulary)."""
    count = len(tokens)
    at = torch.arange(count)
    inputs = Inputs(torch.from_numpy(tokens), at, at, at)
    keys: list[tuple[torch.Tensor, torch.Tensor]] = []
    geometry = stack.geometry
    group = geometry.num_heads // geometry.num_kv_heads

    def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
        key, value = (part.repeat_interleave(group, dim=1) for part in keys[layer])
        rows = zip(query.split(_CHUNK), at.split(_CHUNK), strict=True)
        return torch.cat([_attended(part, key, value, mine) for part, mine in rows])

    def write(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        del layer
        keys.append((key, value))

    logits = stack.forward(inputs, write, attend)
    return np.asarray(logits.numpy(), dtype=np.float64)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    last = int(at[-1]) + 1
    scores = torch.einsum("qhd,khd->hqk", query, key[:last]) * query.shape[-1] ** -0.5
    hidden = torch.arange(last) > at[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value[:last])


@dataclass(slots=True)
class Truth:
    """How much was compared, and how far off it was at most."""

    num_steps: int = 0
    num_logits: int = 0
    """Vectors compared, one a query."""
    worst_error: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)


class TruthCheck:
    """Executes a schedule from its beginning on a tiny stack and compares logits.

    Steps are filled up as graphs are, unless `use_graphs` says otherwise.
    """

    def __init__(
        self,
        facts: Facts,
        texts: Texts | None = None,
        seed: int = 0,
        *,
        use_graphs: bool = True,
    ) -> None:
        self.executor = tiny_executor(facts, seed, torch.float64, use_graphs=use_graphs)
        self._vocab_size = self.executor.stack.geometry.vocab_size
        self.tokens = TokenPool(facts, texts or MadeUpTexts())
        self.truth = Truth()
        self._seen: dict[str, dict[int, tuple[int, NDArray[np.float64]]]] = {}

    def run(self, steps: Iterable[Step]) -> Truth:
        """Execute all steps, and return what was compared."""
        for step in steps:
            self._step(step)
        for name in list(self._seen):
            self._compare(name)
        return self.truth

    def _step(self, step: Step) -> None:
        for name in step.left:
            self._compare(name)
            self.tokens.forget(name)
        self.tokens.move(step)
        written = [ids % self._vocab_size for ids in self.tokens.write(step)]
        logits = self.executor.logits(step, written)
        for query, row in zip(step.queries, logits, strict=True):
            self._note(query, step.number, row)
        self.truth.num_steps += 1
        self.truth.kinds[step.kind] = self.truth.kinds.get(step.kind, 0) + 1

    def _note(self, query: Query, number: int, row: NDArray[np.float64]) -> None:
        seen = self._seen.setdefault(query.name, {})
        if query.context - 1 in seen:  # computed once more: it must be what it was
            self._hold(query.name, number, row, seen[query.context - 1][1])
        seen[query.context - 1] = number, row

    def _compare(self, name: str) -> None:
        seen = self._seen.pop(name, None)
        if not seen:
            return
        expected = dense_logits(
            self.executor.stack, self.tokens.text(name) % self._vocab_size
        )
        for position, (number, row) in seen.items():
            self._hold(name, number, row, expected[position])

    def _hold(
        self,
        name: str,
        number: int,
        row: NDArray[np.float64],
        expected: NDArray[np.float64],
    ) -> None:
        error = float(np.linalg.norm(row - expected) / np.linalg.norm(expected))
        self.truth.num_logits += 1
        if not error <= TOLERANCE:
            raise ReplayError(
                f"step {number}: the logits of {name} are off by {error:.1e} from "
                f"dense attention's (at most {TOLERANCE:.0e}); its blocks do not hold "
                "its keys"
            )
        self.truth.worst_error = max(self.truth.worst_error, error)
