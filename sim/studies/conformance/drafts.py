"""Drafts of a decision workload: which are proposed, and which are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sim.scheduler.v1.speculative_config import SpeculativeConfig, SpeculativeMethod
from sim.studies.conformance.fields import Positive, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.studies.conformance.requests import DecisionRequest

_MASK = 0x7FFFFFFF


class Speculative(Table):
    """Which drafts are proposed; vLLM's keys."""

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"]
    num_speculative_tokens: Positive
    disable_lookahead_block_hashes: bool = False
    disable_eagle_block_drop: bool = False

    @property
    def finds_drafts(self) -> bool:
        """Whether drafts are looked up, so that there may be fewer, or none."""
        return self.method == "ngram"

    def config(self) -> SpeculativeConfig:
        """Return the configuration that schedulers take."""
        return SpeculativeConfig(
            **self.model_dump() | {"method": SpeculativeMethod(self.method)}
        )


class SeededAcceptance:
    """Drafts by the seeds of a workload's requests (`workloads.acceptance.Acceptance`).

    Parameters
    ----------
    requests
        In order of request id.
    finds_drafts
        Whether drafts are looked up, so that there may be fewer, or none.
    """

    def __init__(
        self, requests: Sequence[DecisionRequest], *, finds_drafts: bool
    ) -> None:
        self._requests = requests
        self._finds_drafts = finds_drafts

    def num_proposed(self, request_index: int, position: int, most: int) -> int:
        if not self._finds_drafts:
            return most
        request = self._requests[request_index]
        drawn = _mixed(request.acc_seed * 83492791, position * 2654435761)
        if drawn % 100 >= request.draft_pct:
            return 0
        return 1 + drawn // 100 % most

    def num_accepted(self, request_index: int, position: int, num_drafts: int) -> int:
        request = self._requests[request_index]
        for index in range(num_drafts):
            drawn = _mixed(request.acc_seed * 73856093, (position + index) * 19349663)
            if drawn % 100 >= request.acc_pct:
                return index
        return num_drafts


def _mixed(left: int, right: int) -> int:
    return (left ^ right) & _MASK
