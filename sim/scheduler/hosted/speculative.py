"""The schedulers of an installed vLLM whose steps verify draft tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.base import ScheduledDrafts
from sim.scheduler.batch import VerifyingShape
from sim.scheduler.hosted.batch_queue import QueuedVllmScheduler
from sim.scheduler.hosted.engine import STOP_TOKEN
from sim.scheduler.hosted.scheduler import request_key
from sim.scheduler.v1.speculative import forget_rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.hosted.scheduler import HostedSettings
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.in_flight import Delivery


class SpeculativeVllmScheduler(QueuedVllmScheduler):
    """`VllmScheduler` of an engine that verifies drafts, one step in flight or two.

    See `sim.scheduler.v1.speculative.SpeculativeScheduler` for what that is. The tokens
    of drafts are no one's: how many are right is handed over with the outputs.
    """

    def __init__(self, settings: HostedSettings, cache: CacheConfig) -> None:
        config = settings.speculative_config
        assert config is not None
        super().__init__(settings, cache)
        self.num_speculative_tokens = config.num_speculative_tokens
        self.proposes_ahead = settings.async_scheduling
        self._proposed: dict[str, int] = {}
        self._num_behind_end: dict[str, int] = {}
        self._stale: list[Request] = []

    def schedule(self, now_s: float) -> SchedulerOutput:
        output = super().schedule(now_s)
        assert self._step is not None
        tokens = self.engine.num_drafts(self._step)
        output.drafts = ScheduledDrafts({}, set())
        for request in output.scheduled:
            num_drafts = tokens.get(request_key(request), 0)
            if not num_drafts:
                continue
            output.drafts.num_tokens[request] = num_drafts
            if request in output.admitted:
                output.drafts.padding.add(request)
        if output.drafts.num_tokens:
            output.shape = VerifyingShape.of(output.shape, output.drafts.queries())
        return output

    def num_draft_blocks(self) -> int:
        """Return the blocks of running requests beyond those of their tokens.

        See `sim.scheduler.v1.speculative.SpeculativeScheduler.num_draft_blocks`.
        """
        sizes = [group.spec.block_size for group in self.layout.groups]
        num_blocks = 0
        for key in self.engine.running():
            request = self._requests[key]
            num_tokens = min(request.num_computed_tokens, request.num_tokens)
            num_held = sum(map(len, self.engine.tables(key)))
            num_own = sum(-(-num_tokens // size) for size in sizes)
            num_blocks += max(num_held - num_own, 0)
        return num_blocks

    def reject(self, request: Request, num_drafts: int, num_outputs: int = 0) -> None:
        """Mirror tokens that count as computed no more."""
        request.num_computed_tokens -= num_drafts + num_outputs
        self._num_behind_end[request_key(request)] = num_outputs

    def propose(self, request: Request, num_tokens: int) -> None:
        """Take drafts for a request's next step, to be handed over with the outputs."""
        self._proposed[request_key(request)] = num_tokens

    def deliver(self, output: SchedulerOutput) -> Delivery:
        delivery = super().deliver(output)
        self._stale = delivery.stale
        return delivery

    def update(self, finished: Sequence[Request]) -> None:
        forget_rejected(self._stale)
        super().update(finished)
        self._num_behind_end = {}
        if not self.proposes_ahead:
            proposed, self._proposed = self._proposed, {}
            self.engine.propose(proposed)

    def _sampled(self, key: str, *, is_last: bool) -> list[int]:
        """Return the outputs of a step, those behind the end of a request, too."""
        request = self._requests[key]
        num_before = self.engine.num_tokens(key)[0] - request.num_prompt_tokens
        num_outputs = request.num_output_tokens
        tokens = [
            self._tokens.output(request, index)
            for index in range(num_before, num_outputs)
        ]
        if is_last and request.num_tokens < request.max_num_tokens:
            # Where it is part of a block's key, the last token stays what it is.
            *others, last = tokens
            if not self.enable_caching or last in others:
                tokens[-1] = STOP_TOKEN
            else:
                self.engine.stop_at(key, last)
        return tokens + [STOP_TOKEN] * self._num_behind_end.get(key, 0)
