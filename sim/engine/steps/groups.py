"""Steps of sequence groups whose decodes are kept on a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.costs.pricing import decode_ends_of
from sim.engine.steps.single import QuietSteps, WholeSteps

if TYPE_CHECKING:
    from sim.engine.steps.base import Owner, Steps
    from sim.scheduler.groups.decodes import GroupDecodes


class GroupSteps(WholeSteps):
    """`WholeSteps` of sequence groups whose decodes are kept on a clock.

    Parameters
    ----------
    owner
        See `Steps`.
    decodes
        The clock.
    """

    quiet: QuietSteps

    def __init__(self, owner: Owner, decodes: GroupDecodes) -> None:
        super().__init__(owner)
        self._decodes: GroupDecodes | None = decodes
        self.due_steps = owner.sample.due_steps
        log, model = self._log, owner.cost_model
        log.describe_pool(decodes.num_usable_blocks, decodes.block_size, stretches=True)
        self.quiet = QuietSteps(
            *(decodes, decodes, decodes.quiet_steps, self._advance),
            *(decode_ends_of(model), model, owner.recorder),
        )

    def look(self) -> Steps:
        decodes = self._decodes
        if decodes is not None and self._owner.listeners:
            self._scheduler.drop_decodes()
            decodes = self._decodes = None
        # Nothing may hear of their blocks.
        self.takes_stretches = decodes is not None and not decodes.is_observed
        if decodes is not None:
            self.quiet.waiting = decodes.scheduler.waiting
        return self

    def _advance(self, num_steps: int) -> list[int]:
        self._batch = None
        assert self._decodes is not None
        return self._decodes.advance(num_steps)

    def settle(self) -> None:
        if self._decodes is not None:
            self._decodes.settle_all()

    def end(self) -> None:
        self.settle()
        if self._decodes is not None:
            self._decodes.leave_all()
