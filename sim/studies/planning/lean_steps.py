"""The steps of a trial: only the columns that plans read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.results.step_table import Batch

COLUMNS = (
    "start_s",
    "latency_s",
    "gemm_s",
    "prefill_attention_s",
    "decode_attention_s",
    "head_s",
    "allreduce_s",
    "swap_s",
    "copy_s",
    "host_s",
    "num_running",
    "num_waiting",
    "num_batched_tokens",
    "kv_cache_usage",
)


class LeanSteps:
    """Sink and table of steps in memory: 112 bytes a step instead of 250.

    An engine that is hardly used takes millions of steps.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._batches: list[Batch] = []

    def write(self, batch: Batch) -> bool:
        """See `sim.results.step_table.StepSink.write`; what is kept is copied."""
        self._batches.append({name: batch[name].copy() for name in COLUMNS})
        self.num_steps += len(batch["start_s"])
        return False

    def close(self) -> LeanSteps:
        """See `sim.results.step_table.StepSink.close`."""
        return self

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """See `sim.results.step_table.StepTable.batches`."""
        for batch in self._batches:
            yield {name: batch[name] for name in columns}
