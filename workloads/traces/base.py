"""The roles of trace readers and writers; their shared parts are imported from here.

Segment ids, one scheme for all readers and for synthetic traffic::

    even, 2 * k       text of prompts; k is the trace's own identity of it
    odd,  2 * i + 1   text generated for request i

so that a prompt and an output can never be taken for the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads.arrivals.base import MAX_REQUESTS
from workloads.errors import WorkloadError
from workloads.traces.parsing.files import (
    format_error,
    numbered_lines,
    opened,
    trace_path,
)
from workloads.traces.parsing.requests import columns_in_arrival_order, in_arrival_order
from workloads.traces.parsing.values import length_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from workloads.spec import RequestSpec

__all__ = [
    "TraceReader",
    "TraceWriter",
    "check_number",
    "columns_in_arrival_order",
    "counted",
    "format_error",
    "in_arrival_order",
    "length_problem",
    "numbered_lines",
    "opened",
    "trace_path",
]


@runtime_checkable
class TraceReader(Protocol):
    """A recorded trace."""

    def read(self) -> Iterator[RequestSpec]:
        """Return the requests in arrival order.

        Returns
        -------
        iterator of RequestSpec
            Arrivals in seconds, at least 0 and never falling; the first arrival of
            a recording is time 0. `request_id` is the position, which `previous_id`
            refers to. `workloads.workload.TraceWorkload` numbers the requests anew.

        Raises
        ------
        WorkloadError
            If the file cannot be read.
        TraceFormatError
            If it breaks its format; names file and line.

        Warns
        -----
        WorkloadWarning
            If rows were not sorted by time, or some were left out.
        """


def check_number(reader: TraceReader, number: int) -> None:
    """Refuse more requests of a trace than a workload may hold.

    A reader of a user's own may have no end, and would be read until memory has.
    """
    if number > MAX_REQUESTS:
        name = type(reader).__name__
        raise WorkloadError(
            f"a workload may hold {MAX_REQUESTS} requests; {name}.read yields more; "
            f"let it end, or set limit"
        )


def counted(reader: TraceReader, read: Iterable[RequestSpec]) -> Iterator[RequestSpec]:
    """Yield what a reader has read, as long as `check_number` lets it."""
    for number, request in enumerate(read, 1):
        check_number(reader, number)
        yield request


@runtime_checkable
class TraceWriter(Protocol):
    """A format that requests can be written in."""

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        """Return the facts of these requests that the format cannot hold, a line each.

        Raises
        ------
        WorkloadError
            If something that is not known would have to be made up.
        """

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        """Yield the lines of the file, each with its end."""
