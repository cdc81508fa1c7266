"""Steps for a recorder, told one by one or in stretches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from sim.costs.linear import LinearCost
from sim.results.recording.step_columns import CHUNK_ROWS
from sim.results.recording.step_rows import pack_facts, pack_stretch
from sim.scheduler.base import CacheUsage
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from sim.costs.base import CostModel, StepCost
    from sim.results.recording.recorder import Recorder

COST = LinearCost(
    base_s=1.1e-3,
    decode_s=1.3e-5,
    prefill_s=1e-4,
    prefill_token_s=1.7e-6,
    decode_context_token_s=1.9e-9,
)
NUM_USABLE_BLOCKS = 997
BLOCK_SIZE = 16


class StepByStep:
    """The same prices, from a model that knows one step at a time."""

    def __init__(self, outside: int = 10**9) -> None:
        self.outside = outside

    def step(self, shape: BatchShape) -> StepCost:
        """Price a step; so many tokens of context are outside of the data."""
        cost = COST.step(shape)
        outside = shape.num_decode_context_tokens >= self.outside
        return cost._replace(extrapolated=outside)

    def describe(self) -> dict[str, Any]:
        """Name nothing."""
        return {}


@dataclass(frozen=True)
class Told:
    """A busy step (`num_new_blocks` empty), or a stretch of quiet ones."""

    num_decodes: int
    num_context_tokens: int
    num_waiting: int
    num_prefill_tokens: int
    num_new_blocks: tuple[int, ...]
    num_shared_blocks: int
    pause_s: float


told = st.builds(
    Told,
    num_decodes=st.integers(1, 400),
    num_context_tokens=st.integers(400, 10**7),
    num_waiting=st.integers(0, 10**4),
    num_prefill_tokens=st.integers(2, 8192),
    num_new_blocks=st.lists(st.integers(0, 9), max_size=12).map(tuple),
    num_shared_blocks=st.integers(0, 40),
    pause_s=st.sampled_from([0.0, 0.25, 1e-7]),
)


class Teller:
    """Writes a recorder's log as the engine does, and knows where the clock stands."""

    def __init__(
        self,
        recorder: Recorder,
        cost: CostModel,
        *,
        quietly: bool,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self.chunk_rows = chunk_rows
        self.recorder = recorder
        self.log = recorder.steps
        self.log.describe_pool(NUM_USABLE_BLOCKS, BLOCK_SIZE)
        self.prices_columns = self.log.price_by(cost)
        self.cost = cost
        self.quietly = quietly
        self.step = 0
        self.now_s = 0.5
        self.num_blocks = 30

    def tell(self, each: Told) -> None:
        """Tell of a busy step or of a stretch."""
        self.now_s += each.pause_s
        if not each.num_new_blocks:
            shape = BatchShape(
                each.num_decodes,
                each.num_context_tokens,
                1,
                each.num_prefill_tokens,
                each.num_prefill_tokens,
                0,
                num_copied_blocks=3,
            )
            self._step(each, shape, 0)
        elif self.quietly:
            self._quiet(each)
        else:
            for i, num_new in enumerate(each.num_new_blocks):
                num_tokens = each.num_context_tokens + i * each.num_decodes
                shape = BatchShape(each.num_decodes, num_tokens, 0, 0, 0, 0)
                self._step(each, shape, num_new)

    def _step(self, each: Told, shape: BatchShape, num_new: int) -> None:
        self.num_blocks = self.num_blocks + num_new
        usage = self._usage(each, shape.num_decode_context_tokens)
        cost = self.cost.step(shape)
        self._flush_when_full()
        if not self.prices_columns:
            self.log.costs.append(cost)
        queues = (each.num_decodes, each.num_waiting, 0)
        facts = (self.step, self.now_s, *queues, *shape, *usage, 0, 0, 0)
        self.log.packed.append(pack_facts(*facts))
        self.now_s += cost.total_s
        self.log.ends_s.append(self.now_s)
        self.step += 1

    def _usage(self, each: Told, num_tokens: int) -> CacheUsage:
        return CacheUsage(
            self.num_blocks,
            self.num_blocks + each.num_shared_blocks,
            num_tokens - each.num_shared_blocks * BLOCK_SIZE,
            num_tokens,
            self.num_blocks / NUM_USABLE_BLOCKS,
            0.0,
        )

    def _flush_when_full(self) -> None:
        if len(self.log.ends_s) >= self.chunk_rows:
            self.log.flush()

    def _quiet(self, each: Told) -> None:
        now_s, end_s = self.now_s, []
        for i in range(len(each.num_new_blocks)):
            num_tokens = each.num_context_tokens + i * each.num_decodes
            shape = BatchShape(each.num_decodes, num_tokens, 0, 0, 0, 0)
            now_s += self.cost.step(shape).total_s
            end_s.append(now_s)
        self.stretch(each, end_s)

    def stretch(self, each: Told, end_s: list[float]) -> None:
        """Write quiet steps that end at these times."""
        self._flush_when_full()
        num_logical_blocks = self.num_blocks + each.num_shared_blocks
        self.log.packed.append(
            pack_stretch(
                self.step,
                self.now_s,
                each.num_waiting,
                each.num_decodes,
                each.num_context_tokens,
                self.num_blocks,  # as before its first step
                num_logical_blocks,
                0,
                len(end_s),
            )
        )
        self.log.ends_s.extend(end_s)
        self.log.new_blocks.extend(each.num_new_blocks)
        self.num_blocks += sum(each.num_new_blocks)
        self.step += len(end_s)
        self.now_s = end_s[-1]
