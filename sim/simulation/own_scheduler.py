"""Schedulers of users: held to what the engine takes for granted, in every call."""

from __future__ import annotations

import json
from inspect import getattr_static
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from sim.config.contracts import require_methods, watch
from sim.errors import ConfigError
from sim.scheduler.base import CacheUsage, SchedulerOutput, schedules_groups
from sim.scheduler.batch import BatchShape
from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from sim.scheduler.base import Scheduler
    from sim.scheduler.request import Request

_CALLS = (
    "admission_error(request)",
    "add_request(request)",
    "schedule(now_s)",
    "update(finished)",
    "abort(request)",
    "cache_usage()",
    "summary()",
    "check()",
)
_WATCHED = (
    "admission_error",
    "schedule",
    "update",
    "abort",
    "cache_usage",
    "summary",
    "stall_reason",
)
_QUEUES = ("num_running", "num_waiting", "num_swapped")
_ROUNDING = 1e-9
"""By so much a share may be above 1."""


def hold_to_contract(scheduler: Scheduler, where: str) -> None:
    """Refuse a scheduler that lacks a method, and from now on what it may not answer.

    Raises
    ------
    ConfigError
        Now, or from the call that answers wrongly.
    """
    require_methods(scheduler, where, "a scheduler", _CALLS)
    held = _Held(scheduler, where)
    held.check_queues()
    names = (*_WATCHED, *(["add_request"] if held.counts_requests else []))
    methods = {name: getattr(held, name) for name in names}
    watch(scheduler, where, "a scheduler", **methods)


class _Held:
    """The methods of a scheduler, each with a look at its answer."""

    def __init__(self, scheduler: Scheduler, where: str) -> None:
        self._scheduler, self._where = scheduler, where
        self._name = type(scheduler).__name__
        self._admission_error = scheduler.admission_error
        self._add_request = scheduler.add_request
        self._schedule: Callable[[float], SchedulerOutput] = scheduler.schedule
        self._update, self._abort = scheduler.update, scheduler.abort
        self._cache_usage, self._summary = scheduler.cache_usage, scheduler.summary
        self._stall_reason: Any = getattr(scheduler, "stall_reason", None)
        # V1's is a property, which nothing replaces: what it loses is told at the end.
        add = getattr_static(type(scheduler), "add_request", None)
        self.counts_requests = not isinstance(add, property)
        self._num_held = 0
        # Of a group, a request counts tokens otherwise, or not at all; of batches in
        # flight, and of drafts, they are counted before they are known.
        self._counts_tokens = (
            not schedules_groups(scheduler)
            and getattr(scheduler, "max_concurrent_batches", 1) == 1
        )
        self._num_computed: dict[Request, int] = {}

    def admission_error(self, request: Request) -> str | None:
        error = self._admission_error(request)
        if error is not None and not (isinstance(error, str) and error):
            self._refuse("admission_error must return a reason or None", error)
        return error

    def add_request(self, request: Request) -> None:
        self._num_held += 1
        self._add_request(request)

    def update(self, finished: Sequence[Request]) -> None:
        self._num_held -= len(finished)
        for request in finished:
            self._num_computed.pop(request, None)
        self._update(finished)

    def abort(self, request: Request) -> None:
        self._num_held -= 1
        self._num_computed.pop(request, None)
        self._abort(request)

    def schedule(self, now_s: float) -> SchedulerOutput:
        output = self._schedule(now_s)
        if not isinstance(output, SchedulerOutput):
            self._refuse("schedule must return a SchedulerOutput", output)
        if not isinstance(output.shape, BatchShape):
            self._refuse("shape must be a BatchShape, as Batch counts it", output.shape)
        scheduled, num_tokens = output.scheduled, output.num_scheduled_tokens
        if len(scheduled) != len(num_tokens):
            self._refuse(
                f"num_scheduled_tokens must have a number for each of the "
                f"{len(scheduled)} requests in scheduled",
                len(num_tokens),
            )
        if len(set(scheduled)) != len(scheduled):
            self._refuse("scheduled must have a request once", scheduled)
        for request, num in zip(scheduled, num_tokens, strict=True):
            self._check_scheduled(request, num, now_s)
        if output.num_batched_tokens != sum(num_tokens):
            self._refuse(
                f"shape must count the {sum(num_tokens)} tokens of the batch",
                output.num_batched_tokens,
            )
        if self._counts_tokens and output.drafts is None:
            self._check_progress(output)
        self._num_held -= len(output.ignored)
        self.check_queues()
        return output

    def cache_usage(self) -> CacheUsage:
        usage = self._cache_usage()
        if not isinstance(usage, CacheUsage):
            self._refuse("cache_usage must return a CacheUsage", usage)
        *counts, gpu, cpu = usage
        if not all(isinstance(each, Integral) and each >= 0 for each in counts):
            self._refuse("cache_usage must count in whole numbers from 0", usage)
        if not all(
            isinstance(each, Real) and 0.0 <= each <= 1.0 + _ROUNDING
            for each in (gpu, cpu)
        ):
            self._refuse("cache_usage must have shares from 0 to 1", usage)
        return usage

    def summary(self) -> dict[str, Any]:
        counters = self._summary()
        try:
            is_ready = isinstance(counters, dict) and all(
                isinstance(key, str) for key in counters
            )
            json.dumps(counters, allow_nan=False)
        except (TypeError, ValueError) as error:
            self._refuse(f"summary must be JSON-ready ({error})", counters)
        if not is_ready:
            self._refuse("summary must return a table of names", counters)
        return counters

    def check_queues(self) -> None:
        """Refuse lengths of queues that do not count the requests that it has."""
        lengths: list[int] = []
        for name in _QUEUES:
            try:
                length: Any = getattr(self._scheduler, name)
            except AttributeError as error:
                raise ConfigError(
                    f"{self._where}: a scheduler needs {name}, and {self._name} cannot "
                    f"tell it ({error}); mend your class"
                ) from error
            is_whole = isinstance(length, Integral)
            if not (is_whole and length >= 0):
                self._refuse(f"{name} must be a whole number from 0", length)
            lengths.append(length)
        if self.counts_requests and sum(lengths) != self._num_held:
            self._refuse(
                f"{', '.join(_QUEUES)} must add up to the {self._num_held} requests "
                f"that it was given and that have not ended (invariant 1)",
                lengths,
            )

    def stall_reason(self) -> str:
        own: str = "" if self._stall_reason is None else self._stall_reason()
        return own or (
            f"{self._name}.schedule forms empty batches; mend it, or leave "
            f"engine.admission_check on if a request is too large"
        )

    def _check_scheduled(self, request: Request, num_tokens: int, now_s: float) -> None:
        first_s, is_running = request.first_scheduled_s, RequestStatus.RUNNING
        is_first_told = first_s <= now_s  # never where it is NaN
        is_whole = isinstance(num_tokens, int | Integral) and num_tokens >= 0
        if request.status is is_running and is_first_told and is_whole:
            return
        who = f"request {request.request_id} in scheduled"
        if request.status is not is_running:
            self._refuse(f"{who} must be running, by move_to", request.status)
        if not is_whole:
            self._refuse(f"{who} must have a whole number of tokens from 0", num_tokens)
        if not is_first_told:
            self._refuse(
                f"{who} must have a first_scheduled_s, at {now_s} s at the latest",
                first_s,
            )

    def _check_progress(self, output: SchedulerOutput) -> None:
        """Refuse computed tokens that are not those of the batch."""
        known = self._num_computed
        for preemption in output.preemptions:
            known.pop(preemption.request, None)
        for request, num_tokens in zip(
            output.scheduled, output.num_scheduled_tokens, strict=True
        ):
            after = request.num_computed_tokens
            least = known.get(request, 0) + num_tokens
            if not least <= after <= request.num_tokens:
                self._refuse(
                    f"num_computed_tokens of request {request.request_id}, of which "
                    f"{num_tokens} are scheduled, must be from {least} to its "
                    f"{request.num_tokens} tokens",
                    after,
                )
            known[request] = after

    def _refuse(self, rule: str, value: object) -> NoReturn:
        raise ConfigError(
            f"{self._where}: {rule}, got {str(value)[:80]}; mend {self._name}"
        )
