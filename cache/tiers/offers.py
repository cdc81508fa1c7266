"""How often chunks were offered to a tier that stores only what comes again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Sequence


class OfferCounts:
    """Offers of the keys that were offered last.

    Parameters
    ----------
    most
        Keys that are counted at a time; the one whose offer is the longest ago makes
        room, but never one of the lot at hand.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/manager.py`` (`_record_accesses`).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, key: int) -> int:
        """Return how often a key was offered, as far as is known."""
        return self._counts.get(key, 0)

    def add(self, keys: Sequence[int]) -> None:
        """Count an offer of each key; one that finds no room is not known."""
        counts = self._counts
        known = [key for key in keys if key in counts]
        for key in known:
            counts.move_to_end(key)
            counts[key] += 1
        num_others = len(counts) - len(known)
        for key in keys:
            if key in counts:
                continue
            if len(counts) >= self._most:
                if not num_others:
                    continue
                counts.popitem(last=False)
                num_others -= 1
            counts[key] = 1

    def check(self) -> None:
        """Prove that no more keys are counted than may be, each at least once."""
        require(
            len(self._counts) <= self._most
            and all(n > 0 for n in self._counts.values()),
            f"tier: {len(self._counts)} keys are counted, at most {self._most} may be",
        )
