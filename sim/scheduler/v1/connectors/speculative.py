"""Engines with a KV connector whose steps verify draft tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.v1.connectors.head_blocks import DraftingHeadBlocks
from sim.scheduler.v1.connectors.in_flight import QueuedConnectorScheduler
from sim.scheduler.v1.speculative import SpeculativeScheduler

if TYPE_CHECKING:
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.scheduler import Shape
    from sim.scheduler.v1.settings import Settings


class SpeculativeConnectorScheduler(QueuedConnectorScheduler, SpeculativeScheduler):
    """`SpeculativeScheduler` with a KV connector, one step in flight or two.

    What is different follows from slots that drafts will take:

    - A load has none of them, so that both ends have as many blocks; it gets them when
      the request is admitted, with empty drafts, for its last token.
    - A load leaves enough free blocks to a first step with drafts, of its own and of
      each prompt and load that is under way when the call begins or since.
    - Keys of blocks cover no token behind them, so that a drafter that reads hidden
      states computes the last block of a hit again.

    Parameters
    ----------
    settings, cache
        See `ConnectorScheduler`; `settings` have a ``speculative_config``.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py`` (`_spec_decode_step_blocks`,
    `_request_remaining_blocks`) and ``vllm/config/vllm.py``.
    """

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        super().__init__(settings, cache)
        assert settings.speculative_config is not None
        self._head_blocks = DraftingHeadBlocks(
            *(self.gate, self.tables, self.running, self._most_slots),
            drafts=settings.speculative_config,
            max_model_len=settings.max_model_len,
            block_sizes=[group.spec.block_size for group in self.layout.groups],
            extend=self._extend_known,
        )
        self._was_under_way: dict[Request, None] = {}

    def form(self, now_s: float) -> Shape:
        self._was_under_way = self._loads.begun | super()._in_mid_way()
        return super().form(now_s)

    def _in_mid_way(self) -> dict[Request, None]:
        return self._was_under_way | super()._in_mid_way()

    _check_blocks = SpeculativeScheduler._check_blocks
