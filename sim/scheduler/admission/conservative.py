"""Room for what the outputs are expected to become."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Any

from sim.errors import SchedulerError
from sim.scheduler.admission.output_lengths import OutputLengths
from workloads.lengths import LengthDistribution  # noqa: TC001 - read by sim.config.plug

if TYPE_CHECKING:
    from sim.scheduler.views import (
        EngineView,
        RequestView,
        RunningColumns,
        RunningRequest,
        WaitingRequest,
    )


class Conservative:
    """Admit a request if all that run, and it, would fit when grown as expected.

    Expected is the mean rest of outputs that came as far: of those that have ended so
    far, or of a distribution that is given. All of them are taken to be that long at
    the same time, though some end before others have grown: hence the name.

    Parameters
    ----------
    conservativeness
        Factor of the expected rests, above 0. Below 1 admits more, at the price of
        preemptions.
    output_tokens
        What outputs are like; None to learn it from those that end. Until `min_known`
        have, only the known tokens have to fit.
    window
        How many of the latest outputs are remembered.
    min_known
        How many have to be known.

    Raises
    ------
    SchedulerError
        If a value is impossible.

    Notes
    -----
    Source: SGLang, ``python/sglang/srt/managers/schedule_policy.py`` (`PrefillAdder`):
    the rests of those that run, times a ``new_token_ratio`` that
    ``--schedule-conservativeness`` scales, are kept free. SGLang takes the rest up to
    ``max_new_tokens`` and lets the ratio fall while nothing is retracted; the rest here
    is an expectation from the start, and is the new request's, too.
    """

    def __init__(
        self,
        conservativeness: float = 1.0,
        output_tokens: LengthDistribution | None = None,
        window: int = 1000,
        min_known: int = 100,
    ) -> None:
        if not conservativeness > 0:
            raise SchedulerError(
                f"conservativeness must be above 0, got {conservativeness}; give 1.0, "
                f"or less to admit more"
            )
        self.conservativeness = conservativeness
        self.lengths = OutputLengths(output_tokens, window, min_known)
        self._columns: RunningColumns | None = None
        self._num_beside = 0  # requests beside those that are looked through
        self._num_blocks_to_come = 0

    @property
    def num_standing_steps(self) -> float:
        """Return in how many further steps the latest refusal surely stands.

        As long as nothing of the head is cached, and no request ends, is admitted,
        preempted or withdrawn. Decodes are expected to be longer, not shorter, the
        longer they are, and every block that they take is one that is free no more.
        With more than the expected rest on top, the sum falls while the rest does.
        """
        return inf if self.conservativeness <= 1 else 0

    def finished(self, request: RequestView) -> None:
        """Learn how long an output was; see `AdmissionRule`."""
        self.lengths.finished(request)
        self._columns = None

    def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
        """Whether all requests fit, grown as expected; see `AdmissionRule`."""
        available, size = engine.num_available_blocks, engine.block_size
        if not self.lengths.is_known:
            return head.num_full_blocks <= available
        self._look_through(engine)
        num_blocks = self._num_blocks_to_come + head.num_full_blocks
        num_blocks += self._num_grown_blocks(head, size) - ceil(head.num_tokens / size)
        return num_blocks <= available

    def _look_through(self, engine: EngineView) -> None:
        """Count the blocks that running requests will take, once in a step."""
        columns, size = engine.columns, engine.block_size
        if columns is not self._columns:
            self._columns, self._num_beside = columns, 0
            self._begin(columns, size)
        for request in engine.beside_columns(self._num_beside):
            self._num_beside += 1
            self._add(request, size)

    def _begin(self, running: RunningColumns, size: int) -> None:
        """Count those in columns, and no others."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        grown = self._growths(running)
        grown += running.num_tokens
        grown /= size
        num_grown_blocks = int(np.ceil(grown, out=grown).sum())
        self._num_blocks_to_come = num_grown_blocks - int(running.num_blocks.sum())

    def _add(self, request: RunningRequest, size: int) -> None:
        """Count one more."""
        num_grown_blocks = self._num_grown_blocks(request, size)
        self._num_blocks_to_come += num_grown_blocks - request.num_blocks

    def _num_grown_blocks(self, request: RequestView, size: int) -> int:
        """Return how many blocks a request will have in the end."""
        return ceil((request.num_tokens + self._growth(request)) / size)

    def _growth(self, request: RequestView) -> float:
        """Return the tokens that a request is expected to grow by, and the margin."""
        return self.conservativeness * self.lengths.expected_rest(request)

    def _growths(self, running: RunningColumns) -> Any:
        """Return `_growth` of requests in columns."""
        rests = self.lengths.expected_rests(
            running.num_output_tokens, running.most_output_tokens
        )
        rests *= self.conservativeness
        return rests
