"""Steps taken one after the other, each before the next is formed."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from sim.costs.pricing import batch_total_of, decode_ends_of
from sim.engine.common_prefix import ByCommonPrefix
from sim.engine.sampling import last_num_tokens, running_order
from sim.engine.steps.base import ByCount, Steps, no_length, queue_lengths
from sim.results.recording.step_rows import pack_facts, pack_formed, pack_stretch
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from sim.costs.base import CostModel, DecodeEnds, StepCost
    from sim.engine.beside import Beside
    from sim.engine.common_prefix import CommonPrefixes
    from sim.engine.steps.base import Owner
    from sim.results.recording.recorder import Recorder
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request


class QuietSteps:
    """Steps in which the same decodes run and nothing else happens.

    They are priced, taken and written down at once, as far as a horizon: the first
    that ends there or later is the last.

    Parameters
    ----------
    clock
        Counts of the decodes: `num_decodes`, `num_base_tokens`.
    tables
        Counts of their blocks.
    most
        Returns how many steps, up to a number, are quiet.
    advance
        Takes so many; returns what is noted of them one by one.
    decode_ends
        From a number of decodes to what says when their steps end.
    cost_model, recorder
        Of the engine.

    Attributes
    ----------
    most
        See above.
    waiting
        The requests that wait meanwhile.
    note_each
        Takes what `advance` returns.
    beside
        What runs beside the steps of the engine, or None.
    note_begins
        Takes when the steps that were taken began, or None.
    """

    def __init__(  # noqa: PLR0917 - the parts of a stretch
        self,
        clock: Any,
        tables: Any,
        most: Callable[[int], int],
        advance: Callable[[int], list[int]],
        decode_ends: Callable[[int], DecodeEnds],
        cost_model: CostModel,
        recorder: Recorder,
    ) -> None:
        log = recorder.steps
        self.waiting: Sized = ()
        self.beside: Beside | None = None
        self.note_begins: Callable[[list[float]], object] | None = None
        self.most = most
        self._log_ends: Callable[[list[float]], object] = log.ends_s.fromlist
        self.note_each: Callable[[list[int]], object] = log.new_blocks.fromlist
        self._clock = clock
        self._tables = tables
        self._num_usable_blocks: int = tables.num_usable_blocks
        self._advance = advance
        self._ends_of: Any = ByCount(decode_ends)
        self._cost_model = cost_model
        self._packed = log.packed
        self._num_waiting = 0

    def share(self, prefixes: CommonPrefixes) -> None:
        """Price steps by the prefix that all share, noted when they are looked at."""
        self._ends_of = ByCommonPrefix(
            prefixes, lambda model: ByCount(decode_ends_of(model))
        )
        ends_s, take, clock = self.ends_s, self.take, self._clock

        def noted_ends_s(*stretch: Any) -> list[float]:
            prefixes.note_decodes(clock.num_decodes)
            return ends_s(*stretch)

        def noted_take(*stretch: Any) -> tuple[int, float]:
            prefixes.note_decodes(clock.num_decodes)
            return take(*stretch)

        self.ends_s = noted_ends_s  # type: ignore[method-assign,assignment]
        self.take = noted_take  # type: ignore[method-assign,assignment]

    def ends_s(
        self, step: int, num_steps: int, now_s: float, until_s: float
    ) -> list[float]:
        """Return when `num_steps` steps from `step` on end, in seconds, or fewer.

        For steps that are taken later, when others may have come to wait.
        """
        clock = self._clock
        self._note_queue()
        num_decodes = clock.num_decodes
        context = clock.num_base_tokens + num_decodes * step
        ends_of: DecodeEnds = self._ends_of[num_decodes]
        return ends_of(context, num_steps, now_s, until_s)

    def _note_queue(self) -> None:
        """Note the queue when steps begin, for when they are written down."""
        self._num_waiting = len(self.waiting)

    def take(
        self,
        step: int,
        num_steps: int,
        now_s: float,
        until_s: float,
        ends_s: list[float] | None = None,
    ) -> tuple[int, float]:
        """Take steps, and write them down; return how many, and when the last ends.

        Parameters
        ----------
        step, num_steps
            The first, and how many there are at most.
        now_s, until_s
            When it begins, and the horizon.
        ends_s
            When they end, if `ends_s` has said so.

        Raises
        ------
        CostError
            If one of them takes no finite time of more than zero (invariant 3).
        """
        clock, beside = self._clock, self.beside
        if beside is not None:
            beside.go_on(now_s)
        num_decodes = clock.num_decodes
        context = clock.num_base_tokens + num_decodes * step
        if ends_s is None:
            self._note_queue()
            ends_s = self._ends_of[num_decodes](context, num_steps, now_s, until_s)
        num_steps = len(ends_s)
        before_s, last_s = (ends_s[-2] if num_steps > 1 else now_s), ends_s[-1]
        if not before_s < last_s < inf:
            context += (num_steps - 1) * num_decodes
            shape = BatchShape(num_decodes, context, 0, 0, 0, 0)
            raise no_length(self._cost_model, shape, [now_s, *ends_s][-2])
        log_ends = self._log_ends
        log_ends(ends_s)
        self._go_on(step, now_s, num_decodes, context, num_steps)
        if self.note_begins is not None:
            self.note_begins([now_s, *ends_s[:-1]])
        return num_steps, last_s

    def _go_on(
        self,
        step: int,
        now_s: float,
        num_decodes: int,
        context: int,
        num_steps: int,
    ) -> None:
        """Let decodes go on for some steps, and write down that they do."""
        tables, beside = self._tables, self.beside
        # Python looks up by name a callable that is neither method nor local variable.
        note_each, advance = self.note_each, self._advance
        self._packed.append(
            pack_stretch(
                step,
                now_s,
                self._num_waiting,
                num_decodes,
                context,
                self._num_usable_blocks - tables.num_free_blocks,
                tables.num_logical_blocks,
                0 if beside is None else beside.num_held_tokens,
                num_steps,
            )
        )
        note_each(advance(num_steps))


class WholeSteps(Steps):
    """Steps of a scheduler whose batches are objects."""

    passes_over: ClassVar[bool] = False
    """Whether decodes that run may get no token, which the calendar is told of."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        beside = owner.beside
        self._schedule: Callable[[float], SchedulerOutput] = (
            owner.scheduler if beside is None else beside
        ).schedule
        self._price: Callable[[BatchShape], StepCost] = (
            owner.cost_model if beside is None else beside
        ).step
        self._cost: StepCost | None = None

    def take(self, step: int, now_s: float) -> float:
        output = self._batch = self._schedule(now_s)
        self.shape = output.shape
        if self._prefixes is not None:
            self._prefixes.note_batch(output.shape)
        cost = self._cost = self._price(output.shape)
        self._packed.append(
            pack_facts(
                step,
                now_s,
                *queue_lengths(self._scheduler),
                *output.shape,
                *self._scheduler.cache_usage(),
                len(output.preemptions),
                output.num_recomputed_tokens,
                0,
            )
        )
        end_s = self._end_s(now_s, cost.total_s)
        self._check_length(now_s, end_s)
        self._log_end(end_s)
        if self._pace is not None:
            return end_s
        self._note(step, now_s)
        return self._enter(step, now_s, end_s)

    def _end_s(self, now_s: float, total_s: float) -> float:
        """Return when a step that takes so long ends."""
        return now_s + total_s

    def _keep(self, cost: StepCost) -> None:
        self._cost = cost

    def _output(self) -> SchedulerOutput:
        assert self._batch is not None
        return self._batch

    def _note(self, step: int, now_s: float) -> None:
        output, cost = self._output(), self._cost
        assert cost is not None
        if output.preemptions:
            self._note_preemptions(step, now_s, output.preemptions)
        if self.passes_over and self._scheduler.passed_over:
            self._calendar.wait(self._scheduler.passed_over, step)
        self._show(step, now_s, cost, output)
        if self._pace is None:
            self._note_if_empty(step)
        self._owner.is_alone = False

    def appear(self, step: int, end_s: float) -> list[Request]:
        finished: list[Request] = self._owner.sample(self._batch, step, end_s)
        self._scheduler.update(finished)
        self._owner.is_alone = False
        return finished


class ClockedSteps(Steps):
    """Steps of a scheduler that keeps a decode clock, by the shapes of batches."""

    quiet: QuietSteps

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        scheduler, beside, model = owner.scheduler, owner.beside, owner.cost_model
        # Quiet steps that end no request bring nothing, except beside a tier.
        self.tells_quiet = beside is not None
        asked = scheduler if beside is None else beside
        self.due_steps = owner.calendar.steps
        self._running, self._waiting = scheduler.running, scheduler.waiting
        self._form: Callable[[float], tuple[int, ...]] = asked.form
        self._usage_facts = scheduler.usage_facts
        self._batch_total: Callable[..., float] = (
            batch_total_of(model) if beside is None else beside.batch_total
        )
        tables, log = scheduler.tables, self._log
        log.describe_pool(tables.num_usable_blocks, scheduler.block_size)
        self.quiet = self._quiet_steps(asked.quiet_steps)
        if owner.prefixes is not None:
            self._share(owner.prefixes)
        self.quiet.waiting, self.quiet.beside = scheduler.waiting, beside
        if scheduler.groups is not None:
            self.quiet.note_each = log.facts.fromlist
        usage = owner.recorder.groups
        if usage is not None:
            self.quiet.note_begins = lambda begins_s: usage.note_all(
                begins_s, scheduler.num_blocks_by_group
            )
        self._shown = ShownSteps(owner, self)
        self._foresees_usage: bool = getattr(scheduler, "foresees_usage", False)
        count_blocks = getattr(scheduler, "count_blocks", None)
        if count_blocks is not None and self._may_stretch():
            count_blocks()

    def _quiet_steps(self, most: Callable[[int], int]) -> QuietSteps:
        scheduler, model = self._scheduler, self._owner.cost_model
        return QuietSteps(
            *(scheduler.clock, scheduler.tables, most, scheduler.advance),
            *(decode_ends_of(model), model, self._owner.recorder),
        )

    def _share(self, prefixes: CommonPrefixes) -> None:
        """Price steps by the prefix that their requests share, noted before each."""
        self._form = prefixes.noting(self._form)
        self.quiet.share(prefixes)
        if self._batches is not None:
            self._batches.share(prefixes)
        else:
            self._batch_total = ByCommonPrefix(prefixes, batch_total_of)

    def look(self) -> Steps:
        owner, beside = self._owner, self._owner.beside
        asks_for_batches = (
            owner.listeners
            or self._scheduler.moves_blocks
            or (owner.keeps_costs and owner.pace is None)
            or (beside is not None and beside.asks)
        )
        way = self._shown if asks_for_batches else self
        way.takes_stretches = self._may_stretch()
        return way

    def _may_stretch(self) -> bool:
        """Whether nothing looks at each step, or may end it sooner or later."""
        owner, tables = self._owner, self._scheduler.tables
        return not owner.listeners and tables.observer is None and owner.pace is None

    def take(self, step: int, now_s: float) -> float:
        scheduler, shape = self._scheduler, self._formed(step, now_s)
        batch_total, log_end = self._batch_total, self._log_end
        end_s = now_s + batch_total(*shape)
        if not now_s < end_s < inf:
            self._check_length(now_s, end_s)
            return end_s
        log_end(end_s)
        if scheduler.preemptions or scheduler.passed_over or not (shape[0] or shape[3]):
            self._note(step, now_s)
        return end_s

    def _formed(self, step: int, now_s: float) -> tuple[int, ...]:
        """Form the batch of a step, and write it down; return its shape."""
        scheduler, form, usage_facts = self._scheduler, self._form, self._usage_facts
        shape = self.shape = form(now_s)
        self._packed.append(
            pack_formed(
                step,
                now_s,
                len(self._running),
                len(self._waiting),
                *shape,
                *usage_facts(),
                len(scheduler.preemptions),
                scheduler.num_recomputed_tokens,
            )
        )
        return shape

    def _keep(self, cost: StepCost) -> None:
        self._log.costs.append(cost)

    def _output(self) -> SchedulerOutput:
        found: SchedulerOutput = self._scheduler.output(self.shape)
        return found

    def _note(self, step: int, now_s: float) -> None:
        scheduler = self._scheduler
        if scheduler.preemptions:
            self._note_preemptions(step, now_s, scheduler.preemptions)
        if scheduler.passed_over:
            self._calendar.wait(scheduler.passed_over, step)
        if self._pace is None:
            self._note_if_empty(step)

    def appear(self, step: int, end_s: float) -> list[Request]:
        scheduler = self._scheduler
        finished: list[Request] = []
        if step == self.due_steps[0]:
            finished = self._calendar.pop(end_s)
        completing = scheduler.completing
        if completing:
            scheduler.begin_decoding(
                self._calendar.first_tokens(completing, step, end_s, finished)
            )
        if finished:
            if len(finished) > 1:
                finished.sort(key=running_order)
            scheduler.update(finished)
        return finished

    def ends_unseen(self, step: int) -> bool:
        if step == self.due_steps[0] or not self._foresees_usage:
            return False
        for request in self._scheduler.completing:  # most often one
            if last_num_tokens(request) <= request.num_tokens + 1:
                return False
        return True

    def settle(self) -> None:
        clock, step = self._scheduler.clock, self._scheduler.step
        for bucket in clock.buckets:
            for request in bucket:
                clock.settle(request, step)


class ShownSteps(WholeSteps):
    """Steps of a scheduler that keeps a decode clock, shown as objects.

    Parameters
    ----------
    owner
        See `Steps`.
    clocked
        The same steps by shapes.
    """

    passes_over = True

    def __init__(self, owner: Owner, clocked: ClockedSteps) -> None:
        super().__init__(owner)
        self._clocked = clocked
        self.due_steps, self.quiet = clocked.due_steps, clocked.quiet

    def appear(self, step: int, end_s: float) -> list[Request]:
        return self._clocked.appear(step, end_s)
