"""Named random streams: one seed, and independent numbers for every name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from workloads._checks import whole
from workloads._numpy import np


@dataclass(frozen=True, slots=True)
class Streams:
    """Random generators by name, all derived from one seed.

    A stream depends on the seed and on its own name only. Adding a stream, or
    drawing more from one, therefore never shifts another: arrivals stay the same
    when only the lengths change.

    Parameters
    ----------
    seed
        Integer from 0 to 2**64 - 1.

    Raises
    ------
    WorkloadError
        If the seed is no integer in that range.

    Examples
    --------
    >>> Streams(0).generator("arrivals").random() == Streams(0).generator(
    ...     "arrivals"
    ... ).random()
    True
    """

    seed: int

    def __post_init__(self) -> None:
        remedy = "give a small integer, such as 0"
        object.__setattr__(self, "seed", whole("seed", self.seed, 0, 2**64 - 1, remedy))

    def generator(self, name: str) -> np.random.Generator:
        """Return a fresh PCG64 generator, at the start of the named stream."""
        # sha256 and not hash(): the latter differs from one process to the next.
        digest = hashlib.sha256(name.encode()).digest()
        words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
        sequence = np.random.SeedSequence(self.seed, spawn_key=words)
        return np.random.Generator(np.random.PCG64(sequence))
