"""The NIXL connector of an installed vLLM, in pull mode: one side of a pair.

Its scheduler's side is theirs, unmodified. The clock that it reads is ours.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sim.scheduler.hosted.parts import HostedPart
from sim.scheduler.hosted.scheduler import request_key
from sim.scheduler.v1.connectors.base import Pull, StepPulls
from sim.scheduler.v1.connectors.settings import KVRole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.scheduler.hosted.api import VllmApi
    from sim.scheduler.hosted.engine import HostedEngine, HostedStep
    from sim.scheduler.hosted.scheduler import HostedSettings
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.base import TransferReport

_OTHER_SIDE = "other side"
"""The engine that a request does not name, as there is only one."""


class _Clock:
    """Stands for the module ``time`` in theirs: simulated seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        """Return when it is."""
        return self.now_s


def _clock_of(api: VllmApi) -> _Clock:
    """Return the clock that theirs reads; there is one in a process."""
    modules = [
        sys.modules[each.__module__]
        for each in (api.NixlBaseConnectorScheduler, api.NixlPullConnectorScheduler)
    ]
    clock = vars(modules[0])["time"]
    if not isinstance(clock, _Clock):
        clock = _Clock()
        for module in modules:
            vars(module)["time"] = clock
    return clock


class HostedPairConnector(HostedPart):
    """Their NIXL connector, of a producer or a consumer.

    Parameters
    ----------
    engine, settings
        The installed engine that has the connector, and its settings.
    requests
        All requests, by their ids.
    place
        See `HostedPart`.
    """

    def __init__(
        self,
        engine: HostedEngine,
        settings: HostedSettings,
        requests: dict[str, Request],
        place: int | None = None,
    ) -> None:
        transfer = settings.kv_transfer
        assert transfer is not None
        super().__init__(engine, place)
        self._requests = requests
        self._pulls = StepPulls()
        self._pulling: set[str] = set()
        self.requires_kv_delivery = transfer.kv_role is KVRole.PRODUCER
        self._clock = _clock_of(engine.api)
        self._offered: dict[str, tuple[list[int], ...]] = {}
        if self.requires_kv_delivery:
            self._listen()

    def _listen(self) -> None:
        """Note the blocks that theirs offers of each prompt that ends."""
        ends = self._engine.api.attribute(self._theirs, "request_finished")

        def end_and_note(request: Any, block_ids: Any) -> Any:
            ended = ends(request, block_ids)
            if ended[0]:
                self._offered[request.request_id] = ended[1]["remote_block_ids"]
            return ended

        self._theirs.request_finished = end_and_note

    def offered(self, request: Request) -> tuple[list[int], ...]:
        """Return the blocks of a prompt that theirs holds for others, by group."""
        return self._offered[request_key(request)]

    @property
    def awaits_transfers(self) -> bool:
        requests = self._engine.scheduler.requests.values()
        return bool(self._theirs._reqs_need_recv or self._pulling) or (
            self.requires_kv_delivery and any(each.is_finished() for each in requests)
        )

    def parameters(self, request: Request) -> Mapping[str, Any] | None:
        """Return the parameters that a proxy hands on, by their names."""
        given = request.kv_transfer_params
        if given is None or not given.get("do_remote_prefill"):
            return given
        source = given.get("remote_engine") or _OTHER_SIDE
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": given["remote_block_ids"],
            "remote_engine_id": source,
            "remote_request_id": f"{source}/{request_key(request)}",
            "remote_host": "localhost",
            "remote_port": 1,
            "tp_size": 1,
        }

    def begin(self, now_s: float, noted: StepPulls | None = None) -> StepPulls:
        self._clock.now_s = now_s
        self._pulls = StepPulls() if noted is None else noted
        return self._pulls

    def asked(self, step: HostedStep) -> None:
        pulls, requests = self._pulls, self._requests
        meta = self._metadata(step)
        pulls.sends = [
            (requests[key], expiry_s) for key, expiry_s in meta.reqs_to_send.items()
        ]
        for key, each in meta.reqs_to_recv.items():
            own, remote = (
                tuple(map(list, ids))
                for ids in (each.local_block_ids, each.remote.block_ids)
            )
            waits, source = each.awaiting_kvs, _source(each.remote.engine_id)
            pulls.pulls.append(Pull(requests[key], own, remote, waits, source))
            if waits:
                self._pulling.add(key)
        if meta.heartbeat_by_engine:
            pulls.heartbeat = {
                _source(source): [
                    requests[each.rpartition("/")[2]] for each in wanted.req_ids
                ]
                for source, wanted in meta.heartbeat_by_engine.items()
            }

    def told(
        self, report: TransferReport, now_s: float
    ) -> tuple[dict[str, Any], list[Request]]:
        self._clock.now_s = now_s  # requests that end now hold their blocks from now on
        moved = [request_key(each) for each in report.moved]  # walked in this order
        if self.requires_kv_delivery:
            return {"finished_sending": moved}, list(report.moved)
        self._pulling.difference_update(moved)
        # Blocks that were to be filled are told besides, as its worker does where all
        # layers read all tokens.
        tells_blocks = not self._engine.api.attribute(self._theirs, "_is_hma_required")
        invalid = {
            block.block_id
            for each in (report.failed if tells_blocks else ())
            for block in self._engine.tables(request_key(each))[0]
            if block.block_hash is None
        }
        told = {
            "finished_recving": moved,
            "failed_recving": {request_key(each) for each in report.failed},
            "invalid_block_ids": invalid,
        }
        return told, list(report.moved)


def _source(engine_id: str) -> str | None:
    """Return an engine's name; None for the only one."""
    return None if engine_id == _OTHER_SIDE else engine_id
