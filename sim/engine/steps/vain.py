"""Steps that bring no request any further: signs that a run would never end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.engine.sampling import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.scheduler.base import Preemption
    from sim.scheduler.request import Request

MAX_NUM_EMPTY_STEPS = 100_000
"""So many empty steps in a row end a run (invariant 7): a policy may wait for a while,
but not for ever."""

MIN_NUM_VAIN_PREEMPTIONS = 256
"""After so many in a row, and two for each request among them, all requests are looked
at: whether one of them got on meanwhile."""

_MOST_KEPT = 10_000
"""Requests whose preemptions are kept: more do not circle in one engine."""

_Progress = tuple[int, int, int]


class VainSteps:
    """Steps that get nobody on: empty ones in a row, and preemptions that go round.

    A request that no pool or length can hold may stand among the running ones for ever,
    and one beside it compute its prompt, lose its blocks and begin again. The real
    engines go on so, and hang; here the scheduler is asked no more.

    Attributes
    ----------
    are_vain
        Whether the scheduler is asked no more until something comes: it is stuck, has
        had nothing to say for too long, or goes round.
    is_due
        Whether a `look` at all requests is due, before the next step.
    """

    __slots__ = (
        "_furthest", "_latest", "_num_in_row", "_num_vain", "_preempted", "_seen",
        "_was_same", "are_vain", "goes_round", "is_due",
    )  # fmt: skip

    def __init__(self) -> None:
        self.are_vain = self.goes_round = self.is_due = False
        self._was_same = False
        self._num_in_row = self._num_vain = 0
        self._latest = NEVER
        self._furthest: dict[int, _Progress] = {}  # by request that was preempted
        self._preempted: set[int] = set()  # since the latest look
        self._seen: dict[int, _Progress] = {}  # by the latest look

    def note_empty(self, step: int, *, is_stuck: bool) -> None:
        """Note that a step without tokens was formed."""
        if self._latest != step - 1:
            self._num_in_row = 0
        self._latest = step
        self._num_in_row += 1
        self.are_vain = is_stuck or self._num_in_row >= MAX_NUM_EMPTY_STEPS

    def note_tokens(self) -> None:
        """Note that a step with tokens was formed: a wave of others took it on."""
        self.are_vain = self.goes_round

    def note_preemptions(self, preemptions: Sequence[Preemption]) -> None:
        """Note preemptions: in vain if none came further than at the one before."""
        furthest = self._furthest
        for each in preemptions:
            request, lost = each.request, each.num_tokens_lost
            number = request.request_id
            now = (request.num_tokens, request.num_generated_tokens, lost)
            before = furthest.get(number)
            if before is None:
                if len(furthest) >= _MOST_KEPT:
                    furthest.clear()
                furthest[number] = now
            elif now[:2] != before[:2] or lost > before[2]:
                self._begin_anew()
                furthest[number] = now
            else:
                self._num_vain += 1
                self._preempted.add(number)
        enough = max(MIN_NUM_VAIN_PREEMPTIONS, 2 * len(self._preempted))
        self.is_due = self._num_vain >= enough

    def _begin_anew(self) -> None:
        self._furthest.clear()
        self._preempted.clear()
        self._seen.clear()
        self._was_same = False
        self._num_vain = 0

    def look(self, requests: Mapping[int, Request]) -> None:
        """Look at the unfinished requests, between two steps; they are settled.

        Nobody got on if none came, ended or got a token since the look before, and only
        those that were preempted meanwhile have more or less computed. Two such looks
        in a row tell: one that was preempted may have got on since.
        """
        seen = {
            number: (
                request.num_tokens,
                request.num_generated_tokens,
                request.num_computed_tokens,
            )
            for number, request in requests.items()
        }
        before, preempted = self._seen, self._preempted
        is_same = seen.keys() == before.keys() and all(
            now[:2] == before[number][:2]
            and (now == before[number] or number in preempted)
            for number, now in seen.items()
        )
        self.goes_round = self.are_vain = is_same and self._was_same
        self._seen, self._was_same = seen, is_same
        preempted.clear()
        self._num_vain, self.is_due = 0, False

    def end(self) -> None:
        """Note that something has come."""
        self.are_vain = self.goes_round = False
        self._num_in_row = 0
