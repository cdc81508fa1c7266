"""A network between engines: transfers that go on at once share its links."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

from sim.engine.clock import ARRIVAL_PRIORITY, At

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import simpy


class Flow:
    """A transfer from one engine to another.

    Attributes
    ----------
    source, target
        Places of the engines.
    num_bytes, rest_bytes
        What it moves, and what of that is left.
    bytes_per_s
        Its present share.
    """

    __slots__ = (
        "bytes_per_s",
        "is_over",
        "num_bytes",
        "on_end",
        "rest_bytes",
        "source",
        "target",
    )

    def __init__(
        self, source: int, target: int, num_bytes: float, on_end: Callable[[], object]
    ) -> None:
        self.source = source
        self.target = target
        self.num_bytes = self.rest_bytes = num_bytes
        self.bytes_per_s = 0.0
        self.on_end = on_end
        self.is_over = False


class Network:
    """Each engine has a link to a switch, which is never the bottleneck.

    The transfers of a link get equal parts of it; what one cannot use, as its other
    end is narrower, goes to the others (max-min fairness). With one busy link this is
    processor sharing.

    Parameters
    ----------
    env
        The clock.
    bytes_per_s
        Of the link of each engine, one way.

    Attributes
    ----------
    flows
        Transfers that have begun and not ended.
    """

    def __init__(self, env: simpy.Environment, bytes_per_s: Sequence[float]) -> None:
        self.env = env
        self._bytes_per_s = list(bytes_per_s)
        self.flows: dict[Flow, None] = {}
        self._moving: dict[Flow, None] = {}
        self._now_s = 0.0
        self._plan = 0  # number of the latest one
        self._taken: dict[tuple[str, int], tuple[int, float]] = {}  # by link
        self._endless: set[tuple[str, int]] = set()  # links of takings without an end
        self._num_takings = 0
        self._given_back: dict[tuple[str, int], int] = {}  # by link, the last one
        self._next: Flow | None = None

    def begin(
        self,
        source: int,
        target: int,
        num_bytes: float,
        fixed_s: float,
        on_end: Callable[[], object],
    ) -> Flow:
        """Begin a transfer now.

        Parameters
        ----------
        source, target
            Places of the engines.
        num_bytes
            What is moved, above 0.
        fixed_s
            Seconds before the first byte, in which nothing of a link is taken.
        on_end
            Called at its end.
        """
        flow = Flow(source, target, num_bytes, on_end)
        self.flows[flow] = None
        begun = At(self.env, self.env.now + fixed_s, ARRIVAL_PRIORITY)
        begun.callbacks.append(partial(self._move, flow))
        return flow

    def cancel(self, flow: Flow) -> None:
        """End a transfer that is of no use any more; nothing is called."""
        if flow.is_over:
            return
        self._follow()
        self._end(flow)
        self._share()

    def take(
        self, way: str, place: int, bytes_per_s: float, begin_s: float, end_s: float
    ) -> None:
        """Let something else have a part of a link for a while, before transfers.

        It takes the place of what had it before, from its begin on.

        Parameters
        ----------
        way, place
            ``"out"`` of an engine, or ``"in"``, and its place.
        bytes_per_s
            Most that it takes; transfers share what is left.
        begin_s, end_s
            From when until when, in seconds; infinite until the next taking.
        """
        self._num_takings += 1
        taken = self._num_takings, bytes_per_s
        (self._endless.add if end_s == inf else self._endless.discard)((way, place))
        now_s = self.env.now
        self._later(max(begin_s, now_s), partial(self._set_taken, (way, place), taken))
        if end_s < inf:
            gone = partial(self._set_free, (way, place), self._num_takings)
            self._later(max(end_s, begin_s, now_s), gone)

    def is_taken(self, way: str, place: int) -> bool:
        """Whether something else has a part of a link now, or will without an end."""
        return (way, place) in self._taken or (way, place) in self._endless

    def give_back(self, place: int) -> None:
        """Let transfers have all of the links of an engine, which is gone."""
        for link in (("out", place), ("in", place)):
            self._given_back[link] = self._num_takings
            self._endless.discard(link)
            if link in self._taken:
                self._set_free(link, self._taken[link][0], None)

    def _later(self, time_s: float, do: Callable[[object], object]) -> None:
        if time_s <= self.env.now:
            do(None)
        else:
            At(self.env, time_s, ARRIVAL_PRIORITY).callbacks.append(do)

    def _set_taken(
        self, link: tuple[str, int], taken: tuple[int, float], _: object
    ) -> None:
        latest = self._taken.get(link, (self._given_back.get(link, 0), 0.0))[0]
        if latest < taken[0]:
            self._follow()
            self._taken[link] = taken
            self._share()

    def _set_free(self, link: tuple[str, int], number: int, _: object) -> None:
        if link in self._taken and self._taken[link][0] == number:
            self._follow()
            del self._taken[link]
            self._share()

    def _end(self, flow: Flow) -> None:
        flow.is_over = True
        del self.flows[flow]
        self._moving.pop(flow, None)

    def _move(self, flow: Flow, _: object) -> None:
        if not flow.is_over:
            self._follow()
            self._moving[flow] = None
            self._share()

    def _follow(self) -> None:
        """Let the bytes move that have moved since the latest change."""
        span_s = self.env.now - self._now_s
        self._now_s = self.env.now
        for flow in self._moving:
            flow.rest_bytes -= flow.bytes_per_s * span_s

    def _share(self) -> None:
        """Divide the links among the transfers, and plan the next end."""
        self._divide()
        self._plan += 1
        self._next, span_s = None, inf
        for flow in self._moving:
            if not flow.bytes_per_s:
                continue
            own_s = max(flow.rest_bytes, 0.0) / flow.bytes_per_s
            if own_s < span_s:
                self._next, span_s = flow, own_s
        if self._next is not None:
            end = At(self.env, self.env.now + span_s, ARRIVAL_PRIORITY)
            end.callbacks.append(partial(self._end_next, self._plan))

    def _divide(self) -> None:
        users: dict[tuple[str, int], list[Flow]] = {}
        for flow in self._moving:
            users.setdefault(("out", flow.source), []).append(flow)
            users.setdefault(("in", flow.target), []).append(flow)
        left = {link: self._bytes_per_s[link[1]] for link in users}
        for link in left.keys() & self._taken.keys():
            left[link] = max(left[link] - self._taken[link][1], 0.0)
        num = {link: len(flows) for link, flows in users.items()}
        done: set[Flow] = set()
        while num:
            narrowest = min(num, key=lambda link: left[link] / num[link])
            share = left[narrowest] / num[narrowest]
            for flow in users[narrowest]:
                if flow in done:
                    continue
                done.add(flow)
                flow.bytes_per_s = share
                for link in (("out", flow.source), ("in", flow.target)):
                    left[link] -= share
                    num[link] -= 1
            num = {link: count for link, count in num.items() if count}

    def _end_next(self, plan: int, _: object) -> None:
        if plan != self._plan:
            return
        self._follow()
        # The one that ends has no rest, whatever rounding says.
        ended = [
            flow
            for flow in self._moving
            if flow is self._next or flow.rest_bytes <= 1e-9 * flow.num_bytes
        ]
        for flow in ended:
            self._end(flow)
        self._share()
        for flow in ended:
            flow.on_end()
