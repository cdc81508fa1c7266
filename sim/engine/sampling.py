"""The model's output for a batch: tokens appear, and outputs end.

The only place that knows how long an output will be (invariant 4): schedulers decide
first, this part then says which requests got a token and which are done.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.base import Preemption, SchedulerOutput

Sampler = Callable[[Any, int, float], list[Request]]
"""From a scheduler's output, the step and its end to the requests it finished."""

# Looked up once: members of an enum are found by a call.
_RUNNING = RequestStatus.RUNNING
_STOPPED = RequestStatus.FINISHED_STOPPED
_LENGTH_CAPPED = RequestStatus.FINISHED_LENGTH_CAPPED


def sample(output: SchedulerOutput, step: int, end_s: float) -> list[Request]:
    """Give a token to every request of the batch that has caught up.

    Parameters
    ----------
    output
        The scheduler's decisions; computed tokens have advanced.
    step
        Index of the step.
    end_s
        When the step ends, in seconds.

    Returns
    -------
    list of Request
        Requests that this output finished, in batch order, their status set.

    Notes
    -----
    A request whose computed tokens reach its length gets one token, others (prompts
    in mid-way) none. It ends at ``length >= max_model_len``, at its max_tokens, or
    where the workload says. Source: vLLM 0.11.2, ``vllm/v1/core/sched/utils.py``
    (`check_stop`), with the end of sequence known from the workload.
    """
    finished: list[Request] = []
    for request in output.scheduled:
        num_tokens = request.num_tokens
        if request.num_computed_tokens == num_tokens:
            num_tokens += 1
            request.num_tokens = num_tokens
            if num_tokens >= request.num_tokens_at_event and _event(
                request, step, end_s
            ):
                finished.append(request)
    return finished


def _event(request: Request, step: int, end_s: float) -> bool:
    """Handle the first token of a streak, or the last token; True if it is done."""
    last = last_num_tokens(request)
    if not request.is_streaking:
        request.begin_streak(step)
        request.num_tokens_at_event = last
        if request.num_output_tokens == 1:
            request.note_first_token(end_s)
    if request.num_tokens < last:
        return False
    request.end_streak()
    finish(request, end_s)
    return True


class InFlightSampler:
    """Lets outputs appear where several steps are in flight.

    Whether a step brings a token is said by the step, not by what its requests have
    computed meanwhile.

    Parameters
    ----------
    scheduler
        It says of each step, when it has ended, whose tokens count.

    Attributes
    ----------
    delivery
        Of the latest step.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.delivery: Any = None

    def __call__(
        self, output: SchedulerOutput, step: int, end_s: float
    ) -> list[Request]:
        """Give tokens; see `sample`."""
        self.delivery = self._scheduler.deliver(output)
        finished: list[Request] = []
        for request in self.delivery.requests:
            request.note_token(step)
            if request.num_output_tokens == 1:
                request.note_first_token(end_s)
            if request.num_tokens >= last_num_tokens(request):
                request.end_streak()
                finish(request, end_s)
                finished.append(request)
        return finished


def last_num_tokens(request: Request) -> int:
    """Return the length at which a request ends, prompt included."""
    oracle, most = request.oracle_num_tokens, request.max_num_tokens
    return oracle if oracle < most else most


def finish(request: Request, end_s: float) -> None:
    """End a request that has got its last token."""
    request.finish_s = end_s
    is_whole = request.num_tokens >= request.oracle_num_tokens
    status = _STOPPED if is_whole else _LENGTH_CAPPED
    if request.status is _RUNNING:  # as `move_to`, which costs a call and a search
        request.status = status
    else:
        request.move_to(status)


NEVER = 1 << 62

running_order = attrgetter("order")
"""Sort key of requests of a scheduler with a decode clock."""


class OutputCalendar:
    """The decodes that end, by the step that gives their last token.

    Attributes
    ----------
    due
        Decodes by step; none stands where all have left.
    steps
        A heap of its keys, and `NEVER`: no decode ends before the first of them.
    """

    def __init__(self) -> None:
        self.due: dict[int, list[Request]] = {}
        self.steps = [NEVER]

    def leave(self, request: Request) -> None:
        """Forget a decode that was preempted or aborted."""
        self.due[request.due_step].remove(request)  # which may be the last of them
        request.due_step = -1

    def forget_preempted(self, preemptions: Iterable[Preemption], step: int) -> None:
        """Forget the decodes that the batch of `step` preempted."""
        for preemption in preemptions:
            request = preemption.request
            if request.due_step >= 0:
                self.leave(request)
                if request.joined_step < step:
                    request.streaks.append((request.joined_step, step - 1))

    def wait(self, requests: Iterable[Request], step: int) -> None:
        """Note that decodes get no token in `step`, and their last one a step later."""
        for request in requests:
            last_step = request.due_step + 1
            self.leave(request)
            self.join(request, last_step)
            if request.joined_step < step:
                request.streaks.append((request.joined_step, step - 1))
            request.joined_step = step + 1

    def join(self, request: Request, last_step: int) -> None:
        """Note when a decode gets its last token."""
        request.due_step = last_step
        if last_step in self.due:
            self.due[last_step].append(request)
        else:
            self.due[last_step] = [request]
            heappush(self.steps, last_step)

    def pop(self, end_s: float) -> list[Request]:
        """Give their last token to decodes; the first of `steps` must end now."""
        step = heappop(self.steps)
        finished = self.due.pop(step)
        for request in finished:
            num_tokens = request.base_tokens + step
            request.num_computed_tokens = num_tokens
            num_tokens += 1
            request.num_tokens = num_tokens
            request.due_step = -1
            request.streaks.append((request.joined_step, step))
            request.finish_s = end_s
            request.status = (
                _STOPPED if num_tokens >= request.oracle_num_tokens else _LENGTH_CAPPED
            )
        return finished

    def first_tokens(
        self, requests: list[Request], step: int, end_s: float, finished: list[Request]
    ) -> list[Request]:
        """Give a token to requests whose last chunk was computed in `step`.

        Those for which that was the last one are added to `finished`.

        Returns
        -------
        list of Request
            Those that decode from the next step on; the calendar knows until when.
        """
        due, all_go_on = self.due, True
        for request in requests:
            num_tokens = request.num_tokens
            if num_tokens == request.num_prompt_tokens:
                request.note_first_token(end_s)
            num_tokens += 1
            request.num_tokens = num_tokens
            request.joined_step = step
            oracle, most = request.oracle_num_tokens, request.max_num_tokens
            last = oracle if oracle < most else most
            if num_tokens < last:
                last_step = request.due_step = step + last - num_tokens
                if last_step in due:
                    due[last_step].append(request)
                else:
                    due[last_step] = [request]
                    heappush(self.steps, last_step)
            else:
                request.streaks.append((step, step))
                finish(request, end_s)
                finished.append(request)
                all_go_on = False
        return requests if all_go_on else [r for r in requests if r.due_step >= 0]


class AheadCalendar(OutputCalendar):
    """`OutputCalendar` where a step is formed before the last output is there.

    A last token of step e makes its request leave when step e + 1 was formed. By then a
    request that ends at a stop token got a slot in it, in vain. One that ends at its
    length limit did not: it stands for e first, so that it is passed over, and then for
    e + 1.

    Attributes
    ----------
    begun
        Requests whose first token is in flight.
    aside
        Decodes that get no further token for now; their last one is in flight.
    drops_stale
        Whether those that are preempted get none of it.
    """

    def __init__(self, *, drops_stale: bool = False) -> None:
        super().__init__()
        self._drops_stale = drops_stale
        self.begun: list[Request] = []
        self.aside: list[Request] = []

    def begin(self, requests: list[Request], step: int) -> list[Request]:
        """Take note of requests whose last chunk is in `step`.

        Returns
        -------
        list of Request
            Those that are in the next step, too.
        """
        due, all_go_on = self.due, True
        for request in requests:
            num_tokens = request.num_tokens
            request.joined_step = step
            if num_tokens == request.num_prompt_tokens:
                self.begun.append(request)
            oracle, most = request.oracle_num_tokens, request.max_num_tokens
            if num_tokens + 1 < most:
                last_step = step + (oracle if oracle < most else most - 1) - num_tokens
            else:
                last_step = step + 1
                request.base_tokens = num_tokens - step
                all_go_on = False
            request.due_step = last_step
            if last_step in due:
                due[last_step].append(request)
            else:
                due[last_step] = [request]
                heappush(self.steps, last_step)
        if all_go_on:
            return requests
        return [each for each in requests if each.num_tokens + 1 < each.max_num_tokens]

    def forget_preempted(self, preemptions: Iterable[Preemption], step: int) -> None:
        """Set the decodes aside that the batch of `step` preempted."""
        requests = [preemption.request for preemption in preemptions]
        requests = [request for request in requests if request.due_step >= 0]
        for request in requests:  # the token in flight is a run of its own
            if request.joined_step < step - 1:
                request.streaks.append((request.joined_step, step - 2))
                request.joined_step = step - 1
            if self._drops_stale:
                self.leave(request)
        if not self._drops_stale:
            self.set_aside(requests)

    def set_aside(self, requests: Iterable[Request]) -> None:
        """Forget decodes that get a token of the step before, and none now."""
        for request in requests:
            self.leave(request)
            self.aside.append(request)

    def note_first_tokens(self, end_s: float) -> None:
        """Note when the first tokens in flight have arrived; it empties `begun`."""
        begun, self.begun = self.begun, []
        for request in begun:
            if request.due_step >= 0:
                request.note_first_token(end_s)

    def arrive(self, step: int, end_s: float) -> list[Request]:
        """Give tokens of the step before `step` to those of `aside`; it empties that.

        Parameters
        ----------
        step
            The latest that was formed.
        end_s
            When that output is there, in seconds.

        Returns
        -------
        list of Request
            Those of `aside`; some may have ended.
        """
        set_aside, self.aside = self.aside, []
        for request in set_aside:
            request.num_tokens += 1
            if request.num_output_tokens == 1:
                request.note_first_token(end_s)
            request.streaks.append((request.joined_step, step - 1))
            if request.num_tokens >= last_num_tokens(request):
                finish(request, end_s)
        return set_aside

    def pop_known(self, end_s: float, finished: list[Request]) -> list[Request]:
        """Let decodes end, or get no further token; the first of `steps` must be now.

        Those that had their last token are added to `finished`.

        Returns
        -------
        list of Request
            Those of which it is in flight, as their length says.
        """
        step = heappop(self.steps)
        limited: list[Request] = []
        for request in self.due.pop(step):
            num_tokens, oracle = request.base_tokens + step, request.oracle_num_tokens
            if num_tokens < request.max_num_tokens:
                if num_tokens < oracle:
                    self.join(request, step + 1)
                    limited.append(request)
                    continue
                request.num_computed_tokens = num_tokens  # one of them in vain
            request.num_tokens = num_tokens
            request.due_step = -1
            request.streaks.append((request.joined_step, step - 1))
            request.finish_s = end_s
            request.status = _STOPPED if num_tokens >= oracle else _LENGTH_CAPPED
            finished.append(request)
        return limited
