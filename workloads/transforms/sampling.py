"""How requests sample, drawn per request: samples, beams, priorities, ends of outputs.

Traces and length distributions say when requests come and how long they are; this says
the other wishes of a request.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from workloads._checks import MAX_TOKENS, between, one_of, whole
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError
from workloads.requests.chained import NONE, ChainedRequests
from workloads.requests.columns import RequestColumns, numbers
from workloads.requests.long_arrays import parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec
    from workloads.workload import Workload

Shares = int | Mapping[int, float]
"""One value for all requests, or from a value to the share of requests that have it."""

Names = str | Mapping[str, float]
"""One name for all requests, or from a name to the share of requests that have it."""

Ranks = Mapping[str, int]
"""From the name of a service level to the priority of its requests."""

MAX_WIDTH = 256
"""Most samples or beams of a prompt."""
_MAX_PRIORITY = 10**9

OUTPUT_ENDS: Final = ("stop", "length")
"""Ends of an output: a token that stops it, or the length that was asked for."""


@dataclass(frozen=True, slots=True)
class SampledWorkload:
    """A workload whose requests ask for samples, beams, priorities or service levels.

    Each of them has a random stream of its own, so changing one changes nothing else.
    A field left at its default stays as the workload has it. Requests that wait for one
    another, and those of one session, have one priority and one service level.

    Parameters
    ----------
    workload
        Arrivals, lengths and identity.
    best_of
        Samples of a prompt. All have the request's output length.
    beam_width
        Beams, of requests that draw more than 1; those have no parallel samples.
    beam_switch_share
        Share of a beam's steps in which another beam's continuation takes its place:
        0 for beams that never meet again, 1 for a new choice at every step; rounded to
        whole per cent.
    priority
        Smaller is more urgent. With names for keys, such as ``{gold: 0, bronze: 1}``,
        it follows from the service level, and nothing is drawn.
    max_tokens
        Longest output that clients ask for, where the workload's requests state none.
        An engine may count on it, as it may not on the output's true length.
    slo_class
        Name of the service level that requests were promised, for reports.
    output_end
        One of `OUTPUT_ENDS`, shares of both, or None for the requests' own.
        Recorded traces are taken to end at stop tokens.
    seed
        Seed of the streams.

    Raises
    ------
    WorkloadError
        If a value is out of range, or shares do not add up to 1.
    """

    workload: Workload
    best_of: Shares = 1
    beam_width: Shares = 1
    beam_switch_share: float = 0.35
    priority: Shares | Ranks = 0
    max_tokens: int | None = None
    slo_class: Names = ""
    output_end: Names | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_shares("best_of", self.best_of, 1, MAX_WIDTH)
        _check_shares("beam_width", self.beam_width, 1, MAX_WIDTH)
        _check_priority(self.priority)
        _check_names("slo_class", self.slo_class)
        _check_output_end(self.output_end)
        remedy = "give a share of steps, such as 0.35"
        between("beam_switch_share", self.beam_switch_share, 0, 1, remedy)
        if self.max_tokens is not None:
            remedy = "give a number of tokens, or leave it out for no limit"
            whole("max_tokens", self.max_tokens, 1, MAX_TOKENS, remedy)
        Streams(self.seed)

    def requests(self) -> Sequence[RequestSpec]:
        requests = self.workload.requests()
        drawn = self._widths(len(requests)) | self._classes(requests)
        if _is_ranked(self.priority):
            drawn["priority"] = self._ranked(requests, drawn.get("slo_class"))
        if self.output_end is not None:
            drawn["ends_at_stop"] = self._draw("output_end", len(requests)) == "stop"
        if isinstance(requests, RequestColumns):
            max_tokens = _stated(requests.max_tokens, self.max_tokens)
            return replace(requests, max_tokens=max_tokens, **drawn)
        if isinstance(requests, ChainedRequests):
            return requests.asking(drawn, self.max_tokens)
        # Each in its place, so that of millions there are no two copies; the list is
        # ours, the workload may keep its own.
        sampled = list(requests)
        del requests
        values = zip(*map(_each, drawn.values()), strict=False) if drawn else repeat(())
        for place, each in zip(range(len(sampled)), values, strict=False):
            request = sampled[place]
            sampled[place] = request._replace(
                max_tokens=_stated(request.max_tokens, self.max_tokens),
                **dict(zip(drawn, each, strict=True)),
            )
        return sampled

    def _widths(self, num_requests: int) -> dict[str, Any]:
        if self.best_of == self.beam_width == 1:
            return {}
        best_of = self._draw("best_of", num_requests)
        beam_width = self._draw("beam_width", num_requests)
        return {
            "best_of": _where(beam_width > 1, 1, best_of),
            "beam_width": beam_width,
            "beam_switch_share": _where(beam_width > 1, self.beam_switch_share, 0.0),
        }

    def _classes(self, requests: Sequence[RequestSpec]) -> dict[str, Any]:
        """Draw the values that a whole session has in common, if any are drawn."""
        wanted = ["slo_class"] if self.slo_class else []
        if self.priority != 0 and not _is_ranked(self.priority):
            wanted.insert(0, "priority")
        if all(isinstance(getattr(self, name), (int, str)) for name in wanted):
            return {name: getattr(self, name) for name in wanted}
        owners = _owners(requests)
        num_owners = len(requests)
        if owners is not None:
            num_owners = int(owners.max(initial=-1)) + 1
        drawn = {name: self._draw(name, num_owners) for name in wanted}
        return {
            name: value[owners]
            if owners is not None and isinstance(value, np.ndarray)
            else value
            for name, value in drawn.items()
        }

    def _ranked(self, requests: Sequence[RequestSpec], classes: Any) -> Any:
        """Return the priority of each request's service level, drawn or its own."""
        if classes is None:
            classes = (
                requests.slo_class
                if isinstance(requests, RequestColumns)
                else np.array([request.slo_class for request in requests], dtype=str)
            )
        if isinstance(classes, str):
            return self._rank(classes)
        names, positions = np.unique(classes, return_inverse=True)
        ranks = [self._rank(str(name)) for name in names]
        return np.array(ranks, dtype=np.int64)[positions]

    def _rank(self, slo_class: str) -> int:
        assert isinstance(self.priority, Mapping)
        ranks: Mapping[Any, Any] = self.priority
        if slo_class not in ranks:
            raise WorkloadError(
                f"priority must name every slo_class; got {', '.join(ranks)} and a "
                f"request of class {slo_class!r}; name that, too"
            )
        return int(ranks[slo_class])

    def _draw(self, name: str, number: int) -> Any:
        """Draw values, `number` of them; a longer workload begins with the shorter."""
        shares: Shares | Names = getattr(self, name)
        if not isinstance(shares, Mapping):
            return shares
        values = np.array(list(shares))
        ends = np.cumsum(list(shares.values()))
        u = Streams(self.seed).generator(name).random(number)
        drawn = np.searchsorted(ends, u, side="right")
        return values[np.minimum(drawn, len(values) - 1)]


def _owners(requests: Sequence[RequestSpec]) -> NDArray[np.int64] | None:
    """Return a number for each session, or None where each request is its own."""
    if isinstance(requests, RequestColumns):
        return None
    sessions = numbers(requests, "session_id")
    previous = numbers(requests, "previous_id")
    is_of_one = (previous == NONE) | (sessions == sessions[previous])
    if (sessions != NONE).all() and is_of_one.all():
        _, first, kind = np.unique(sessions, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[kind]
    owners: list[int] = []
    of_session: dict[int, int] = {}
    num_owners = 0
    for request in requests:
        owner = None
        if request.previous_id is not None:
            owner = owners[request.previous_id]
        elif request.session_id is not None:
            owner = of_session.get(request.session_id)
        if owner is None:
            owner, num_owners = num_owners, num_owners + 1
        if request.session_id is not None:
            of_session.setdefault(request.session_id, owner)
        owners.append(owner)
    return np.array(owners, dtype=np.int64)


def _where(is_so: bool | NDArray[np.bool_], yes: Any, no: Any) -> Any:
    """Choose a value; one for all stays one."""
    if isinstance(is_so, bool):
        return yes if is_so else no
    return np.where(is_so, yes, no)


def _each(value: Any) -> Iterable[Any]:
    """Return values one by one, without end if one holds for all."""
    if not isinstance(value, np.ndarray):
        return repeat(value)
    if value.dtype.kind != "U":
        return list(value.tolist())
    # Each text would be an object of its own.
    return map(sys.intern, chain.from_iterable(some.tolist() for some in parts(value)))


def _stated(own: int | None, other: int | None) -> int | None:
    return other if own is None else own


def _check_shares(name: str, shares: Shares, low: int, high: int) -> None:
    remedy = f"give one number, or shares such as {{{max(low, 1)}: 0.9, 4: 0.1}}"
    if not isinstance(shares, Mapping):
        whole(name, shares, low, high, remedy)
        return
    for value in shares:
        whole(name, value, low, high, remedy)
    _check_sum(name, shares, remedy)


def _is_ranked(value: object) -> bool:
    """Whether priorities follow from service levels."""
    return isinstance(value, Mapping) and any(isinstance(each, str) for each in value)


def _check_priority(priority: Shares | Ranks) -> None:
    if not _is_ranked(priority):
        shares: Any = priority
        _check_shares("priority", shares, -_MAX_PRIORITY, _MAX_PRIORITY)
        return
    ranks: Mapping[Any, Any] = priority  # type: ignore[assignment]
    remedy = "give each service level a whole number, such as {gold: 0, bronze: 1}"
    for name, rank in ranks.items():
        if not isinstance(name, str):
            raise WorkloadError(
                f"priority must have names or numbers for keys; got {name!r} beside "
                f"names; {remedy}"
            )
        whole(f"priority.{name}", rank, -_MAX_PRIORITY, _MAX_PRIORITY, remedy)


def _check_names(name: str, names: Names) -> None:
    remedy = "give a name, or shares such as {interactive: 0.8, batch: 0.2}"
    if isinstance(names, str):
        return
    if not isinstance(names, Mapping):
        raise WorkloadError(f"{name} must be a name; got {names!r}; {remedy}")
    for each in names:
        if not isinstance(each, str) or not each:
            raise WorkloadError(f"{name} must be a name; got {each!r}; {remedy}")
    _check_sum(name, names, remedy)


def _check_output_end(output_end: Names | None) -> None:
    if output_end is None:
        return
    _check_names("output_end", output_end)
    for each in [output_end] if isinstance(output_end, str) else output_end:
        one_of("output_end", each, OUTPUT_ENDS)


def _check_sum(name: str, shares: Mapping[Any, float], remedy: str) -> None:
    for value, share in shares.items():
        between(f"{name}: the share of {value}", share, 0, 1, remedy)
    total = math.fsum(shares.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise WorkloadError(f"{name}: shares must add up to 1, got {total:g}; {remedy}")
