"""A disk or a server that reads and writes chunks: its queue, and its clock."""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from typing import TYPE_CHECKING, Final

from cache.errors import CacheConfigError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONGEST_LATENCY_S: Final = 1e6


class TierJob:
    """Chunks on their way between the host and a device.

    Attributes
    ----------
    is_load
        Whether they are read from the device.
    keys
        Of the chunks.
    client
        Of the device.
    begin_s, end_s
        When it began and ended; NaN before.
    """

    __slots__ = (
        "begin_s",
        "by_reader",
        "client",
        "end_s",
        "is_load",
        "keys",
        "rest_bytes",
        "rest_s",
    )

    def __init__(self, keys: Sequence[int], *, is_load: bool, client: int = 0) -> None:
        self.is_load = is_load
        self.keys = keys
        self.client = client
        self.begin_s = self.end_s = float("nan")
        self.rest_s = 0.0  # of latencies
        self.rest_bytes = 0.0
        self.by_reader = False

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.end_s == self.end_s


class _Threads:
    """Those of a client, and the jobs that wait for one."""

    def __init__(self, num_readers: int, num_writers: int) -> None:
        self.num_idle = {True: num_readers, False: num_writers}
        self.queues: dict[bool, deque[TierJob]] = {True: deque(), False: deque()}


class TierDevice:
    """Jobs that threads work off, side by side, on a device of so much bandwidth.

    Each client has threads and a link of its own. A thread copies the chunks of its job
    one after the other: each takes the latency and then its bytes, at an equal share of
    the bandwidth of its direction; what a job cannot use, as its client's link is
    narrower, goes to the others. Readers take loads first, writers stores, and either
    takes the other's where it has none.

    Parameters
    ----------
    chunk_bytes
        Of a chunk.
    read_bytes_per_s, write_bytes_per_s
        Of the device, all threads together.
    latency_s
        Of a chunk, before its first byte.
    num_readers, num_writers
        Threads: jobs at once.
    client_bytes_per_s
        Of the link of each client, each way; None for no narrower one.

    Attributes
    ----------
    now_s
        Until when it was followed, in seconds.
    num_bytes
        Read and written so far, by `TierJob.is_load`.
    busy_s
        Seconds in which at least one job was under way.
    ended
        Jobs that have ended, in order; for its owner to take.

    Raises
    ------
    CacheConfigError
        If a number is impossible.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/tiering/fs/thread_pool.py``: queues and
    threads. How threads share a device is ours.
    """

    def __init__(
        self,
        chunk_bytes: int,
        *,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        latency_s: float = 0.0,
        num_readers: int = 16,
        num_writers: int = 16,
        client_bytes_per_s: float | None = None,
    ) -> None:
        rates = {
            "read_bytes_per_s": read_bytes_per_s,
            "write_bytes_per_s": write_bytes_per_s,
        }
        if client_bytes_per_s is not None:
            rates["client_bytes_per_s"] = client_bytes_per_s
        for name, rate in rates.items():
            if not 1 <= rate < inf:
                raise CacheConfigError(
                    f"{name} of a tier must be 1 or more, and finite, got {rate}; "
                    f"leave the tier out if nothing goes through it"
                )
        if not 0 <= latency_s <= _LONGEST_LATENCY_S:
            raise CacheConfigError(
                f"latency_s of a tier must be from 0 to {_LONGEST_LATENCY_S:g}, got "
                f"{latency_s}"
            )
        for name, number in (("reader", num_readers), ("writer", num_writers)):
            if number < 1:
                raise CacheConfigError(
                    f"a tier needs one {name} at least, got {number}; raise its queue"
                )
        self._chunk_bytes = chunk_bytes
        self._rates = {True: read_bytes_per_s, False: write_bytes_per_s}
        self._latency_s = latency_s
        self._client_bytes_per_s = (
            inf if client_bytes_per_s is None else client_bytes_per_s
        )
        self._num_threads = num_readers, num_writers
        self._clients: dict[int, _Threads] = {}
        self._active: list[TierJob] = []
        self.now_s = 0.0
        self.num_bytes = {True: 0, False: 0}
        self.busy_s = 0.0
        self.ended: list[TierJob] = []

    def submit(self, job: TierJob, now_s: float) -> None:
        """Let a job begin now, or when a thread is idle."""
        self.follow(now_s)
        job.rest_s = self._latency_s * len(job.keys)
        num_bytes = self._chunk_bytes * len(job.keys)
        job.rest_bytes = float(num_bytes)
        self.num_bytes[job.is_load] += num_bytes
        if job.client not in self._clients:
            self._clients[job.client] = _Threads(*self._num_threads)
        own = self._clients[job.client]
        own.queues[job.is_load].append(job)
        self._begin(own)

    def cut(self, client: int, now_s: float) -> list[TierJob]:
        """End the jobs of a client that has gone, done or not; return them."""
        self.follow(now_s)
        own = self._clients.pop(client, None)
        if own is None:
            return []
        cut = [job for job in self._active if job.client == client]
        self._active = [job for job in self._active if job.client != client]
        return [*cut, *own.queues[True], *own.queues[False]]

    def _begin(self, own: _Threads) -> None:
        """Give idle threads their jobs."""
        idle = own.num_idle
        for is_load, queue in own.queues.items():
            for by_reader in (is_load, not is_load):
                while queue and idle[by_reader]:
                    job = queue.popleft()
                    idle[by_reader] -= 1
                    job.by_reader, job.begin_s = by_reader, self.now_s
                    self._active.append(job)

    def _bytes_per_s(self) -> dict[tuple[bool, int], float]:
        """Return the bytes/s of each job that moves bytes, by direction and client."""
        moving = Counter(
            (job.is_load, job.client) for job in self._active if job.rest_s <= 0
        )
        found: dict[tuple[bool, int], float] = {}
        for is_load, rate in self._rates.items():
            left = rate
            own = [(n, key) for key, n in moving.items() if key[0] is is_load]
            num_left = sum(n for n, _ in own)
            # Clients whose links are shared by most jobs are the narrowest.
            for number, key in sorted(own, reverse=True):
                share = min(left / num_left, self._client_bytes_per_s / number)
                found[key] = share
                left -= share * number
                num_left -= number
        return found

    def _next_s(self) -> float:
        """Return how long it goes on as it does."""
        if not self._active:
            return inf
        rates = self._bytes_per_s()
        return min(
            job.rest_s
            if job.rest_s > 0
            else job.rest_bytes / rates[job.is_load, job.client]
            for job in self._active
        )

    def next_change_s(self) -> float:
        """Return a time before which no job ends; infinity without jobs."""
        return self.now_s + self._next_s()

    def follow(self, until_s: float) -> None:
        """Let the jobs run until a time, in seconds."""
        while self.now_s + (span_s := self._next_s()) <= until_s < inf:
            self._run(span_s)
        if until_s > self.now_s:
            if self._active:
                self._run(until_s - self.now_s)
            self.now_s = until_s

    def _run(self, span_s: float) -> None:
        """Let the active jobs run, none of them beyond its next change."""
        rates = self._bytes_per_s()
        self.now_s += span_s
        self.busy_s += span_s
        ended: dict[int, None] = {}  # clients
        for job in self._active:
            if job.rest_s > 0:
                # What ends now has no rest, whatever rounding says.
                job.rest_s = 0.0 if job.rest_s <= span_s else job.rest_s - span_s
                continue
            rate = rates[job.is_load, job.client]
            if job.rest_bytes / rate <= span_s:
                job.end_s = self.now_s
                self._clients[job.client].num_idle[job.by_reader] += 1
                self.ended.append(job)
                ended[job.client] = None
            else:
                job.rest_bytes -= span_s * rate
        if ended:
            self._active = [job for job in self._active if not job.has_ended]
            for client in ended:
                self._begin(self._clients[client])

    def check(self) -> None:
        """Prove that each thread has a job or is idle, and that none idles in vain.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        num_threads = sum(self._num_threads)
        for client, own in self._clients.items():
            num_active = sum(job.client == client for job in self._active)
            num_idle = sum(own.num_idle.values())
            require(
                num_active + num_idle == num_threads
                and min(own.num_idle.values()) >= 0,
                f"tier: {num_active} jobs and {num_idle} idle threads are not "
                f"{num_threads} threads",
            )
            require(
                not (num_idle and any(own.queues.values())),
                "tier: a job waits although a thread is idle",
            )
