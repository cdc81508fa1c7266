"""The shape of sessions: turns, think times, and how the context grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workloads.chains import has_chains
from workloads.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Requests that belong together, and the chains in which they wait.

    A session is what a trace names so, or else a chain: a request that waits for none
    and all that wait for it, directly or not.
    """

    turns: NDArray[np.int64]
    """Requests of each session, int64 of shape ``(num_sessions,)``."""
    num_chained: int
    """Requests that wait for another."""
    delays_s: NDArray[np.float64]
    """Time from the end of the request before to the sending, of each that waits."""
    growth_tokens: NDArray[np.int64]
    """How much longer its prompt is than that of the request before, of each that
    waits; negative where a session begins its context anew."""
    quoted: int
    """Requests that wait and whose prompt quotes the answer that they waited for."""

    @property
    def num_sessions(self) -> int:
        """Sessions, those of one request included."""
        return len(self.turns)


def session_shape(requests: Sequence[RequestSpec]) -> SessionShape | None:
    """Return the shape of sessions, or None where requests have none.

    Parameters
    ----------
    requests
        In order of arrival, `request_id` being the position.
    """
    if isinstance(requests, RequestColumns):
        return None
    if not has_chains(requests) and all(r.session_id is None for r in requests):
        return None
    roots: list[int | str] = []
    delays_s, growth, num_quoted = [], [], 0
    for request in requests:
        previous_id = request.previous_id
        if previous_id is None:
            roots.append(request.request_id)
        else:
            before = requests[previous_id]
            roots.append(roots[previous_id])
            delays_s.append(request.delay_s)
            growth.append(request.num_prompt_tokens - before.num_prompt_tokens)
            num_quoted += any(key == before.output_segment for key, _ in request.prompt)
        if request.session_id is not None:
            roots[-1] = f"session {request.session_id}"
    return SessionShape(
        turns=np.array(list(Counter(roots).values()), dtype=np.int64),
        num_chained=len(delays_s),
        delays_s=np.array(delays_s, dtype=np.float64),
        growth_tokens=np.array(growth, dtype=np.int64),
        quoted=num_quoted,
    )
