"""Leave a share of the pool free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.errors import SchedulerError

if TYPE_CHECKING:
    from sim.scheduler.views import EngineView, WaitingRequest


class Watermark:
    """Admissions leave a share of the pool free, for those that run to grow.

    Parameters
    ----------
    share
        Of all blocks, at least 0 and below 1.

    Raises
    ------
    SchedulerError
        If it is no such share.

    Notes
    -----
    Source: vLLM 0.1.0, ``vllm/core/block_manager.py``, where it is 0.01; V1 has had it
    as an engine argument since 0.24, with which this agrees, whatever the release.
    """

    def __init__(self, share: float = 0.01) -> None:
        if not 0 <= share < 1:
            raise SchedulerError(
                f"share must be at least 0 and below 1, got {share}; give a small one, "
                f"such as 0.01"
            )
        self.share = share

    def num_spare_blocks(self, num_gpu_blocks: int) -> int:
        """Return how many blocks of a pool are left free."""
        return int(self.share * num_gpu_blocks)

    def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
        """Whether enough would be left; see `AdmissionRule`."""
        num_spare_blocks = self.num_spare_blocks(engine.num_gpu_blocks)
        return head.num_needed_blocks + num_spare_blocks <= engine.num_available_blocks
