"""Copies between a pool and the tier behind it: queues on a link that they share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from cache.errors import require
from sim.scheduler.v1.connectors.base import JobKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from sim.scheduler.v1.connectors.base import TransferJob

KINDS = (JobKind.STORE, JobKind.LOAD, JobKind.SYNC_LOAD)
"""Queues, in the order in which their ends are reported."""


@dataclass(frozen=True, slots=True)
class LinkRules:
    """How copies share a link, and what they share with the step.

    Parameters
    ----------
    both_ways_share
        What is left to each direction, of what it reaches alone, while both are busy.
    step_factor, transfer_factor
        How much longer a step takes while something is copied, and the reverse, >= 1.
    kernel_both_ways_share, kernel_step_factor
        The same where a kernel copies instead of the copy engines.
    """

    both_ways_share: float = 1.0
    step_factor: float = 1.0
    transfer_factor: float = 1.0
    kernel_both_ways_share: float = 1.0
    kernel_step_factor: float = 1.0


class Copy:
    """A job on the link.

    Attributes
    ----------
    job
        What is copied.
    rest_s
        Seconds that it takes yet, alone on an idle GPU.
    by_kernel
        Whether a kernel copies it.
    begin_s, end_s
        When it began and ended; NaN before.
    """

    __slots__ = ("begin_s", "by_kernel", "end_s", "job", "rest_s")

    def __init__(self, job: TransferJob, rest_s: float, *, by_kernel: bool) -> None:
        self.job = job
        self.rest_s = rest_s
        self.by_kernel = by_kernel
        self.begin_s = self.end_s = float("nan")


class Link:
    """Three queues of copies, each first in, first out, that share a link.

    ::

        stores          --> GPU to host  --+
        loads           --> host to GPU  --+-- both directions at once: each slower
        in-step loads   --> host to GPU  --+

    The first copies of all queues run side by side. Two in one direction get half of
    it each.

    Parameters
    ----------
    rules
        How they share it.

    Attributes
    ----------
    now_s
        Until when the copies were followed, in seconds.
    latest_ends_s
        When the latest copy of each kind ended, in seconds; -inf before.
    has_ended
        Whether copies have ended that were not asked for yet.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/gpu_worker.py``: a stream a job, and in
    each direction a job waits for the end of the one before.
    """

    def __init__(self, rules: LinkRules) -> None:
        self._rules = rules
        self._queues: dict[JobKind, deque[Copy]] = {kind: deque() for kind in KINDS}
        self._stores, self._loads, self._step_loads = self._queues.values()
        self._ended: dict[JobKind, list[Copy]] = {kind: [] for kind in KINDS}
        self._beside_speed = 1 / rules.transfer_factor
        self._num_copies = 0
        self.has_ended = False
        self.now_s = 0.0
        self.latest_ends_s = dict.fromkeys(KINDS, -inf)

    @property
    def is_busy(self) -> bool:
        """Whether something is copied."""
        return self._num_copies > 0

    def is_copying(self, kind: JobKind) -> bool:
        """Whether something of a kind is copied."""
        return bool(self._queues[kind])

    def drained(self) -> Link:
        """Return this link when all its copies have run beside no step."""
        ahead = Link(self._rules)
        ahead.now_s, ahead.latest_ends_s = self.now_s, dict(self.latest_ends_s)
        for queue in self._queues.values():
            for copy in queue:
                ahead.submit(Copy(copy.job, copy.rest_s, by_kernel=copy.by_kernel))
        ahead.follow(inf)
        return ahead

    def submit(self, copy: Copy) -> None:
        """Let a copy begin now, behind those of its queue."""
        queue = self._queues[copy.job.kind]
        queue.append(copy)
        self._num_copies += 1
        self._begin(queue)

    def _begin(self, queue: deque[Copy]) -> None:
        """Begin the first copy of a queue; one that takes no time ends at once."""
        while queue and queue[0].rest_s <= 0:
            copy = queue.popleft()
            self._num_copies -= 1
            copy.end_s = self.latest_ends_s[copy.job.kind] = self.now_s
            if copy.begin_s != copy.begin_s:
                copy.begin_s = self.now_s
            self._ended[copy.job.kind].append(copy)
            self.has_ended = True
        if queue and queue[0].begin_s != queue[0].begin_s:
            queue[0].begin_s = self.now_s

    def _speeds(self, *, beside_step: bool) -> list[tuple[deque[Copy], float]]:
        """Return the busy queues, and the share of its speed alone that each has."""
        rules, stores = self._rules, self._stores
        speed = self._beside_speed if beside_step else 1.0
        if not (self._loads or self._step_loads):
            return [(stores, speed)] if stores else []
        loads = [q for q in (self._loads, self._step_loads) if q]
        if stores:
            by_kernel = any(queue[0].by_kernel for queue in (stores, *loads))
            speed *= (
                rules.kernel_both_ways_share if by_kernel else rules.both_ways_share
            )
        busy = [(queue, speed / len(loads)) for queue in loads]
        return [(stores, speed), *busy] if stores else busy

    def next_end_s(self, *, beside_step: bool = False) -> float:
        """Return when the next copy ends, if none is submitted until then."""
        if not self._num_copies:
            return inf
        rests_s = [q[0].rest_s / v for q, v in self._speeds(beside_step=beside_step)]
        return self.now_s + min(rests_s)

    def follow(self, until_s: float, *, beside_step: bool = False) -> None:
        """Let the copies run until a time, in seconds."""
        while self._num_copies and self.next_end_s(beside_step=beside_step) <= until_s:
            self._end_next(beside_step=beside_step)
        if until_s > self.now_s:
            span_s = until_s - self.now_s
            self.now_s = until_s
            if not self._num_copies:
                return
            for queue, speed in self._speeds(beside_step=beside_step):
                queue[0].rest_s = max(queue[0].rest_s - span_s * speed, 1e-15)

    def _end_next(self, *, beside_step: bool) -> None:
        """Let the copies run until the next one ends, and others that end with it."""
        speeds = self._speeds(beside_step=beside_step)
        span_s = min(queue[0].rest_s / speed for queue, speed in speeds)
        self.now_s += span_s
        for queue, speed in speeds:
            # The one that ends has no rest, whatever rounding says.
            is_last = queue[0].rest_s / speed <= span_s
            queue[0].rest_s = 0.0 if is_last else queue[0].rest_s - span_s * speed
            self._begin(queue)

    def wait_for(self, job_ids: Collection[int]) -> None:
        """Let the copies run, beside no step, until these jobs have ended."""
        while any(c.job.job_id in job_ids for q in self._queues.values() for c in q):
            self._end_next(beside_step=False)

    def step(self, length_s: float) -> float:
        """Let the copies run beside a step that begins now; return when it ends.

        Parameters
        ----------
        length_s
            What it takes alone.
        """
        rules, rest_s = self._rules, length_s
        while self._num_copies:
            loads = self._loads, self._step_loads
            by_kernel = any(queue and queue[0].by_kernel for queue in loads)
            factor = rules.kernel_step_factor if by_kernel else rules.step_factor
            needed_s, next_s = rest_s * factor, self.next_end_s(beside_step=True)
            if self.now_s + needed_s <= next_s:
                self.follow(self.now_s + needed_s, beside_step=True)
                return self.now_s
            rest_s -= (next_s - self.now_s) / factor
            self._end_next(beside_step=True)
        self.now_s += max(rest_s, 0.0)
        return self.now_s

    def poll(self) -> list[Copy]:
        """Return the copies that have ended since the latest call, queue by queue."""
        if not self.has_ended:
            return []
        ended = [copy for kind in KINDS for copy in self._ended[kind]]
        self._ended = {kind: [] for kind in KINDS}
        self.has_ended = False
        return ended

    def check(self) -> None:
        """Prove that copies are counted, and that each waits in its queue. O(n).

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        queued = [c for queue in self._queues.values() for c in queue]
        require(
            len(queued) == self._num_copies,
            f"link: {len(queued)} copies are queued, {self._num_copies} counted",
        )
        for kind, queue in self._queues.items():
            require(
                all(copy.job.kind is kind and copy.rest_s > 0 for copy in queue),
                f"link: a copy in the queue of {kind.value}s does not belong there",
            )
