"""Counts of draft tokens: columns of steps and requests, and a summary."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import schema
from sim.results.recording.recorder import Recorder, Recording
from sim.results.tables.steps import spans_s
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from sim.results.tables.steps import Batch
    from sim.scheduler.request import Request

_OF_STEPS = tuple(schema.DRAFT_STEPS)
_OF_REQUESTS = tuple(schema.DRAFT_REQUESTS)
_MOST_VERIFIED = 65_536
"""Verifications that are noted before they are counted."""


class DraftRecorder(Recorder):
    """A `Recorder` of an engine whose steps verify drafts.

    Parameters
    ----------
    num_speculative_tokens
        Most drafts of a request in a step.
    more
        As of `Recorder`.
    """

    def __init__(self, num_speculative_tokens: int, **more: Any) -> None:
        super().__init__(**more)
        self._steps = {name: array("q") for name in _OF_STEPS}
        self._verified = [array("q"), array("q"), array("q")]
        self._of_request = np.zeros((len(_OF_REQUESTS), 0), np.int64)
        self._num_by_accepted = np.zeros(num_speculative_tokens + 1, np.int64)
        self._draft_block_s = 0.0

    @property
    def step_kinds(self) -> Mapping[str, str]:
        return dict(super().step_kinds) | schema.DRAFT_STEPS

    def verified(
        self,
        step: int,
        verified: Iterable[tuple[Request, int, int]],
        num_draft_blocks: int,
        wasted: Container[Request] = (),
    ) -> None:
        """Take note of the drafts of a step, when its output has been processed.

        Parameters
        ----------
        step
            Its index; steps come in order.
        verified
            Request, drafts, and how many of them were accepted.
        num_draft_blocks
            Blocks that tables hold beyond the need of their tokens.
        wasted
            Requests that had ended before: their drafts are the step's, not theirs.
        """
        row = [0, 0, 0, num_draft_blocks]
        ids, all_tokens, all_accepted = self._verified
        for request, num_tokens, num_accepted in verified:
            row[0] += 1
            row[1] += num_tokens
            row[2] += num_accepted
            if request not in wasted:
                ids.append(request.request_id)
                all_tokens.append(num_tokens)
                all_accepted.append(num_accepted)
        if len(ids) >= _MOST_VERIFIED:
            self._count()
        for column, value in zip(self._steps.values(), row, strict=True):
            column.extend([0] * (step - len(column)))
            column.append(value)

    def so_far(self) -> tuple[int, int, list[int]]:
        """Return verifications, draft tokens, and by position how many were accepted.

        Drafts of requests that had ended before are left out.
        """
        self._count()
        num_at_least = self._num_by_accepted[::-1].cumsum()[::-1]
        num_tokens = int(self._of_request[1].sum())
        return int(num_at_least[0]), num_tokens, num_at_least[1:].tolist()

    def _count(self) -> None:
        """Add the noted counts to the numbers of requests and positions."""
        ids, tokens, accepted = (np.array(each, np.int64) for each in self._verified)
        num_requests = max(int(ids.max(initial=-1)) + 1, self._of_request.shape[1])
        more = num_requests - self._of_request.shape[1]
        self._of_request = np.pad(self._of_request, ((0, 0), (0, more))) + np.array(
            [
                np.bincount(ids, weights, num_requests).astype(np.int64)
                for weights in (None, tokens, accepted)
            ]
        )
        positions = len(self._num_by_accepted)
        self._num_by_accepted += np.bincount(accepted, minlength=positions)
        self._verified = [array("q") for _ in self._verified]

    def _emit(self, batch: Batch) -> None:
        steps = batch["step"]
        first, last = int(steps[0]), int(steps[-1])
        told: Batch = {}
        for name, column in self._steps.items():
            values = np.zeros(len(steps), np.int64)
            some = column[first : last + 1]
            values[: len(some)] = some
            told[name] = values
        held = told["num_draft_blocks"] * spans_s(batch)
        self._draft_block_s += float(held.sum())
        super()._emit(batch | told | _as_decodes(batch, told))

    def finish(self, now_s: float) -> Recording:
        recording = super().finish(now_s)
        table = recording.request_table
        ids = table["request_id"]
        columns = {}
        self._count()
        for name, column in zip(_OF_REQUESTS, self._of_request, strict=True):
            values = np.zeros(int(ids.max(initial=-1)) + 1, np.int64)
            values[: len(column)] = column[: len(values)]
            columns[name] = values[ids]
        table = table.with_columns(columns, schema.DRAFT_REQUESTS)
        return replace(recording, request_table=table)

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
        """Return the counts of verified drafts in a run that has ended.

        Verifications, drafts and accepted ones; verifications by accepted drafts;
        blocks held for drafts, times seconds.
        """
        return self._of_request.sum(1), self._num_by_accepted, self._draft_block_s


def draft_numbers(
    recorders: Sequence[DraftRecorder], num_usable_blocks: int, duration_s: float
) -> dict[str, Any]:
    """Return the counts of verified drafts, under the keys of ``vllm bench serve``.

    Parameters
    ----------
    recorders
        Of an engine, or of all ranks.
    num_usable_blocks
        Of the pool of each.
    duration_s
        Of the run.
    """
    sums, by_accepted, blocks_s = zip(
        *[each.counts() for each in recorders], strict=True
    )
    num_drafts, num_tokens, num_accepted = np.sum(sums, 0).tolist()
    reached = np.cumsum(np.sum(by_accepted, 0)[:0:-1])[::-1]
    per_position = (reached / max(num_drafts, 1)).tolist()
    whole_s = max(duration_s, 1e-300) * num_usable_blocks * len(recorders)
    return {
        "spec_decode_acceptance_rate": 100.0 * num_accepted / max(num_tokens, 1),
        "spec_decode_acceptance_length": 1.0 + num_accepted / max(num_drafts, 1),
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": num_tokens,
        "spec_decode_accepted_tokens": num_accepted,
        "spec_decode_per_position_acceptance_rates": per_position,
        "kv_cache_usage_drafts_mean": added(blocks_s) / whole_s,
    }


def _as_decodes(batch: Batch, told: Batch) -> Batch:
    """Return the counts of a step's work, whose verifications came as chunks."""
    num_drafts = told["num_drafts"]
    num_verified_tokens = num_drafts + told["num_draft_tokens"]
    return {
        "num_decodes": batch["num_decodes"] + num_drafts,
        "num_prefills": batch["num_prefills"] - num_drafts,
        "num_prefill_tokens": batch["num_prefill_tokens"] - num_verified_tokens,
    }


def draft_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts of draft tokens, where there are any."""
    if (length := summary.get("spec_decode_acceptance_length")) is None:
        return
    rate, num_tokens = (
        summary[f"spec_decode_{name}"] for name in ("acceptance_rate", "draft_tokens")
    )
    yield (
        "drafts",
        f"{rate:.1f}% of {num_tokens:,} tokens accepted, {length:.2f} tokens a "
        f"verification; {summary['kv_cache_usage_drafts_mean']:.2%} of KV blocks",
    )
