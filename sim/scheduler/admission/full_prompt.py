"""Room for the whole prompt, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.scheduler.views import EngineView, WaitingRequest


class FullPrompt:
    """Admit a request only if all its known tokens fit, not just its first chunk.

    After a preemption the known tokens are the prompt and what was generated.

    Notes
    -----
    Source: vLLM 0.33, ``scheduler_reserve_full_isl``, with which this agrees, whatever
    the release; there it has been the default since 0.20. Orca goes further and
    reserves prompt and longest output (Yu et al., "Orca", OSDI 2022, section 4.2).
    """

    def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
        """Whether the whole of `head` fits; see `AdmissionRule`."""
        return head.num_full_blocks <= engine.num_available_blocks
