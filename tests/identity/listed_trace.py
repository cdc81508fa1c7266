"""A trace that stands in the configuration itself: small, whole and shareable.

Name it as ``workload.trace: {kind: tests/identity/listed_trace.py:ListedTrace,
requests: [...]}``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


class ListedTrace:
    """Requests as the configuration lists them.

    Parameters
    ----------
    requests
        Tables with ``at`` (seconds), ``prompt`` (segments ``[id, num_tokens]``),
        ``out`` (output tokens), ``seg`` (segment id of the output) and, if wanted,
        other fields of `RequestSpec`; in order of arrival.
    """

    def __init__(self, requests: list[dict[str, Any]]) -> None:
        self.requests = requests

    def read(self) -> Iterator[RequestSpec]:
        """See `workloads.traces.base.TraceReader`."""
        for position, request in enumerate(self.requests):
            facts = dict(request)
            yield RequestSpec(
                request_id=position,
                arrival_s=facts.pop("at"),
                prompt=tuple((each[0], each[1]) for each in facts.pop("prompt")),
                num_output_tokens=facts.pop("out"),
                output_segment=facts.pop("seg"),
                **facts,
            )
