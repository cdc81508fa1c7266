"""Workloads: requests in arrival order, from a trace or from distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from workloads._checks import MAX_TOKENS, between, finite, positive, whole
from workloads.arrivals import (
    MAX_REQUESTS,
    ArrivalProcess,
    arrival_times_s,
    check_stop,
)
from workloads.columns import RequestColumns, SpecIterator
from workloads.copula import coupled
from workloads.errors import WorkloadError
from workloads.lengths import LengthDistribution
from workloads.spec import RequestSpec
from workloads.streams import Streams
from workloads.traces.base import TraceReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

_SCALE_REMEDY = "give a factor, such as 2.0 for twice the rate"


@runtime_checkable
class Workload(Protocol):
    """What a simulation is fed with."""

    def requests(self) -> Sequence[RequestSpec]:
        """Return all requests in arrival order.

        Returns
        -------
        sequence of RequestSpec
            Never empty; ``request_id`` is the position. Equal on every call.

        Raises
        ------
        WorkloadError
            If the workload cannot be used, or would hold no request.
        """
        ...


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A recorded trace: a part of it, faster or slower.

    The order of the steps is fixed: window, then limit, then scale.

    Parameters
    ----------
    reader
        Where the requests come from; see `TraceReader`.
    rate_scale
        Arrival times are divided by it: 3 replays the trace at three times its
        rate. Lengths stay.
    window
        ``(start_s, end_s)`` in the trace's own seconds, before scaling; arrivals
        in ``start_s <= t < end_s`` are kept, and ``start_s`` becomes time 0. An
        ``end_s`` of None (``null`` in YAML) is open: from ``start_s`` on.
    limit
        Keep the first so many requests of the window.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range.
    """

    reader: TraceReader
    rate_scale: float = 1.0
    window: tuple[float, float | None] | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_role("reader", self.reader, TraceReader, "read(self)")
        positive("rate_scale", self.rate_scale, _SCALE_REMEDY)
        if self.window is not None:
            object.__setattr__(self, "window", _window(self.window))
        if self.limit is not None:
            remedy = "give a number of requests, or leave it out for all"
            whole("limit", self.limit, 1, MAX_REQUESTS, remedy)

    def requests(self) -> Sequence[RequestSpec]:
        """Return the requests; see `Workload.requests`.

        Identity of prompts and outputs stays the trace's own, so a window sees the
        same shared prefixes as the whole.

        Returns
        -------
        sequence of RequestSpec
            `RequestColumns` where the reader has columns, else a list.

        Raises
        ------
        WorkloadError
            If the trace cannot be read, breaks the reader's contract, or has no
            request in the window.
        """
        requests = self.reader.read()
        if isinstance(requests, SpecIterator):
            return self._columns(requests.columns)
        return self._list(requests)

    def _columns(self, columns: RequestColumns) -> RequestColumns:
        """Return a part of columns, which have kept the contract since they exist."""
        start_s, end_s = self._bounds_s()
        times_s = columns.arrival_s
        start, end = (int(i) for i in times_s.searchsorted([start_s, end_s]))
        if start == end:
            # What the list would have seen last: the first beyond, or the end.
            seen_s = times_s[: end + 1]
            raise self._nothing(seen_s[-1] if len(seen_s) else 0.0)
        if self.limit is not None:
            end = min(end, start + self.limit)
        return columns.part(start, end).moved(start_s, float(self.rate_scale))

    def _list(self, read: Iterator[RequestSpec]) -> list[RequestSpec]:
        """Return a part of whatever a reader yields, each request checked."""
        start_s, end_s = self._bounds_s()
        requests: list[RequestSpec] = []
        last_s = 0.0
        for position, request in enumerate(read):
            _check_request(self.reader, position, request, last_s)
            last_s = request.arrival_s
            if last_s >= end_s or len(requests) == self.limit:
                break
            if last_s >= start_s:
                arrival_s = (last_s - start_s) / self.rate_scale
                requests.append(_moved(request, len(requests), arrival_s))
        if not requests:
            raise self._nothing(last_s)
        return requests

    def _bounds_s(self) -> tuple[float, float]:
        start_s, end_s = self.window or (0.0, None)
        return start_s, float("inf") if end_s is None else end_s

    def _nothing(self, last_s: float) -> WorkloadError:
        if self.window is None:
            return WorkloadError(
                "a trace needs at least one request; "
                f"{type(self.reader).__name__} yields none; check the file"
            )
        start_s, end_s = self.window
        if end_s is None:
            return WorkloadError(
                f"window must hold a request; none arrives from {start_s:g} s on "
                f"(last arrival: {last_s:g} s); move the window"
            )
        return WorkloadError(
            f"window must hold a request; none arrives in [{start_s:g}, {end_s:g}) s "
            f"(an arrival outside it: {last_s:g} s); widen or move the window"
        )


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Requests drawn from an arrival process and two length distributions.

    Every prompt is text of its own, so there is no prefix to reuse. Arrivals, prompt
    lengths and output lengths have random streams of their own: changing one, or the
    correlation, never changes the others, and a longer run begins with the shorter.

    Parameters
    ----------
    arrivals
        When requests arrive.
    prompt_tokens, output_tokens
        Their lengths.
    num_requests
        How many requests; or
    duration_s
        those that arrive before this time, in seconds of the workload itself (after
        scaling). Give exactly one of the two.
    rank_correlation
        Spearman's rho between prompt and output lengths, from -1 to 1.
    rate_scale
        Arrival times are divided by it.
    seed
        Seed of all random streams.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, or not exactly one of
        ``num_requests`` and ``duration_s`` is given.
    """

    arrivals: ArrivalProcess
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    num_requests: int | None = None
    duration_s: float | None = None
    rank_correlation: float = 0.0
    rate_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_role("arrivals", self.arrivals, ArrivalProcess, "times_s(self, rng)")
        for name in ("prompt_tokens", "output_tokens"):
            _check_role(
                name, getattr(self, name), LengthDistribution, "quantile(self, u)"
            )
        check_stop(self.num_requests, self.duration_s)
        remedy = "give Spearman's rho, 0 for independent lengths"
        between("rank_correlation", self.rank_correlation, -1, 1, remedy)
        positive("rate_scale", self.rate_scale, _SCALE_REMEDY)
        Streams(self.seed)

    def requests(self) -> RequestColumns:
        """Return the requests; see `Workload.requests`.

        Raises
        ------
        WorkloadError
            If no request arrives in ``duration_s``, or a process or distribution
            breaks its contract.
        """
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        streams = Streams(self.seed)
        listed_s = arrival_times_s(
            self.arrivals,
            streams.generator("arrivals"),
            self.num_requests,
            self.duration_s,
            self.rate_scale,
        )
        times_s = np.array(listed_s, dtype=np.float64)
        del listed_s  # four times the memory of the array
        u = streams.generator("prompt_tokens").random(len(times_s))
        v = streams.generator("output_tokens").random(len(times_s))
        prompts = _lengths("prompt_tokens", self.prompt_tokens, u)
        v = coupled(u, v, self.rank_correlation)
        outputs = _lengths("output_tokens", self.output_tokens, v)
        return RequestColumns(times_s, prompts, outputs)


def _check_role(name: str, value: object, role: type, method: str) -> None:
    if not isinstance(value, role):
        raise WorkloadError(
            f"{name} must have the method {method}; got {value!r}; "
            f"give a {role.__name__}"
        )


def _window(window: Sequence[float | None]) -> tuple[float, float | None]:
    """Return a checked window."""
    remedy = "give seconds of the trace, such as [600, 1200], or [600, null] for all"
    remedy += " from 600 s on"
    if isinstance(window, str) or not isinstance(window, Sequence) or len(window) != 2:
        raise WorkloadError(f"window must be two numbers; got {window!r}; {remedy}")
    start, end = window
    # `finite` refuses None too; only the end may be open.
    start_s = finite("window start", start, remedy)  # type: ignore[arg-type]
    end_s = float("inf") if end is None else finite("window end", end, remedy)
    if not 0 <= start_s < end_s:
        rule = "window must have 0 <= start < end"
        raise WorkloadError(f"{rule}; got [{start_s:g}, {end_s:g}]; {remedy}")
    return start_s, None if end is None else end_s


def _check_request(
    reader: TraceReader, position: int, request: RequestSpec, previous_s: float
) -> None:
    """Hold a reader to its contract: users bring their own."""
    if not isinstance(request, RequestSpec):
        problem = f"RequestSpec; got {type(request).__name__}"
    elif not previous_s <= request.arrival_s < float("inf"):
        problem = f"finite arrivals from 0 that never fall; got {request.arrival_s!r} s"
        problem += f" after {previous_s!r} s"
    elif request.num_output_tokens < 1 or request.num_prompt_tokens < 1:
        problem = "prompts and outputs of at least 1 token; got "
        problem += f"{request.num_prompt_tokens} and {request.num_output_tokens}"
    else:
        return
    name = type(reader).__name__
    raise WorkloadError(
        f"{name}.read must yield {problem}, at position {position}; mend the reader"
    )


def _moved(request: RequestSpec, request_id: int, arrival_s: float) -> RequestSpec:
    """Return the request at another place; all else, identity too, is kept."""
    if request.request_id == request_id and request.arrival_s == arrival_s:
        return request
    return RequestSpec(request_id, arrival_s, *request[2:])  # a third of _replace()


def _lengths(
    name: str, distribution: LengthDistribution, u: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return drawn lengths, held to the contract: users bring their own."""
    tokens = distribution.quantile(u)
    if tokens.shape == u.shape and tokens.dtype.kind == "i":
        low, high = int(tokens.min()), int(tokens.max())
        if low >= 1 and high <= MAX_TOKENS:
            return tokens.astype("int64")  # a copy: the array may be the user's
        problem = f"from 1 to {MAX_TOKENS}; got {low} to {high}"
    else:
        problem = f"integers of shape {u.shape}; got {tokens.dtype} {tokens.shape}"
    owner = type(distribution).__name__
    raise WorkloadError(f"{name} must be {problem}; mend {owner}.quantile")
