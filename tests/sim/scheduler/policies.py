"""Victim policies and admission rules for random engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from sim.scheduler.admission import (
    AdmissionRule,
    Conservative,
    FullPrompt,
    PastFuture,
    Watermark,
)
from sim.scheduler.victims import VICTIMS, VictimPolicy
from workloads.lengths import FixedLength

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import EngineView, RunningRequest, WaitingRequest


class Whoever:
    """Chooses without any sense, and differently each time."""

    def __init__(self, stride: int) -> None:
        self.stride, self.num_calls = stride, 0

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return whoever."""
        assert needs.num_blocks >= 0
        self.num_calls += 1
        return running[self.num_calls * self.stride % len(running)]


class Never:
    """Admits nobody: the engine has to see to it that everybody is served."""

    def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
        """Say no."""
        assert head.num_needed_blocks <= engine.num_available_blocks
        assert engine.running
        return False


def victims() -> st.SearchStrategy[VictimPolicy | None]:
    """Built-in policies, none, and senseless ones."""
    kinds: list[type[VictimPolicy]] = list(VICTIMS.values())
    return (
        st.none()
        | st.sampled_from(kinds).map(lambda kind: kind())
        | st.builds(Whoever, st.integers(1, 7))
    )


def rules() -> st.SearchStrategy[AdmissionRule | None]:
    """Built-in rules, none, and one that is never content."""
    learned = {
        "conservativeness": st.sampled_from([0.3, 1.0, 3.0]),
        "output_tokens": st.none() | st.just(FixedLength(6)),
        "window": st.just(5),
        "min_known": st.sampled_from([1, 5]),
    }
    return (
        st.none()
        | st.builds(Watermark, st.sampled_from([0.0, 0.1, 0.5, 0.9]))
        | st.builds(FullPrompt)
        | st.builds(Conservative, **learned)
        | st.builds(PastFuture, **learned)
        | st.builds(Never)
    )
