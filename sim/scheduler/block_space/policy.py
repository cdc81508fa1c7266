"""In which order queued groups are looked at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sim.scheduler.groups.sequence import SequenceGroup

_arrival_time = attrgetter("arrival_time")


class Policy(ABC):
    """An order of sequence groups.

    Source: vLLM 0.2.7, ``vllm/core/policy.py``.
    """

    @abstractmethod
    def get_priority(self, now: float, seq_group: SequenceGroup) -> float:
        """Return how urgent a group is at time `now`, in seconds; more goes first."""

    def sort_by_priority(
        self, now: float, seq_groups: Iterable[SequenceGroup]
    ) -> list[SequenceGroup]:
        """Return the groups, most urgent first; equals keep their order."""
        return sorted(
            seq_groups,
            key=lambda group: self.get_priority(now, group),
            reverse=True,
        )


class FCFS(Policy):
    """First come, first served."""

    def get_priority(self, now: float, seq_group: SequenceGroup) -> float:
        return now - seq_group.arrival_time

    def sort_by_priority(
        self, now: float, seq_groups: Iterable[SequenceGroup]
    ) -> list[SequenceGroup]:
        return sorted(seq_groups, key=_arrival_time)


POLICIES: Mapping[str, type[Policy]] = MappingProxyType({"fcfs": FCFS})
"""Policies of the 2023 schedulers by name."""


class PolicyFactory:
    """Makes policies by name."""

    @staticmethod
    def get_policy(policy_name: str) -> Policy:
        """Return a policy."""
        if policy_name not in POLICIES:
            raise SchedulerError(
                f"policy must be {' or '.join(map(repr, POLICIES))} in this "
                f"generation, got {policy_name!r}; v0 and v1 know priorities"
            )
        return POLICIES[policy_name]()
