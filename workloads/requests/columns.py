"""Requests kept as columns: each `RequestSpec` is made when it is asked for.

A million of them as objects would take 400 MB; their columns take 24.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, overload

from workloads._checks import MAX_TOKENS
from workloads._numpy import np
from workloads.errors import WorkloadError
from workloads.requests.chained import NONE, ChainedRequests, Requests
from workloads.spec import RequestSpec, made

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

# Specs made at once: few enough not to take the memory that columns save.
_CHUNK = 4096

_DRAWN = (
    *("priority", "best_of", "beam_width", "beam_switch_share", "slo_class"),
    "ends_at_stop",
)
_ONE_FOR_ALL = (int, float, str)
_COLUMNS = ("arrival_s", "num_prompt_tokens", "num_output_tokens")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RequestColumns(Requests):
    """A sequence of requests that share no text and no session, one segment a prompt.

    Equal to the list of its elements. A slice is a sequence of the same kind; a slice
    with a step is a list.

    Parameters
    ----------
    arrival_s
        Arrival times in seconds: float64, at least 0, never falling.
    num_prompt_tokens, num_output_tokens
        Lengths in tokens: int64, 1 to 1e9. All three have one shape, ``(n,)``, and
        are made read-only.
    first_request_id
        `RequestSpec.request_id` of the first; the others follow.
    first_text
        The ``i`` of its segments ``2 * i`` and ``2 * i + 1``; the others follow.
    max_tokens
        `RequestSpec.max_tokens` of all.
    priority, best_of, beam_width, beam_switch_share, slo_class, ends_at_stop
        The field of that name: one value for all, or an array of shape ``(n,)``.

    Raises
    ------
    WorkloadError
        If shapes differ, times fall or are not finite, or a length is out of range.
    """

    arrival_s: NDArray[np.float64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    first_request_id: int = 0
    first_text: int = 0
    max_tokens: int | None = None
    priority: int | NDArray[np.int64] = 0
    best_of: int | NDArray[np.int64] = 1
    beam_width: int | NDArray[np.int64] = 1
    beam_switch_share: float | NDArray[np.float64] = 0.0
    slo_class: str | NDArray[np.str_] = ""
    ends_at_stop: bool | NDArray[np.bool_] = True

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in (*_COLUMNS, *self._drawn())]
        shapes = {column.shape for column in columns}
        for column in columns:
            column.setflags(write=False)
        if shapes != {(len(self.arrival_s),)}:
            raise _broken(f"have one shape (n,); got {sorted(shapes)}")
        if not len(self.arrival_s):
            return
        times_s = self.arrival_s
        if not (times_s[0] >= 0 and times_s[-1] < float("inf")) or not (
            (times_s[1:] >= times_s[:-1]).all()  # False beside a NaN
        ):
            raise _broken("have finite arrivals from 0 that never fall")
        for name in _COLUMNS[1:]:
            column = getattr(self, name)
            low, high = int(column.min()), int(column.max())
            if not 1 <= low <= high <= MAX_TOKENS:
                found = f"{name} from {low} to {high}"
                raise _broken(f"hold lengths from 1 to {MAX_TOKENS}; got {found}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[RequestSpec]:
        starts = range(0, len(self), _CHUNK)
        return chain.from_iterable(
            self._specs(start, min(start + _CHUNK, len(self))) for start in starts
        )

    @overload
    def __getitem__(self, index: int) -> RequestSpec: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestSpec]: ...
    def __getitem__(self, index: int | slice) -> RequestSpec | Sequence[RequestSpec]:
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return next(iter(self._specs(positions, positions + 1)))
        if positions.step != 1:
            return [self[position] for position in positions]
        return self.part(positions.start, positions.stop)

    def part(self, start: int, stop: int) -> RequestColumns:
        names = (*_COLUMNS, *self._drawn())
        return replace(
            self,
            **{name: getattr(self, name)[start:stop] for name in names},
            first_request_id=self.first_request_id + start,
            first_text=self.first_text + start,
        )

    def moved(self, start_s: float, rate_scale: float) -> RequestColumns:
        """Return the requests numbered from 0, at ``(time - start_s) / rate_scale``."""
        return replace(
            self, arrival_s=(self.arrival_s - start_s) / rate_scale, first_request_id=0
        )

    def rearranged(
        self, rows: NDArray[np.int64], arrival_s: NDArray[np.float64]
    ) -> RequestColumns:
        """Return requests at other times, each as long and wide as one of these.

        Parameters
        ----------
        rows
            Position of the request that each is like, shape ``(m,)``; any may come
            several times, or not at all.
        arrival_s
            New arrival times, of the same shape, never falling.
        """
        names = (*_COLUMNS[1:], *self._drawn())
        return replace(
            self,
            arrival_s=arrival_s,
            **{name: getattr(self, name)[rows] for name in names},
            first_request_id=0,
            first_text=0,
        )

    def output_limits(self) -> NDArray[np.object_]:
        """Return `RequestSpec.output_limit` of each: whole numbers, or None."""
        limits = np.full(len(self), self.max_tokens, dtype=object)
        outputs = self.num_output_tokens
        if self.max_tokens is not None:
            outputs = np.minimum(outputs, self.max_tokens)
        at_length = np.broadcast_to(np.logical_not(self.ends_at_stop), limits.shape)
        limits[at_length] = outputs[at_length]
        return limits

    def _drawn(self) -> list[str]:
        return [n for n in _DRAWN if not isinstance(getattr(self, n), _ONE_FOR_ALL)]

    def _specs(self, start: int, stop: int) -> Iterable[RequestSpec]:
        """Make the specs from `start` to before `stop`, all of it in C code."""
        ids = range(self.first_request_id + start, self.first_request_id + stop)
        text, end = 2 * (self.first_text + start), 2 * (self.first_text + stop)
        prompt_tokens = self.num_prompt_tokens[start:stop].tolist()
        columns = (
            ids,
            self.arrival_s[start:stop].tolist(),
            zip(zip(range(text, end, 2), prompt_tokens, strict=True), strict=True),
            self.num_output_tokens[start:stop].tolist(),
            range(text + 1, end, 2),
            repeat(self.max_tokens),
            _values(self.priority, start, stop),
            _values(self.best_of, start, stop),
            _values(self.beam_width, start, stop),
            _values(self.beam_switch_share, start, stop),
            _values(self.slo_class, start, stop),
            repeat(None),  # no sessions
            repeat(None),
            repeat(0.0),
            _values(self.ends_at_stop, start, stop),
            repeat(()),
        )
        # Not strict: a value of all requests repeats without end.
        return map(made, zip(*columns, strict=False))


class SpecIterator(Iterator[RequestSpec]):
    """An iterator over columns that also hands out the columns themselves."""

    def __init__(self, columns: RequestColumns) -> None:
        self.columns = columns
        self._specs = iter(columns)

    def __next__(self) -> RequestSpec:
        return next(self._specs)

    def __iter__(self) -> Iterator[RequestSpec]:
        return self._specs  # the same position, without a call a request


def _values(value: Any, start: int, stop: int) -> Iterable[Any]:
    if isinstance(value, _ONE_FOR_ALL):
        return repeat(value)
    values: list[Any] = value[start:stop].tolist()
    return values


def _broken(rule: str) -> WorkloadError:
    return WorkloadError(f"columns of requests must {rule}; mend their maker")


def arrivals_s(requests: Sequence[RequestSpec]) -> Sequence[float]:
    """Return when each arrives, in seconds."""
    if isinstance(requests, RequestColumns):
        times_s = requests.arrival_s
    else:
        times_s = numbers(requests, "arrival_s")
    found: list[float] = times_s.tolist()
    return found


def numbers(requests: Sequence[RequestSpec], field: str) -> NDArray[Any]:
    """Return a number of each request, `NONE` where it has none."""
    if isinstance(requests, ChainedRequests):
        return requests.column(field)
    values = (getattr(request, field) for request in requests)
    return np.fromiter(
        (NONE if value is None else value for value in values),
        "float64" if field.endswith("_s") else "int64",
        len(requests),
    )


def largest(requests: Sequence[RequestSpec], field: str) -> int:
    """Return the largest ``best_of``, ``beam_width`` or ``priority``; 1 of none."""
    if isinstance(requests, RequestColumns):
        value = getattr(requests, field)
        return int(value if isinstance(value, int) else value.max())
    if isinstance(requests, ChainedRequests):
        return max((int(getattr(each, field)) for each in requests.manners), default=1)
    return max((int(getattr(request, field)) for request in requests), default=1)
