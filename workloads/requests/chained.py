"""Requests that wait for one another and quote earlier text, kept as columns.

Six million of them as objects would take 5 GB; their columns take 0.3, in files. Text
that a prompt has in common with the request before is kept once.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

from workloads._numpy import np
from workloads.requests.long_arrays import Collector, collected, parts, spilled
from workloads.spec import RequestSpec, made

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from workloads.spec import Segment

    Integers = NDArray[np.signedinteger[Any]]

NONE: Final = -1
"""In a column, for None of a request."""
_HELD: Final = 1 << 16
"""Numbers that are held before they go into a column."""


class Manner(NamedTuple):
    """How a request asks: fields of `RequestSpec` of which there are few values."""

    max_tokens: int | None
    priority: int
    best_of: int
    beam_width: int
    beam_switch_share: float
    slo_class: str
    ends_at_stop: bool
    accepted_drafts: tuple[int, ...]

    @classmethod
    def of(cls, request: RequestSpec) -> Manner:
        return cls(*request[5:11], *request[14:])


class Requests(Sequence[RequestSpec]):
    """A sequence of requests, equal to the list of its elements."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, tuple, Requests)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment] # equal to lists, which have none

    def __repr__(self) -> str:
        more = ", ..." if len(self) > 2 else ""
        shown = ", ".join(map(repr, self[:2]))
        return f"{type(self).__name__}(<{len(self)} requests: {shown}{more}>)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ChainedRequests(Requests):
    """A sequence of requests by arrival, each made when it is asked for.

    Equal to the list of its elements; a slice is one. `row` is where a request stands
    in the columns: they are in the order in which requests were gathered, but for
    `manner`, which is by arrival. All are integers, and times float64.

    Parameters
    ----------
    row
        Of each request, by arrival.
    place
        Of each row, its position by arrival.
    arrival_s, delay_s, num_output_tokens, output_segment, session_id
        Fields of `RequestSpec`; `NONE` for no session.
    previous
        Row of the request that must have ended, or `NONE`.
    num_quoted
        Leading segments of the prompt that are those of the previous request's prompt,
        followed by its output.
    own_end
        End of the segments behind these, in the two columns that follow.
    own_segment, own_tokens
        Those segments, of all rows.
    manner
        Position in `manners` of each request, by arrival.
    manners
        The different manners.
    """

    row: Integers
    place: Integers
    arrival_s: NDArray[np.float64]
    delay_s: NDArray[np.float64]
    num_output_tokens: Integers
    output_segment: Integers
    session_id: Integers
    previous: Integers
    num_quoted: Integers
    own_end: Integers
    own_segment: Integers
    own_tokens: Integers
    manner: Integers
    manners: tuple[Manner, ...]

    def __len__(self) -> int:
        return len(self.row)

    def __iter__(self) -> Iterator[RequestSpec]:
        return map(self._spec, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> RequestSpec: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestSpec]: ...
    def __getitem__(self, index: int | slice) -> RequestSpec | Sequence[RequestSpec]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._spec(places)
        return [self._spec(place) for place in places]

    def column(self, field: str) -> Integers | NDArray[np.float64]:
        """Return a number of each request, by arrival; `NONE` stands for None."""
        if field in Manner._fields:
            values = np.array([getattr(manner, field) for manner in self.manners])
            return spilled(values[self.manner])
        if field == "previous_id":
            # NONE is the last place, which is put right.
            places = (self.place[some] for some in parts(self.previous))
            by_row = collected(places, self.place.dtype)
            found = by_row[self.row]
            found[self.previous[self.row] == NONE] = NONE
            return spilled(found)
        return spilled(getattr(self, field)[self.row])

    def asking(
        self, drawn: Mapping[str, Any], max_tokens: int | None = None
    ) -> ChainedRequests:
        """Return requests that ask otherwise.

        Parameters
        ----------
        drawn
            Fields of `Manner`, each with one value for all or with an array by arrival.
        max_tokens
            Of requests that state none.
        """
        columns = {name: v for name, v in drawn.items() if isinstance(v, np.ndarray)}
        for_all = {name: v for name, v in drawn.items() if name not in columns}
        codes: dict[tuple[Any, ...], int] = {}

        def coded(first: int, number: int) -> Iterator[int]:
            here = slice(first, first + number)
            every = (self.manner, *columns.values())
            for each in zip(*(v[here].tolist() for v in every), strict=True):
                yield codes.setdefault(each, len(codes))

        manner = Collector("int32")
        for first in range(0, len(self), _HELD):
            number = min(_HELD, len(self) - first)
            manner.add(np.fromiter(coded(first, number), "int32", number))
        manners = []
        for code, *values in codes:
            own = self.manners[code]
            stated = max_tokens if own.max_tokens is None else own.max_tokens
            changed = for_all | dict(zip(columns, values, strict=True))
            manners.append(own._replace(max_tokens=stated, **changed))
        return replace(self, manner=manner.mapped(), manners=tuple(manners))

    def _spec(self, place: int) -> RequestSpec:
        row = self.row.item(place)
        manner = self.manners[self.manner.item(place)]
        session_id, previous = self.session_id.item(row), self.previous.item(row)
        return made(
            (
                place,
                self.arrival_s.item(row),
                self._prompt(row),
                self.num_output_tokens.item(row),
                self.output_segment.item(row),
                *manner[:6],
                None if session_id == NONE else session_id,
                None if previous == NONE else self.place.item(previous),
                self.delay_s.item(row),
                *manner[6:],
            )
        )

    def _prompt(self, row: int) -> tuple[Segment, ...]:
        """Put a prompt together, from the request on that began the chain."""
        rows = [row]
        while self.num_quoted.item(row):
            row = self.previous.item(row)
            rows.append(row)
        prompt: list[Segment] = []
        while True:
            row = rows.pop()
            first, end = (
                self.own_end.item(row - 1) if row else 0,
                self.own_end.item(row),
            )
            if end == first + 1:  # nearly all of them
                prompt.append(
                    (self.own_segment.item(first), self.own_tokens.item(first))
                )
            else:
                own = self.own_segment[first:end], self.own_tokens[first:end]
                prompt += zip(own[0].tolist(), own[1].tolist(), strict=True)
            if not rows:
                return tuple(prompt)
            output = self.output_segment.item(row), self.num_output_tokens.item(row)
            prompt.append(output)
            del prompt[self.num_quoted.item(rows[-1]) :]


class Gathering:
    """Requests on their way into columns; none is kept as it is."""

    def __init__(self) -> None:
        self._columns = {
            name: _Numbers("float64" if name.endswith("_s") else "int32")
            for name in (*_GATHERED, "request_id", "previous_id", "is_follow_up")
        }
        self._own = _Numbers("int32"), _Numbers("int32")
        self._num_own = 0
        self._manners: dict[Manner, int] = {}
        self._session_id: int | None = None
        # Prompt and output of each request of the session that was added last.
        self._said: dict[int, tuple[Segment, ...]] = {}

    def add(self, request: RequestSpec) -> None:
        """Take a request, of which the one before may come later."""
        request_id, previous_id = request.request_id, request.previous_id
        session_id, prompt = request.session_id, request.prompt
        if session_id is None or session_id != self._session_id:
            if previous_id not in self._said:
                self._said.clear()
            self._session_id = session_id
        before: tuple[Segment, ...] = ()
        if previous_id is not None:
            before = self._said.get(previous_id, ())
        num_quoted = _num_alike(prompt, before)
        output = request.output_segment, request.num_output_tokens
        self._said[request_id] = (*prompt, output)
        for segment, tokens in prompt[num_quoted:]:
            self._own[0].append(segment)
            self._own[1].append(tokens)
        self._num_own += len(prompt) - num_quoted
        values = (
            *(request.arrival_s, request.delay_s, request.num_output_tokens),
            request.output_segment,
            NONE if session_id is None else session_id,
            *(num_quoted, self._num_own),
            self._manners.setdefault(Manner.of(request), len(self._manners)),
            *(request_id, previous_id or 0, previous_id is not None),
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def first_fault(self) -> tuple[RequestSpec, set[int]] | None:
        """Return the first request by id that breaks a rule, and the ids before.

        Ids are unique, previous ones smaller, and delays finite and not negative. Of
        the request only the fields that break a rule are filled in.
        """
        ids, by_id, previous_rank = self._ranks()
        delay_s = self._columns["delay_s"].mapped()[by_id]
        is_wrong = ~((delay_s >= 0) & (delay_s < np.inf))
        is_wrong[1:] |= ids[1:] == ids[:-1]
        is_wrong |= previous_rank == len(ids)
        if not is_wrong.any():
            return None
        rank = int(is_wrong.argmax())
        row = int(by_id[rank])
        previous_id = self._columns["previous_id"].mapped().item(row)
        is_follow_up = self._columns["is_follow_up"].mapped()[row]
        told = RequestSpec(
            ids.item(rank),
            0.0,
            (),
            1,
            0,
            previous_id=previous_id if is_follow_up else None,
            delay_s=delay_s.item(rank),
        )
        return told, set(ids[:rank].tolist())

    def _ranks(self) -> tuple[Integers, Integers, Integers]:
        """Return ids that ascend, rows in that order, and where the one before stands.

        That is `NONE` of a request that waits for none, and the number of requests
        where the one before is missing or does not come before.
        """
        ids = self._columns["request_id"].mapped()
        by_id = np.argsort(ids, kind="stable")
        ids = ids[by_id]
        wanted = self._columns["previous_id"].mapped()[by_id]
        found = np.searchsorted(ids, wanted)
        is_there = found < np.arange(len(ids))
        is_there[is_there] = ids[found[is_there]] == wanted[is_there]
        found[~is_there] = len(ids)
        found[self._columns["is_follow_up"].mapped()[by_id] == 0] = NONE
        return ids, by_id, found

    def in_order(self) -> ChainedRequests:
        """Return all by arrival, equal ones by id; see `chains.in_order`."""
        columns = {name: self._columns[name].mapped() for name in _GATHERED}
        _, by_id, previous_rank = self._ranks()
        previous = np.full(len(by_id), NONE, dtype="int32")
        is_follow_up = previous_rank != NONE
        follow_ups = by_id[is_follow_up]
        previous[follow_ups] = by_id[previous_rank[is_follow_up]]
        del previous_rank, is_follow_up
        times_s = np.array(columns["arrival_s"])
        time_s, delay_s = times_s.data, columns["delay_s"].data
        for some in parts(follow_ups):
            both = zip(some.tolist(), previous[some].tolist(), strict=True)
            for row, before in both:
                time_s[row] = time_s[before] + delay_s[row]
        del follow_ups
        rows = by_id[np.argsort(times_s[by_id], kind="stable")].astype("int32")
        del by_id
        place = np.empty(len(rows), dtype="int32")
        place[rows] = np.arange(len(rows), dtype="int32")
        manner = columns.pop("manner")
        columns["arrival_s"] = spilled(times_s)
        found = ChainedRequests(
            row=spilled(rows),
            place=spilled(place),
            previous=spilled(previous),
            own_segment=self._own[0].mapped(),
            own_tokens=self._own[1].mapped(),
            manner=spilled(manner[rows]),
            manners=tuple(self._manners),
            **columns,
        )
        # Manners by first appearance, too.
        return found if len(self._manners) <= 1 else found.asking({})


_GATHERED: Final = (
    *("arrival_s", "delay_s", "num_output_tokens", "output_segment", "session_id"),
    *("num_quoted", "own_end", "manner"),
)


class _Numbers:
    """A column that grows: int32 as long as all of it fits, or float64."""

    def __init__(self, kind: str) -> None:
        self._held = array("d" if kind == "float64" else "q")
        self._kind = kind
        self._collector = Collector(kind)

    def append(self, value: float) -> None:
        self._held.append(value)  # type: ignore[arg-type]
        if len(self._held) == _HELD:
            self._flush()

    def mapped(self) -> NDArray[Any]:
        self._flush()
        return self._collector.mapped()

    def _flush(self) -> None:
        if not self._held:
            return
        values = np.array(self._held)
        del self._held[:]
        if self._kind == "int32" and (values.astype("int32") != values).any():
            self._kind, kept = "int64", self._collector
            self._collector = Collector("int64")
            for some in parts(kept.mapped()):
                self._collector.add(some)
        self._collector.add(values.astype(self._kind))


def _num_alike(one: tuple[Segment, ...], other: tuple[Segment, ...]) -> int:
    """Return how many leading segments are the same."""
    if one[: len(other)] == other:
        return len(other)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
