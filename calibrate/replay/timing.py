"""What a step took, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from calibrate.replay.log import Step


class Timing(NamedTuple):
    """Seconds of a step; medians of several executions."""

    wall_s: float
    """By the host, from the upload of its inputs until the sampled tokens are there."""
    device_s: float
    """Between events of the device: moves, forward pass and sampling."""
    moves_s: float
    """The part of `device_s` that swaps and copies take."""

    @property
    def host_s(self) -> float:
        """What the host adds before the device begins."""
        return self.wall_s - self.device_s


class Executor(Protocol):
    """Whatever runs steps."""

    @property
    def variants(self) -> dict[str, str]:
        """What steps are run with, by operation."""
        ...

    def time(self, step: Step, repeats: int) -> Timing:
        """Return the medians of `repeats` executions, after one that does not count."""
        ...
