"""The V1 scheduler of an installed vLLM, 0.11 to 0.33."""

from __future__ import annotations

from dataclasses import replace

from sim.scheduler.generation import Parts
from sim.scheduler.v1 import V1


def _parts() -> Parts:
    from sim.scheduler.hosted.batch_queue import QueuedVllmScheduler
    from sim.scheduler.hosted.connectors import (
        ConnectedVllmScheduler,
        QueuedConnectedVllmScheduler,
        SpeculativeConnectedVllmScheduler,
    )
    from sim.scheduler.hosted.scheduler import HostedSettings, VllmScheduler
    from sim.scheduler.hosted.speculative import SpeculativeVllmScheduler
    from sim.scheduler.log.v1 import VllmLog

    return Parts(
        VllmScheduler,
        HostedSettings,
        VllmLog,
        queued=QueuedVllmScheduler,
        speculative=SpeculativeVllmScheduler,
        speculative_connected=SpeculativeConnectedVllmScheduler,
        connected=ConnectedVllmScheduler,
        queued_connected=QueuedConnectedVllmScheduler,
    )


def _release() -> str:
    from sim.scheduler.hosted.api import installed_version, nearest_release

    return nearest_release(installed_version())


VLLM = replace(
    V1,
    name="vllm",
    parts=_parts,
    engine_version="the installed release",
    versions=r"0\.(1[1-9]|2\d|3[0-3])(\.\d{1,3})?",
    versions_in_words="0.11 to 0.33",
    # it runs as it is installed: no policies of one's own
    keys=V1.keys - {"admission", "evictor", "preemption_victim"},
    keeps_decode_clock=False,
    has_batch_queue=False,
    has_ranks=False,
    has_kv_connectors=False,
    release=_release,
)
