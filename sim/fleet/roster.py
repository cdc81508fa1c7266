"""States of the replicas of a fleet, their events, and the requests lost by them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class ReplicaState(Enum):
    """Whether an engine serves."""

    STARTING = "starting"
    """Will take requests: its process begins, and weights are loaded."""
    READY = "ready"
    """Takes requests."""
    DRAINING = "draining"
    """Ends those that it has, and takes none."""
    DYING = "dying"
    """Is in its last step."""
    OFF = "off"


class EventKind(Enum):
    """Kind of an event: a replica dies, starts, drains or changes its speed."""

    DIE = "die"
    """Its process ends, with all that it holds, after the step in progress."""
    DRAIN = "drain"
    """It takes no more requests, and is off when it has served those it has."""
    START = "start"
    """It is ready; after a death or a drain to the end with an empty cache."""
    SLOW = "slow"
    """Its steps take `factor` times as long, until the next such event."""


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """Something that happens to a replica at a time.

    Parameters
    ----------
    time_s
        When, in seconds.
    kind
        Its kind.
    place
        Of the engine.
    retries
        Of a death: whether its requests begin again elsewhere; otherwise they are lost.
    factor
        Of a slow replica.
    """

    time_s: float
    kind: EventKind
    place: int
    retries: bool = True
    factor: float = 1.0


@dataclass(slots=True)
class Toll:
    """Requests that a death interrupted: retried elsewhere, or lost."""

    event: ReplicaEvent
    num_retried: int = 0
    num_lost: int = 0


class Roster:
    """The state of each replica, by place, since when, and how long it held its GPUs.

    Parameters
    ----------
    num_places
        How many replicas there may be; all are ready at first.

    Attributes
    ----------
    states
        By place.
    ready
        Places of the engines that take requests, in order.
    changes
        Time, place and new state of each change, in order.
    """

    def __init__(self, num_places: int) -> None:
        self.states = [ReplicaState.READY] * num_places
        self.ready = [*range(num_places)]
        self.changes: list[tuple[float, int, ReplicaState]] = []
        self._since_s = [0.0] * num_places  # in the present state
        self._on_s = [0.0] * num_places  # up, until the latest change

    def move(self, place: int, state: ReplicaState, now_s: float) -> None:
        """Note that a replica comes into a state."""
        if self.states[place] is not ReplicaState.OFF:
            self._on_s[place] += now_s - self._since_s[place]
        states = self.states
        states[place] = state
        self.ready = [i for i, each in enumerate(states) if each is ReplicaState.READY]
        self._since_s[place] = now_s
        self.changes.append((now_s, place, state))

    def check(self, place: int, state: ReplicaState) -> None:
        """Refuse to go on from another state.

        Raises
        ------
        ValueError
            With both states.
        """
        if self.states[place] is not state:
            raise ValueError(
                f"replica {place} must be {state.value}, is {self.states[place].value}"
            )

    def has_moved(self, place: int, num_changes: int) -> bool:
        """Whether a replica changed since there were so many changes."""
        return any(each == place for _, each, _ in self.changes[num_changes:])

    def is_ready(self, place: int) -> bool:
        """Whether the engine at a place takes requests."""
        return self.states[place] is ReplicaState.READY

    def wanted(self, places: Sequence[int]) -> list[int]:
        """Return the places of replicas that start or are ready.

        Those that Kubernetes would take out first come first: such as start, and of
        equals those that came last.
        """
        ranks = {ReplicaState.STARTING: 1, ReplicaState.READY: 0}
        found = [place for place in places if self.states[place] in ranks]
        found.sort(
            key=lambda i: (ranks[self.states[i]], self._since_s[i], i), reverse=True
        )
        return found

    def free(self, places: Collection[int]) -> list[int]:
        """Return those of some places at which nothing is, in order."""
        return [i for i in places if self.states[i] is ReplicaState.OFF]

    def up_s(self, now_s: float) -> list[float]:
        """Return by place for how many seconds a replica was up."""
        return [
            on_s if state is ReplicaState.OFF else on_s + now_s - since_s
            for on_s, since_s, state in zip(
                self._on_s, self._since_s, self.states, strict=True
            )
        ]
