"""Workloads: requests in arrival order, from a trace or from distributions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from workloads._checks import (
    check_role,
    checked_window,
    one_of,
    positive,
    whole,
)
from workloads._numpy import np
from workloads.arrivals import (
    MAX_REQUESTS,
    ArrivalProcess,
    check_stop,
    taken_arrivals,
)
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError, WorkloadWarning
from workloads.lengths import CoupledLengths, LengthDistribution, LengthPairs
from workloads.lengths.base import checked_tokens
from workloads.requests.chains import has_chains, in_order
from workloads.requests.columns import RequestColumns, SpecIterator
from workloads.requests.long_arrays import Collector, parts
from workloads.spec import RequestSpec
from workloads.traces.base import TraceReader, check_number
from workloads.transforms.resampling import Resampling  # noqa: TC001 - `sim.config.plug` resolves it
from workloads.transforms.superposition import superposed

if TYPE_CHECKING:
    from collections.abc import Sequence


_WHOLE = {int, NoneType}
_LENGTHS = ("prompt_tokens", "output_tokens")
_DRAWN_ROWS = 1 << 20
"""Requests whose lengths are drawn at a time: a distribution may read a trace."""
_YEAR_S = 365 * 86_400.0
_ONE_GAP = 0.999
"""The share of a span that is one gap where times are of two clocks."""
_SCALE_REMEDY = "give a factor, such as 2.0 for twice the rate"


@runtime_checkable
class Workload(Protocol):
    """The requests that a simulation serves."""

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


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A recorded trace: a part of it, at another rate.

    The order of the steps is fixed: window, then limit, then resampling, then scale.

    Parameters
    ----------
    reader
        Where the requests come from; see `TraceReader`.
    rate_scale
        3 replays the trace at three times its rate. Lengths stay.
    window
        ``(start_s, end_s)`` in the trace's own seconds, before scaling; arrivals
        in ``start_s <= t < end_s`` are kept, and ``start_s`` becomes time 0. An
        ``end_s`` of None (``null`` in YAML) is open: from ``start_s`` on. A follow-up
        is kept if the request that began its chain is.
    limit
        Keep the first so many requests of the window.
    scale_by
        ``"compression"`` divides arrival times by `rate_scale`: the same requests in
        less time, bursts and all (think times are people's, and stay).
        ``"superposition"`` lays `rate_scale` shifted copies over each other: more
        users in the same time, whose bursts even out; see
        `workloads.transforms.superposition`.
    copies_share_text
        Of copies: whether prompts are the same text in all, or text of their own.
    seed
        Seed of the copies' shifts and of the windows; nothing else is drawn.
    resampling
        Replays windows of the trace that are drawn at random, if it is given.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range.
    """

    reader: TraceReader
    rate_scale: float = 1.0
    window: tuple[float, float | None] | None = None
    limit: int | None = None
    scale_by: Literal["compression", "superposition"] = "compression"
    copies_share_text: bool = False
    seed: int = 0
    resampling: Resampling | None = None

    def __post_init__(self) -> None:
        check_role("reader", self.reader, TraceReader, "read(self)")
        positive("rate_scale", self.rate_scale, _SCALE_REMEDY)
        if self.window is not None:
            object.__setattr__(self, "window", checked_window(self.window))
        if self.limit is not None:
            remedy = "give a number of requests, or leave it out for all"
            whole("limit", self.limit, 1, MAX_REQUESTS, remedy)
        one_of("scale_by", self.scale_by, ("compression", "superposition"))
        self._check_copies()
        Streams(self.seed)

    def requests(self) -> Sequence[RequestSpec]:
        """Return the requests, as `RequestColumns` where the reader has columns.

        Identity of prompts and outputs stays the trace's own, so a window sees the same
        shared prefixes as the whole.
        """
        read = self.reader.read()
        if isinstance(read, SpecIterator):
            return self._scaled(self._part_of_columns(read.columns))
        if not isinstance(read, Iterable):
            name, found = type(self.reader).__name__, type(read).__name__
            raise WorkloadError(
                f"{name}.read must yield RequestSpec; got {found}; mend the reader"
            )
        return self._scaled(self._part(read))

    def _scaled(self, requests: Sequence[RequestSpec]) -> Sequence[RequestSpec]:
        start_s, _ = self._bounds_s()
        _warn_of_two_clocks(requests)
        if self.resampling is not None:
            begun = _moved_all(requests, start_s, 1.0)
            requests, start_s = self.resampling.apply(begun, Streams(self.seed)), 0.0
        copies = float(self.rate_scale) if self.scale_by == "superposition" else 1.0
        rate_scale = float(self.rate_scale) / copies
        requests = _moved_all(requests, start_s, rate_scale)
        if copies == 1.0:
            return requests
        streams, share_text = Streams(self.seed), self.copies_share_text
        return superposed(requests, copies, streams, share_text)

    def _part_of_columns(self, columns: RequestColumns) -> RequestColumns:
        """Return a part of columns, which have kept the contract since they exist."""
        start_s, end_s = self._bounds_s()
        times_s = columns.arrival_s
        start, end = (int(i) for i in times_s.searchsorted([start_s, end_s]))
        if start == end:
            # The last time that the list would have seen: the first beyond, or the end.
            seen_s = times_s[: end + 1]
            raise self._nothing(seen_s[-1] if len(seen_s) else 0.0)
        if self.limit is not None:
            end = min(end, start + self.limit)
        return columns.part(start, end)

    def _part(self, read: Iterable[RequestSpec]) -> list[RequestSpec]:
        """Return a part of whatever a reader yields, each request checked.

        Of a window all is read, also what comes after: a chain may go on there.
        """
        start_s, end_s = self._bounds_s()
        requests: list[RequestSpec] = []
        kept: set[int] = set()
        num_early = 0
        last_s = beyond_s = 0.0
        for position, request in enumerate(read):
            _check_request(self.reader, position, request, last_s)
            last_s = request.arrival_s
            if len(requests) == self.limit:
                break
            num_early += last_s < start_s
            check_number(self.reader, position + 1 - num_early)
            previous_id = request.previous_id
            if previous_id is None:
                beyond_s = last_s if beyond_s < end_s else beyond_s
                is_kept = start_s <= last_s < end_s
            else:
                is_kept = previous_id in kept
            if is_kept:
                kept.add(position)
                requests.append(request)
        if not requests:
            raise self._nothing(beyond_s)
        return requests

    def _bounds_s(self) -> tuple[float, float]:
        start_s, end_s = self.window or (0.0, None)
        return start_s, float("inf") if end_s is None else end_s

    def _check_copies(self) -> None:
        if not isinstance(self.copies_share_text, bool):
            raise WorkloadError(
                f"copies_share_text must be true or false; got "
                f"{self.copies_share_text!r}; give one"
            )
        if self.copies_share_text and self.scale_by != "superposition":
            raise WorkloadError(
                f"copies_share_text needs copies; got scale_by {self.scale_by!r}; "
                "add scale_by: superposition"
            )
        if self.scale_by == "superposition" and self.rate_scale > MAX_REQUESTS:
            raise WorkloadError(
                f"rate_scale must be at most {MAX_REQUESTS} copies; got "
                f"{self.rate_scale!r}; lower it"
            )

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
    """Requests drawn from an arrival process and lengths.

    Every prompt is text of its own, so there is no prefix to reuse. Arrivals, prompt
    lengths and output lengths have random streams of their own: changing one, or the
    correlation, never changes the others, and a longer run begins with the shorter.

    Parameters
    ----------
    arrivals
        When requests arrive.
    prompt_tokens, output_tokens
        Their lengths, each by a distribution; or, in place of both,
    lengths
        their lengths, drawn in pairs.
    num_requests
        How many requests; or
    duration_s
        those that arrive before this time, in seconds of the workload itself (after
        scaling). Give exactly one of the two.
    rank_correlation
        Spearman's rho between prompt and output lengths, from -1 to 1; of
        ``lengths`` it is their own.
    rate_scale
        Arrival times are divided by it.
    seed
        Seed of all random streams.

    Raises
    ------
    WorkloadError
        If a parameter is not finite or out of range, or not exactly one of
        ``num_requests`` and ``duration_s``, or one way of lengths, is given.
    """

    arrivals: ArrivalProcess
    prompt_tokens: LengthDistribution | None = None
    output_tokens: LengthDistribution | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    rank_correlation: float = 0.0
    rate_scale: float = 1.0
    seed: int = 0
    lengths: LengthPairs | None = None

    def __post_init__(self) -> None:
        check_role("arrivals", self.arrivals, ArrivalProcess, "times_s(self, rng)")
        self.length_pairs()
        check_stop(self.num_requests, self.duration_s)
        positive("rate_scale", self.rate_scale, _SCALE_REMEDY)
        Streams(self.seed)

    def requests(self) -> RequestColumns:
        streams = Streams(self.seed)
        times_s = taken_arrivals(
            self.arrivals,
            streams.generator("arrivals"),
            self.num_requests,
            self.duration_s,
            self.rate_scale,
        )
        rngs = [streams.generator(name) for name in _LENGTHS]
        pairs = self.length_pairs()
        method = f"{type(pairs).__name__}.pairs"
        columns = Collector("int64"), Collector("int64")
        # Part by part: the same numbers as all at once.
        for some_s in parts(times_s, _DRAWN_ROWS):
            u, v = (rng.random(len(some_s)) for rng in rngs)
            drawn = pairs.pairs(u, v)
            for name, tokens, column in zip(_LENGTHS, drawn, columns, strict=True):
                column.add(checked_tokens(name, tokens, u.shape, method))
        prompts, outputs = (column.mapped() for column in columns)
        return RequestColumns(times_s, prompts, outputs)

    def length_pairs(self) -> LengthPairs:
        """Return the pairs that draw the lengths, whichever way they are given."""
        given = [name for name in _LENGTHS if getattr(self, name) is not None]
        if self.lengths is None:
            return self._coupled()
        if self.rank_correlation != 0:
            given.append("rank_correlation")
        if given:
            raise WorkloadError(
                f"lengths stands for prompt and output lengths together; got also "
                f"{' and '.join(given)}; remove one or the other"
            )
        check_role("lengths", self.lengths, LengthPairs, "pairs(self, u, v)")
        return self.lengths

    def _coupled(self) -> CoupledLengths:
        # Where one is missing, the check there says so.
        prompts, outputs = self.prompt_tokens, self.output_tokens
        return CoupledLengths(prompts, outputs, self.rank_correlation)  # type: ignore[arg-type]


def _warn_of_two_clocks(requests: Sequence[RequestSpec]) -> None:
    """Warn of a gap of years that is all there is of the span: an epoch, mostly."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if span_s < _YEAR_S:
        return
    num = len(requests)
    times_s = np.fromiter((each.arrival_s for each in requests), np.float64, num)
    gaps_s = np.diff(times_s)
    longest = int(gaps_s.argmax())
    if num > 2 and gaps_s[longest] > _ONE_GAP * span_s:
        warnings.warn(
            f"requests {longest} and {longest + 1} (from 0) are "
            f"{gaps_s[longest] / _YEAR_S:,.1f} years apart, and all others "
            f"{span_s - gaps_s[longest]:,.0f} s: some times seem to count from an "
            f"epoch and some from the beginning; mend the trace, or leave them out by "
            f"its window or limit",
            WorkloadWarning,
            stacklevel=3,
        )


def _moved_all(
    requests: Sequence[RequestSpec], start_s: float, rate_scale: float
) -> Sequence[RequestSpec]:
    """Return the requests numbered from 0, `start_s` as time 0, times scaled."""
    if isinstance(requests, RequestColumns):
        return requests.moved(start_s, rate_scale)
    if has_chains(requests):
        return in_order(requests, rate_scale, start_s)
    return [
        _moved(request, i, (request.arrival_s - start_s) / rate_scale)
        for i, request in enumerate(requests)
    ]


def _check_request(
    reader: TraceReader, position: int, request: RequestSpec, previous_s: float
) -> None:
    """Hold a reader to its contract: users bring their own."""
    try:
        problem = _request_problem(position, request, previous_s)
    except TypeError:
        problem = f"RequestSpec of numbers and segments; got {request!r:.200}"
    if problem:
        name = type(reader).__name__
        raise WorkloadError(
            f"{name}.read must yield {problem}, at position {position}; mend the reader"
        )


def _request_problem(
    position: int, request: RequestSpec, previous_s: float
) -> str | None:
    if not isinstance(request, RequestSpec):
        problem = f"RequestSpec; got {type(request).__name__}"
    elif not previous_s <= request.arrival_s < float("inf"):
        problem = f"finite arrivals from 0 that never fall; got {request.arrival_s!r} s"
        problem += f" after {previous_s!r} s"
    elif request.num_output_tokens < 1 or request.num_prompt_tokens < 1:
        problem = "prompts and outputs of at least 1 token; got "
        problem += f"{request.num_prompt_tokens} and {request.num_output_tokens}"
    elif not (request.previous_id is None or 0 <= request.previous_id < position):
        problem = f"a previous_id before the request; got {request.previous_id!r}"
    elif not (kinds := _kinds_of_numbers(request)) <= _WHOLE:
        names = ", ".join(sorted(each.__name__ for each in kinds - _WHOLE))
        problem = f"segments, tokens and ids of Python's int; got {names}"
    else:
        return None
    return problem


def _kinds_of_numbers(request: RequestSpec) -> set[type]:
    """Return the types of all that counts or names something, whole and hashable."""
    return {
        *map(type, chain.from_iterable(request.prompt)),
        type(request.num_output_tokens),
        type(request.output_segment),
        type(request.max_tokens),
        type(request.priority),
        type(request.session_id),
        type(request.previous_id),
    }


def _moved(request: RequestSpec, request_id: int, arrival_s: float) -> RequestSpec:
    """Return the request at another place; all else, identity too, is kept."""
    if request.request_id == request_id and request.arrival_s == arrival_s:
        return request
    return RequestSpec(request_id, arrival_s, *request[2:])  # a third of _replace()
