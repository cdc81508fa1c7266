"""Rules that some settings have besides: spaced prefills, and admission rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sim.errors import SchedulerError
from sim.scheduler.admission import Conservative, FullPrompt, PastFuture, Watermark
from sim.scheduler.views import (
    EngineView,
    RequestView,
    RunningRequest,
    WaitingRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sim.scheduler.admission.base import AdmissionRule
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.views import ColumnHoldings, Holdings

NEVER = 1 << 62
"""More steps than a run has."""


class AdmissionDesk:
    """Asks an admission rule, and tells it of the requests that end.

    Parameters
    ----------
    rule
        Decides.
    holdings
        What the cache knows of running requests.
    num_gpu_blocks, block_size
        Of the pool.
    columns
        The same as `holdings`, where it has running requests in columns.

    Attributes
    ----------
    refusals_stand
        Whether the rule says how long it goes on to say no to a head of which nothing
        is cached, if no request ends, is preempted or withdrawn.
    """

    def __init__(
        self,
        rule: AdmissionRule,
        holdings: Holdings,
        num_gpu_blocks: int,
        block_size: int,
        columns: ColumnHoldings | None,
    ) -> None:
        self._rule = rule
        self._holdings = holdings
        self._num_gpu_blocks = num_gpu_blocks
        self._block_size = block_size
        self._columns = columns
        self._finished = getattr(rule, "finished", None)
        self.refusals_stand = type(rule) in {Conservative, PastFuture}

    def admits(
        self,
        head: WaitingRequest,
        num_available_blocks: int,
        running: Iterable[Request],
    ) -> bool:
        """Return the rule's answer on a request that the engine's own would admit.

        Parameters
        ----------
        head
            The head of the queue.
        num_available_blocks
            Free blocks, less those that the engine's own watermark keeps back.
        running
            The requests that run.

        Raises
        ------
        SchedulerError
            If the rule says neither yes nor no.
        """
        holdings = self._holdings
        engine = EngineView(
            num_gpu_blocks=self._num_gpu_blocks,
            block_size=self._block_size,
            num_available_blocks=num_available_blocks,
            running=lambda: [RunningRequest(each, holdings) for each in running],
            columns=self._columns,
        )
        answer = self._rule.admits(head, engine)
        if answer not in (True, False):
            raise SchedulerError(
                f"admission: admits must return True or False, got "
                f"{str(answer)[:60]}; mend {type(self._rule).__name__}"
            )
        return bool(answer)

    @classmethod
    def for_rule(
        cls,
        rule: AdmissionRule | None,
        holdings: Holdings,
        cache: CacheConfig,
        columns: ColumnHoldings | None,
    ) -> AdmissionDesk | None:
        """Return the desk of a rule, or None for one that `Gate` has itself."""
        if rule is None or type(rule) in {FullPrompt, Watermark}:
            return None
        return cls(rule, holdings, cache.num_gpu_blocks, cache.block_size, columns)

    @property
    def num_standing_steps(self) -> int:
        """Return in how many further steps the latest refusal stands, if any do."""
        return int(min(cast("Conservative", self._rule).num_standing_steps, NEVER))

    def finished(self, requests: Iterable[Request]) -> None:
        """Tell the rule of requests that have ended, if it wants to know."""
        if self._finished is not None:
            for request in requests:
                self._finished(RequestView(request))


class PrefillInterval:
    """At most one step in `interval` computes prompts, unless a backlog waits.

    Parameters
    ----------
    interval
        ``prefill_schedule_interval``: steps from one with prefill to the next, at
        least 2.

    Notes
    -----
    Source: conformance/README.md beside the decision logs, section 9, for vLLM
    0.33.0 (``vllm/v1/core/sched/scheduler.py``).
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._num_steps = 0  # that scheduled at least one token
        self._last_prefill = -interval
        self._has_backlog = False

    def holds(self, *, has_decodes: bool) -> bool:
        """Whether the call that begins must leave prefill alone.

        Without a decode there is none to protect, and the prefill goes on.
        """
        return (
            not self._has_backlog
            and self._num_steps + 1 - self._last_prefill < self.interval
            and has_decodes
        )

    def saw_queue(self, num_waiting: int) -> None:
        """Note the requests that a scan of the waiting queue, not held, left behind."""
        self._has_backlog = num_waiting > 0

    def stepped(self, num_tokens: int, *, carries_prefill: bool) -> None:
        """Note the end of a call and what it scheduled."""
        if num_tokens:
            self._num_steps += 1
        if carries_prefill:
            self._last_prefill = self._num_steps

    def stepped_quietly(self, num_steps: int) -> None:
        """Note steps of decodes only, while no request waits."""
        self._num_steps += num_steps
        self._has_backlog = False


class SharedPrefillInterval(PrefillInterval):
    """The same of ranks that step together: one turn in `interval` computes prompts.

    Parameters
    ----------
    interval
        See `PrefillInterval`.
    num_turns
        Returns how many turns of their wave are over, the same for all ranks.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/engine/core.py`` (`DPEngineCoreProc`,
    `_should_throttle_prefills`); the key acts so from 0.24 on.
    """

    def __init__(self, interval: int, num_turns: Callable[[], int]) -> None:
        super().__init__(interval)
        self._num_turns = num_turns

    def holds(self, *, has_decodes: bool) -> bool:
        is_aligned = self._num_turns() % self.interval == 0
        return has_decodes and not (self._has_backlog or is_aligned)
