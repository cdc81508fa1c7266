"""The way of a request through the front end: what clients wait for besides."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from sim.config.types import ConfigTable
from sim.errors import SchedulerError
from sim.scheduler.v1.dialect import FIRST_ASYNC_MINOR, dialect_of

Seconds = Annotated[float, Field(ge=0, le=10)]

FRONT_END_S: Final = 6.2e-3
"""Seconds between a client of HTTP and the engine, there and back, from 0.14 on.

What the TTFT of Llama-2-7B on an H100 (vLLM 0.15.1, 5 and 10 requests/s) has in the
median beyond steps scheduled ahead: 6.1 and 6.3 ms. One run says it; the others of its
kind (tensor parallel) say 6.5 to 9.8 ms. How it divides is not known: half each way.
"""
_INTERVAL_S: Final = [6.1e-3, 9.8e-3]
_SOURCE: Final = "TTFT of Llama-2-7B, H100, vLLM 0.15.1 over HTTP: one run"
NOT_LOOKED_AT: Final = {
    "client_to_queue_s": 0.0,
    "token_to_client_s": 0.0,
    "source": "not looked at: times are the engine's (see front_end)",
}
"""What a run without the table says."""
_UNKNOWN: Final = "no public figure for this release: zero"


class FrontEndConfig(ConfigTable):
    """Seconds from the client to the queue, and from a token to the client.

    None is what is known of the release, see `FRONT_END_S`; before, zero.
    """

    client_to_queue_s: Seconds | None = None
    token_to_client_s: Seconds | None = None

    def total_s(self, engine_version: str) -> float:
        """Return both ways together, in seconds."""
        return sum(self._ways_s(engine_version))

    def describe(self, engine_version: str) -> dict[str, Any]:
        """Return what was used, and where it comes from."""
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
