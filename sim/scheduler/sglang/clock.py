"""Running decodes of SGLang, advanced by counting the batches in which they decode.

All that run decode together or pause together, while prompts are computed. So what is
known of a request is a constant plus the number of such batches, the *tick*::

    tokens stored      = base_tokens + tick
    tokens known       = the same + 1, or + 0 while an output of it is in flight
    it opens a page    in ticks at which stored tokens are a multiple of the page
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sim.scheduler.request import Request
    from sim.scheduler.sglang.requests import Entry


class DecodeClock:
    """Requests whose prompt was computed, until they end or are retracted.

    Parameters
    ----------
    page_size
        Tokens of a page.
    is_ahead
        Whether a batch is formed before the output of the one before is known.

    Attributes
    ----------
    entries
        Those on the clock, in the order in which they came.
    num_context_tokens
        Tokens that all of them have stored.
    step, tick
        Batches formed, and those of them in which all on the clock decoded.
    """

    def __init__(self, page_size: int, *, is_ahead: bool) -> None:
        self.entries: dict[Request, Entry] = {}
        self.num_context_tokens = 0
        self.step = self.tick = 0
        self._page_size = page_size
        self._is_ahead = is_ahead
        self._decoded = False  # in the latest batch
        self._phases = [0] * page_size

    @property
    def num_decodes(self) -> int:
        """Requests on the clock."""
        return len(self.entries)

    @property
    def num_base_tokens(self) -> int:
        """Context tokens of the next decodes, less a token of each for each step."""
        return self.num_context_tokens + len(self.entries) * (1 - self.step)

    @property
    def buckets(self) -> tuple[Mapping[Request, Entry]]:
        """All on the clock, in one bucket."""
        return (self.entries,)

    # -- joining and leaving --------------------------------------------------

    def join(self, entry: Entry) -> None:
        """Let a request decode from the next tick on."""
        request, num_stored = entry.request, entry.table.num_stored_tokens
        self.entries[request] = entry
        base_tokens = request.base_tokens = num_stored - self.tick
        self.num_context_tokens += num_stored
        self._phases[base_tokens % self._page_size] += 1

    def leave(self, request: Request) -> Entry:
        """Take a request off the clock, its table filled as far as it was stored."""
        entry = self.entries[request]
        self.fill(entry)
        self.forget(entry)
        return entry

    def forget(self, entry: Entry) -> None:
        """Take a request off the clock that holds nothing any more."""
        request = entry.request
        del self.entries[request]
        self.num_context_tokens -= request.base_tokens + self.tick
        self._phases[request.base_tokens % self._page_size] -= 1

    # -- advancing ------------------------------------------------------------

    def num_opening(self, tick: int) -> int:
        """Return how many open a page in a tick."""
        return self._phases[-tick % self._page_size]

    def decode(self, num_ticks: int) -> None:
        """Let all of them store a token, so many times."""
        self.tick += num_ticks
        self.num_context_tokens += num_ticks * len(self.entries)

    def note_batch(self, *, decoded: bool, num_steps: int = 1) -> None:
        """Note that a batch was formed, or several alike."""
        self.step += num_steps
        self._decoded = decoded

    # -- writing down ---------------------------------------------------------

    def fill(self, entry: Entry) -> None:
        """Let the table of a request have all that is stored."""
        table = entry.table
        num_new = entry.request.base_tokens + self.tick - table.num_stored_tokens
        if num_new:
            table.append(np.zeros(num_new, np.int64))

    def settle(self, request: Request, step: int) -> None:
        """Write down the tokens of a request as they are known."""
        del step  # the latest
        self.write((self.entries[request],))

    def write(self, entries: Iterable[Entry]) -> None:
        """Write down the tokens of requests on the clock as they are known.

        Those of which an abort was recorded stay as they were then.
        """
        tick, latest = self.tick, self.step - 1
        for entry in entries:
            if entry.is_ended:
                continue
            request = entry.request
            num_stored = request.num_computed_tokens = request.base_tokens + tick
            awaits = self._is_ahead and (self._decoded or request.joined_step == latest)
            num_known = num_stored if awaits else num_stored + 1
            # a prompt that was too long was replaced by a token
            replaced = request.num_prompt_tokens - entry.num_prompt_tokens
            request.num_tokens = num_known + replaced

    def check(self) -> None:
        """Prove the counts in O(n)."""
        stored = [request.base_tokens + self.tick for request in self.entries]
        require(
            sum(stored) == self.num_context_tokens,
            f"{sum(stored)} tokens on the clock, {self.num_context_tokens} counted",
        )
        for phase, counted in enumerate(self._phases):
            found = sum(
                (tokens - self.tick) % self._page_size == phase for tokens in stored
            )
            require(
                found == counted,
                f"{found} requests on the clock in phase {phase}, {counted} counted",
            )
