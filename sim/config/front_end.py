"""The table ``front_end``: time between the client and the engine, both ways."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from sim.config.types import ConfigTable
from sim.errors import SchedulerError
from sim.scheduler.v1.dialect import FIRST_ASYNC_MINOR, dialect_of
from workloads.sums import added

Seconds = Annotated[float, Field(ge=0, le=10)]

FRONT_END_S: Final = 6.2e-3
"""Seconds between a client of HTTP and the engine, there and back, from 0.14 on.

The median TTFT of Llama-2-7B on an H100 (vLLM 0.15.1, 5 and 10 requests/s) is 6.1 and
6.3 ms above that of steps scheduled ahead. It rests on one run; others of its kind
(tensor parallel) give 6.5 to 9.8 ms. How it divides is not known: half each way.
"""
_INTERVAL_S: Final = [6.1e-3, 9.8e-3]
_SOURCE: Final = "TTFT of Llama-2-7B, H100, vLLM 0.15.1 over HTTP: one run"
NOT_LOOKED_AT: Final = {
    "client_to_queue_s": 0.0,
    "token_to_client_s": 0.0,
    "source": "not looked at: times are the engine's (see front_end)",
}
"""Provenance of a run without the table."""
_UNKNOWN: Final = "no public figure for this release: zero"


class FrontEndConfig(ConfigTable):
    """Seconds from the client to the queue, and from a token to the client.

    None is half of `FRONT_END_S` for releases from 0.14 on, zero for earlier ones.
    """

    client_to_queue_s: Seconds | None = None
    token_to_client_s: Seconds | None = None

    def total_s(self, engine_version: str) -> float:
        """Return both ways together, in seconds."""
        return added(self._ways_s(engine_version))

    def describe(self, engine_version: str) -> dict[str, Any]:
        """Return both times, their source and its interval."""
        there_s, back_s = self._ways_s(engine_version)
        told = {"client_to_queue_s": there_s, "token_to_client_s": back_s}
        given = (self.client_to_queue_s, self.token_to_client_s)
        if None not in given:
            return told | {"source": "given"}
        if not _is_known(engine_version):
            return told | {"source": _UNKNOWN}
        return told | {"source": _SOURCE, "interval_of_both_s": _INTERVAL_S}

    def _ways_s(self, engine_version: str) -> tuple[float, float]:
        half_s = FRONT_END_S / 2 if _is_known(engine_version) else 0.0
        there_s, back_s = self.client_to_queue_s, self.token_to_client_s
        return (
            half_s if there_s is None else there_s,
            half_s if back_s is None else back_s,
        )


def _is_known(engine_version: str) -> bool:
    try:
        return dialect_of(engine_version).minor >= FIRST_ASYNC_MINOR
    except SchedulerError:  # no release of V1
        return False
