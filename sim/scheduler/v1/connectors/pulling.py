"""Pairs of engines: one computes prompts, the other one reads their blocks and decodes.

A request goes through both. The producer computes its prompt and one token, and holds
the blocks; the consumer reads them as a load that the request waits for. In
``kv_transfer_params`` a request says ``do_remote_decode`` to a producer, and
``do_remote_prefill`` with ``remote_block_ids``, by group, to a consumer, and the
``remote_engine`` that holds them where there are several.

Source: vLLM 0.33, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl``:
``base_scheduler.py`` and ``pull_scheduler.py``.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Union

from cache.errors import require
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.connectors.base import Match, Pull, StepPulls

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import Batch, BlockIds, TransferReport
    from sim.scheduler.v1.connectors.exchange import Exchange, GroupBlockIds
    from sim.scheduler.v1.connectors.settings import KVTransferSettings

_NOTHING = Match(0, is_async=False)
_SERVED = RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED

PairConnector = Union["ProducerConnector", "ConsumerConnector"]
"""One side of a pair."""


class ProducerConnector:
    """Holds the blocks of prompts that were computed for a consumer.

    Parameters
    ----------
    settings
        Length of the lease.
    exchange
        Which blocks of a prompt it offers.

    Attributes
    ----------
    exchange
        See above.
    held
        Requests whose blocks are held, in order of finishing.
    """

    fills_blocks = False
    requires_kv_delivery = True
    keeps_still = False
    ends_quietly = False
    offloading = None

    def __init__(self, settings: KVTransferSettings, exchange: Exchange) -> None:
        self.exchange = exchange
        self._lease_s = settings.kv_lease_duration
        self._sends: list[tuple[Request, float]] = []
        self.held: dict[Request, None] = {}

    @property
    def pairing(self) -> ProducerConnector:
        return self

    def keeps_loads(self, request: Request) -> bool:
        del request
        return False

    @property
    def has_pending_work(self) -> bool:
        return bool(self.held)

    @property
    def is_quiet(self) -> bool:
        return not self._sends

    def summary(self) -> dict[str, int]:
        return {}

    def on_new_request(self, request: Request) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            num_tokens = self.exchange.num_handed_on(request.num_prompt_tokens)
            if num_tokens < request.num_prompt_tokens:
                request.end_after_prefill_of(num_tokens)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> Match:
        del request, num_computed_tokens
        return _NOTHING

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Do nothing: nothing is loaded here."""

    def build_connector_meta(self, batch: Batch) -> StepPulls:
        del batch
        sends, self._sends = self._sends, []
        return StepPulls(sends=sends)

    def request_finished(
        self, request: Request, block_ids: BlockIds, num_computed_tokens: int
    ) -> bool:
        del num_computed_tokens
        parameters = request.kv_transfer_params or {}
        if not (
            parameters.get("do_remote_decode")
            and request.status in _SERVED
            and block_ids()
        ):
            return False
        self._sends.append((request, request.finish_s + self._lease_s))
        self.held[request] = None
        return True

    def update_connector_output(self, report: TransferReport) -> list[Request]:
        for request in report.moved:
            del self.held[request]
        return list(report.moved)

    def note_loaded(self, requests: Iterable[Request]) -> None:
        """Do nothing: what another connector has loaded is held for nobody."""

    def check(self) -> None:
        """Prove that it holds blocks of served requests only.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        require(
            all(request.status in _SERVED for request in self.held),
            "a producer holds blocks of a request that was not served",
        )


class ConsumerConnector:
    """Reads the blocks of prompts that a producer has computed, once a request.

    Parameters
    ----------
    settings
        Length of the producer's lease.
    exchange
        Which blocks of a prompt it reads.

    Attributes
    ----------
    exchange
        See above.
    awaited
        Requests whose blocks a producer holds: they have neither been read nor ended.
    """

    fills_blocks = True
    requires_kv_delivery = False
    keeps_still = False
    ends_quietly = True
    offloading = None

    def __init__(self, settings: KVTransferSettings, exchange: Exchange) -> None:
        self.exchange = exchange
        self._heartbeat_s = settings.kv_lease_duration // 6
        self._last_heartbeat_s = 0.0
        self._unread: set[Request] = set()  # not even begun
        self._pulls: list[Pull] = []
        self._pulling: set[Request] = set()
        self.awaited: dict[Request, None] = {}

    @property
    def pairing(self) -> ConsumerConnector:
        return self

    def keeps_loads(self, request: Request) -> bool:
        del request
        return False

    @property
    def has_pending_work(self) -> bool:
        return bool(self._pulls or self._pulling)

    @property
    def is_quiet(self) -> bool:
        return not self._pulls  # and no heartbeat is due, which is a matter of time

    @property
    def asks(self) -> bool:
        """Whether the next call may begin a pull."""
        return bool(self._unread or self._pulls)

    @property
    def next_heartbeat_s(self) -> float:
        """When a call says again what is awaited, in seconds."""
        return self._last_heartbeat_s + self._heartbeat_s if self.awaited else inf

    def summary(self) -> dict[str, int]:
        return {}

    def on_new_request(self, request: Request) -> None:
        parameters = request.kv_transfer_params or {}
        if parameters.get("do_remote_prefill"):
            self.awaited[request] = None
            self._unread.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> Match:
        num_tokens = self.exchange.num_handed_on(request.num_prompt_tokens)
        num_tokens -= num_computed_tokens
        if request not in self._unread or num_tokens <= 0:
            return _NOTHING
        return Match(num_tokens, is_async=True)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        del block_ids
        if request not in self._unread:
            return
        self._unread.remove(request)
        if num_external_tokens:  # behind the hit in the own pool, which is whole blocks
            num_tokens = self.exchange.num_handed_on(request.num_prompt_tokens)
            num_local_tokens = num_tokens - num_external_tokens
            self._pull(request, self.exchange.wanted(request, num_local_tokens))
        else:
            self._let_go(request)

    def _pull(self, request: Request, block_ids: GroupBlockIds) -> None:
        self._pulls.append(_pull_of(request, block_ids, waits=True))
        self._pulling.add(request)

    def _let_go(self, request: Request) -> None:
        """Tell the producer that its blocks are not wanted."""
        self._pulls.append(_pull_of(request, (), waits=False))

    def build_connector_meta(self, batch: Batch) -> StepPulls:
        pulls, self._pulls = self._pulls, []
        heartbeat = None
        if self.awaited and batch.now_s - self._last_heartbeat_s >= self._heartbeat_s:
            self._last_heartbeat_s = batch.now_s
            heartbeat = self._awaited_by_engine()
        return StepPulls(pulls=pulls, heartbeat=heartbeat)

    def _awaited_by_engine(self) -> dict[Any, list[Request]]:
        found: dict[Any, list[Request]] = {}
        for request in self.awaited:
            source = (request.kv_transfer_params or {}).get("remote_engine")
            found.setdefault(source, []).append(request)
        return found

    def request_finished(
        self, request: Request, block_ids: BlockIds, num_computed_tokens: int
    ) -> bool:
        del block_ids, num_computed_tokens
        self.awaited.pop(request, None)
        if request in self._unread:  # the producer is to let go of its blocks
            self._unread.remove(request)
            self._let_go(request)
        return False

    def update_connector_output(self, report: TransferReport) -> list[Request]:
        for request in report.moved:
            self._pulling.remove(request)
        self.note_loaded(report.moved)
        return list(report.moved)

    def note_loaded(self, requests: Iterable[Request]) -> None:
        """Note requests whose loads have ended, wherever from: none is awaited."""
        for request in requests:
            self.awaited.pop(request, None)

    def check(self) -> None:
        """Prove that what has not begun to be read is awaited.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        require(
            self._unread <= self.awaited.keys(),
            "a consumer would read what it does not await",
        )


def _pull_of(request: Request, block_ids: GroupBlockIds, *, waits: bool) -> Pull:
    parameters = request.kv_transfer_params or {}
    remote_block_ids = tuple(parameters.get("remote_block_ids", ()))
    source = parameters.get("remote_engine")
    return Pull(request, block_ids, remote_block_ids, waits, source)
