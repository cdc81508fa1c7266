"""Room for what the outputs are expected to become."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from sim.errors import SchedulerError
from sim.scheduler.admission.output_lengths import OutputLengths
from workloads.lengths import LengthDistribution  # noqa: TC001 - read by sim.config.plug

if TYPE_CHECKING:
    from sim.scheduler.views import EngineView, RequestView, WaitingRequest


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

    def finished(self, request: RequestView) -> None:
        """Learn how long an output was; see `AdmissionRule`."""
        self.lengths.finished(request)

    def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
        """Whether all requests fit, grown as expected; see `AdmissionRule`."""
        if not self.lengths.is_known:
            return head.num_full_blocks <= engine.num_available_blocks
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        size, available = engine.block_size, engine.num_available_blocks
        factor, rest_of = self.conservativeness, self.lengths.expected_rest
        num_known_blocks = ceil(head.num_tokens / size)
        num_blocks = head.num_full_blocks - num_known_blocks
        num_blocks += ceil((head.num_tokens + factor * rest_of(head)) / size)
        running = engine.columns
        most = running.max_num_tokens - running.num_prompt_tokens
        rests = self.lengths.expected_rests(running.num_output_tokens, most)
        num_tokens = running.num_prompt_tokens + running.num_output_tokens
        grown = np.ceil((num_tokens + factor * rests) / size)
        num_blocks += int(grown.sum()) - int(running.num_blocks.sum())
        return num_blocks <= available
