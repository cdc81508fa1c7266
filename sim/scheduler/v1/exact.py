"""Settings of the V1 scheduler under which the fast path is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.admission import FullPrompt, Watermark
from sim.scheduler.v1.queues import REQUEST_QUEUES
from sim.scheduler.victims import LatestArrival

if TYPE_CHECKING:
    from cache.v1.policies.base import CachePolicy
    from sim.scheduler.admission import AdmissionRule
    from sim.scheduler.v1.settings import V1Settings
    from sim.scheduler.victims import VictimPolicy


class NotExactError(Exception):
    """Settings under which the fast path would not equal the stepwise one."""


def check_exact(
    settings: V1Settings,
    sliding_window: int | None,
    preemption_victim: VictimPolicy | None = None,
    admission: AdmissionRule | None = None,
) -> None:
    """Refuse settings under which decodes are not quiet.

    Parameters
    ----------
    settings, sliding_window, preemption_victim, admission
        Of `sim.scheduler.v1.scheduler.V1Scheduler`.

    Raises
    ------
    NotExactError
        With the key and why.
    """
    budget, threshold = settings.token_budget, settings.long_prefill_token_threshold
    queue = REQUEST_QUEUES[settings.scheduling_policy]
    victim, rule = type(preemption_victim), type(admission)
    reasons = {
        f"scheduling_policy is {settings.scheduling_policy}: the victim need not be "
        f"the last that runs": not getattr(queue, "exact_on_fast_path", False),
        f"preemption_victim: {victim.__name__} may choose another than the last that "
        f"runs": preemption_victim is not None and victim is not LatestArrival,
        f"admission: {rule.__name__} looks at more than free blocks": (
            admission is not None and rule not in (Watermark, FullPrompt)
        ),
        "sliding_window: decodes give up blocks on the way": sliding_window is not None,
        "long_prefill_token_threshold: several prompts may be in mid-way": (
            0 < threshold < budget
        ),
        "enable_chunked_prefill is off, and long_prefill_token_threshold cuts prompts "
        "all the same": threshold > 0 and not settings.enable_chunked_prefill,
        "prefill_schedule_interval holds prompts back": (
            settings.prefill_schedule_interval > 1
        ),
        f"max_num_batched_tokens or max_num_scheduled_tokens: a batch of "
        f"{settings.most_running} decodes may use up the budget of {budget} tokens": (
            settings.most_running > budget
        ),
        "enable_chunked_prefill is off, and the release looks past the queue's head": (
            not settings.enable_chunked_prefill
            and settings.dialect.skips_over_budget_heads
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotExactError(reason)


def check_order(policy: CachePolicy) -> None:
    """Refuse a policy that evicts in another order than the runs of blocks are kept.

    Raises
    ------
    NotExactError
        With the policy, unless its own class says that it is exact.
    """
    kind = type(policy)
    if not vars(kind).get("exact_on_fast_path", False):
        raise NotExactError(
            f"evictor: {kind.__name__} evicts block by block, the fast path in runs "
            f"and in the engine's own order"
        )
