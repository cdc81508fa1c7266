"""A connector of two: a CPU tier behind the pool of an engine of a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.scheduler.v1.connectors.base import Match

if TYPE_CHECKING:
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import (
        Batch,
        BlockIds,
        KVConnector,
        StepTransfers,
        TransferReport,
    )
    from sim.scheduler.v1.connectors.offloading import OffloadingConnector
    from sim.scheduler.v1.connectors.pulling import PairConnector


class MultiConnector:
    """Both connectors of an engine; the first one that has something of a head loads.

    ::

        look-up     asked in order, until one says to ask again: then the head waits
        load        by the first that has tokens; the others hear of none, so that a
                    consumer that loads out of its tier tells the producer to let go
        store       by all
        end         blocks are kept as long as one of them needs them

    Parameters
    ----------
    offloading, pairing
        The two.
    asks_tier_first
        In which order.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py``, in the role
    ``kv_both``, as blocks are filled on both sides. An offloading connector never keeps
    the blocks of a request that ends, so that no end is awaited twice.
    """

    def __init__(
        self,
        offloading: OffloadingConnector,
        pairing: PairConnector,
        *,
        asks_tier_first: bool,
    ) -> None:
        self.offloading = offloading
        self.pairing = pairing
        self._connectors: tuple[KVConnector, ...] = (
            (offloading, pairing) if asks_tier_first else (pairing, offloading)
        )
        self._chosen: dict[Request, KVConnector] = {}

    # -- what it is -----------------------------------------------------------

    fills_blocks = True

    @property
    def requires_kv_delivery(self) -> bool:
        return any(each.requires_kv_delivery for each in self._connectors)

    @property
    def keeps_still(self) -> bool:
        return all(each.keeps_still for each in self._connectors)

    @property
    def has_pending_work(self) -> bool:
        return any(each.has_pending_work for each in self._connectors)

    @property
    def is_quiet(self) -> bool:
        return all(each.is_quiet for each in self._connectors)

    @property
    def ends_quietly(self) -> bool:
        return all(each.ends_quietly for each in self._connectors)

    def keeps_loads(self, request: Request) -> bool:
        chosen = self._chosen.get(request)
        return chosen is not None and chosen.keeps_loads(request)

    def summary(self) -> dict[str, Any]:
        return self.pairing.summary() | self.offloading.summary()

    # -- a request's life -----------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        for each in self._connectors:
            each.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> Match:
        found = Match(0, is_async=False)
        for each in self._connectors:
            match = each.get_num_new_matched_tokens(request, num_computed_tokens)
            if match.num_tokens is None:
                return match
            if match.num_tokens and not found.num_tokens:
                self._chosen[request] = each
                found = match
        return found

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        chosen = self._chosen.get(request)
        for each in self._connectors:
            num_tokens = num_external_tokens if each is chosen else 0
            each.update_state_after_alloc(request, block_ids, num_tokens)

    def build_connector_meta(self, batch: Batch) -> StepTransfers:
        asked = self.offloading.build_connector_meta(batch)
        pulls = self.pairing.build_connector_meta(batch)
        asked.pulls, asked.sends = pulls.pulls, pulls.sends
        asked.heartbeat = pulls.heartbeat
        return asked

    def request_finished(
        self, request: Request, block_ids: BlockIds, num_computed_tokens: int
    ) -> bool:
        self._chosen.pop(request, None)
        ended = [
            each.request_finished(request, block_ids, num_computed_tokens)
            for each in self._connectors
        ]
        return any(ended)

    def update_connector_output(self, report: TransferReport) -> list[Request]:
        loaded = self.offloading.update_connector_output(report)
        self.pairing.note_loaded(loaded)
        return [*loaded, *self.pairing.update_connector_output(report)]

    # -- proof ----------------------------------------------------------------

    def check(self) -> None:
        for each in self._connectors:
            each.check()
