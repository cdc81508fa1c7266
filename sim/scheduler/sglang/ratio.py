"""The share of their limits that running requests are expected to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.sglang.settings import RETRACT_DECODE_STEPS

if TYPE_CHECKING:
    from collections.abc import Collection

    from sim.scheduler.sglang.requests import Entry


class NewTokenRatio:
    """It falls with each decode, and rises with a retraction.

    Parameters
    ----------
    first, least, decay
        Where it begins, how far it falls, and by how much with a decode.

    Attributes
    ----------
    value
        The share.

    Notes
    -----
    Source: SGLang 0.5.9, ``managers/scheduler.py`` (`new_token_ratio`).
    """

    def __init__(self, first: float, least: float, decay: float) -> None:
        self.value = self._first = first
        self._least = least
        self._decay = decay

    def decay(self, num_decodes: int = 1) -> None:
        """Expect a little less of running requests, after each of some decodes."""
        for _ in range(num_decodes):
            if self.value == self._least:
                return
            self.value = max(self.value - self._decay, self._least)

    def retracted(self, left: Collection[Entry]) -> None:
        """Expect what the requests that are left write in some further decodes."""
        num_outputs = sum(entry.num_outputs for entry in left)
        most = sum(entry.max_new_tokens for entry in left)
        num_expected = num_outputs + RETRACT_DECODE_STEPS * len(left)
        self.value = min(1.0, num_expected / (most + 1))

    def reset(self) -> None:
        """Expect what is expected at first: nothing runs."""
        self.value = self._first
