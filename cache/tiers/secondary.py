"""Tiers behind the host: what they keep, and how long it takes to bring it back."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cache.errors import CacheConfigError, TierError, require
from cache.tiers.device import TierDevice, TierJob
from cache.tiers.lookups import LookupResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache.tiers.access import RequestAccess


class SecondaryTier:
    """Chunks by their key behind the host, the one used last going last.

    The role of a tier, and what most of them do. Chunks come from the host, and go
    there; time is told with each call.

    ::

        missing --prepare_store--> written --complete--> there --evicted--> missing
                                                           | ^
                                              prepare_load v | complete
                                                          read

    One of your own is a class with this as its base, which takes ``chunk_bytes`` and
    hands ``**more`` on; what it does otherwise are methods.

    Parameters
    ----------
    chunk_bytes
        Of a chunk.
    capacity_bytes
        Room.
    read_bytes_per_s, write_bytes_per_s, latency_s
        See `TierDevice`.
    num_readers, num_writers, client_bytes_per_s
        See `TierDevice`: the depth of its queue each way, and the link of each client.
    ttl_s
        Seconds for which a chunk is kept after its latest use; None for ever.

    Attributes
    ----------
    device
        What copies.
    num_chunks
        Room, in chunks.
    num_evictions, num_expired, num_refused
        Chunks that made room, whose time was over, and that found no room, so far.

    Raises
    ------
    CacheConfigError
        If a number is impossible.

    Notes
    -----
    No log of a release shows the decisions of a tier behind the host. How it is asked
    and told is that of vLLM 0.33, ``vllm/v1/kv_offload/tiering/base.py``
    (`SecondaryTierManager`).
    """

    is_shared = False
    """Whether all engines of a fleet have it together, or each has its own."""
    evicts = True
    """Whether chunks make room for others; if not, what finds no room is not stored."""

    def __init__(
        self,
        chunk_bytes: int,
        *,
        capacity_bytes: float,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        latency_s: float = 0.0,
        num_readers: int = 16,
        num_writers: int = 16,
        client_bytes_per_s: float | None = None,
        ttl_s: float | None = None,
    ) -> None:
        if not capacity_bytes >= chunk_bytes:
            raise CacheConfigError(
                f"capacity_bytes of a tier must hold a chunk, which takes "
                f"{chunk_bytes}, got {capacity_bytes}; raise it"
            )
        if ttl_s is not None and not ttl_s > 0:
            raise CacheConfigError(
                f"ttl_s of a tier must be above 0, got {ttl_s}; leave it out to keep "
                f"chunks for ever"
            )
        self.device = TierDevice(
            chunk_bytes,
            read_bytes_per_s=read_bytes_per_s,
            write_bytes_per_s=write_bytes_per_s,
            latency_s=latency_s,
            num_readers=num_readers,
            num_writers=num_writers,
            client_bytes_per_s=client_bytes_per_s,
        )
        self._num_clients = 0
        self.num_chunks = (
            int(capacity_bytes // chunk_bytes) if capacity_bytes < inf else 2**62
        )
        self._ttl_s = inf if ttl_s is None else ttl_s
        self._used_s: dict[int, float] = {}  # latest use, the oldest first
        self._writing: set[int] = set()
        self._readers: dict[int, int] = {}
        self.num_evictions = self.num_expired = self.num_refused = 0

    @property
    def num_used_chunks(self) -> int:
        """Places that hold a chunk, one that is being written included."""
        return len(self._used_s) + len(self._writing)

    # -- asked by the host ----------------------------------------------------

    def lookup(self, key: int, access: RequestAccess, now_s: float) -> LookupResult:
        """Say whether a chunk can be read, or `RETRY` to be asked again.

        A tier that says `RETRY` has news (`has_news`) when the call has ended.
        """
        self._expire(now_s)
        return LookupResult.HIT if key in self._used_s else LookupResult.MISS

    def prepare_store(self, keys: Sequence[int], now_s: float) -> list[int]:
        """Make room for chunks; return those that are to be written."""
        self._expire(now_s)
        new = [
            key for key in keys if key not in self._used_s and key not in self._writing
        ]
        taken: list[int] = []
        for key in new:
            if self.num_used_chunks >= self.num_chunks and not self._make_room():
                break
            self._writing.add(key)
            taken.append(key)
        self.num_refused += len(new) - len(taken)
        return taken

    def prepare_load(self, key: int, now_s: float) -> None:
        """Hold a chunk that is there for a job that is to read it.

        Raises
        ------
        TierError
            If it is not there.
        """
        if key not in self._used_s:
            raise TierError(
                f"{type(self).__name__}: lookup said HIT of a chunk that is not there"
            )
        self._readers[key] = self._readers.get(key, 0) + 1

    def join(self) -> int:
        """Return the number of a client that begins to use it."""
        self._num_clients += 1
        return self._num_clients - 1

    def leave(self, client: int, now_s: float) -> None:
        """Drop the chunks on their way to or from a client that has gone."""
        cut = self.device.cut(client, now_s)
        self.follow(now_s)
        for job in cut:
            if job.is_load:
                self._let_go(job)
            else:
                self._writing.difference_update(job.keys)

    def follow(self, now_s: float) -> None:
        """Let jobs go on until a time, and note those that have ended by then."""
        device = self.device
        device.follow(now_s)
        if device.ended:
            ended, device.ended = device.ended, []
            for job in ended:
                self.complete(job, job.end_s)

    def complete(self, job: TierJob, now_s: float) -> None:
        """Note a job that has ended; the last chunk of it counts as used first."""
        if job.is_load:
            self._let_go(job)
        for key in reversed(job.keys):
            if job.is_load:
                del self._used_s[key]  # to stand last
            else:
                self._writing.remove(key)
            self._used_s[key] = now_s

    def _let_go(self, job: TierJob) -> None:
        for key in job.keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def end_call(self, now_s: float) -> None:
        """Note that a call of the scheduler ends."""

    def finish(self, access: RequestAccess) -> None:
        """Note a request that has ended, and whose stores have reached the host."""

    @property
    def has_news(self) -> bool:
        """Whether a call may find what the latest one was not told (`RETRY`)."""
        return False

    # -- room -----------------------------------------------------------------

    def victim(self) -> int | None:
        """Return the chunk that is to make room, None if there is none."""
        held = self._readers
        return next((key for key in self._used_s if key not in held), None)

    def _make_room(self) -> bool:
        key = self.victim() if self.evicts else None
        if key is None:
            return False
        if key not in self._used_s or key in self._readers:
            raise TierError(
                f"{type(self).__name__}: victim must return a chunk that is there and "
                f"not being read, or None, got {key!r}"
            )
        del self._used_s[key]
        self.num_evictions += 1
        return True

    def _expire(self, now_s: float) -> None:
        """Forget chunks whose time is over; the oldest stand first."""
        oldest_s = now_s - self._ttl_s
        if oldest_s <= 0:
            return
        over = []
        for key, used_s in self._used_s.items():
            if used_s >= oldest_s:
                break
            if key not in self._readers:
                over.append(key)
        for key in over:
            del self._used_s[key]
        self.num_expired += len(over)

    # -- proof ----------------------------------------------------------------

    def check(self) -> None:
        """Prove that chunks fit, each in one state, and its device. O(n).

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        require(
            self.num_used_chunks <= self.num_chunks,
            f"tier: {self.num_used_chunks} places are used, there are "
            f"{self.num_chunks}",
        )
        require(
            self._writing.isdisjoint(self._used_s)
            and self._readers.keys() <= self._used_s.keys()
            and all(number > 0 for number in self._readers.values()),
            "tier: a chunk is read that is not there, or there and being written",
        )
        self.device.check()


class FileSystemTier(SecondaryTier):
    """Files on a local disk, one a chunk: vLLM's ``fs``.

    Whether a file is there is asked beside the step, and known in the next call; what a
    request was told stays so until it has ended. Files are never removed: one that
    finds no room is not written, as a write to a full disk fails.

    Parameters
    ----------
    chunk_bytes, capacity_bytes, read_bytes_per_s, write_bytes_per_s, latency_s, ttl_s
        See `SecondaryTier`; of the disk.
    n_read_threads, n_write_threads
        Files that are read and written at once; vLLM's keys.
    evicts
        Whether the file that was used last goes last, to make room for others: what a
        user's own cleaner does.
    root_dir
        vLLM's key, of no effect here.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/tiering/fs/manager.py`` and
    ``vllm/v1/kv_offload/tiering/async_lookup.py``.
    """

    def __init__(
        self,
        chunk_bytes: int,
        *,
        capacity_bytes: float,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        latency_s: float = 0.0001,
        ttl_s: float | None = None,
        n_read_threads: int = 16,
        n_write_threads: int = 16,
        evicts: bool = False,
        root_dir: str = "",
    ) -> None:
        super().__init__(
            chunk_bytes,
            capacity_bytes=capacity_bytes,
            read_bytes_per_s=read_bytes_per_s,
            write_bytes_per_s=write_bytes_per_s,
            latency_s=latency_s,
            num_readers=n_read_threads,
            num_writers=n_write_threads,
            ttl_s=ttl_s,
        )
        self.evicts = evicts
        self._is_there: dict[
            int, bool | None
        ] = {}  # None: to be known in the next call
        self._asking: dict[int, set[RequestAccess]] = {}
        self._asked: dict[RequestAccess, set[int]] = {}
        self._new: list[int] = []
        self._has_news = False

    def lookup(self, key: int, access: RequestAccess, now_s: float) -> LookupResult:
        self._has_news = False
        if key not in self._is_there:
            self._is_there[key] = None
            self._new.append(key)
        self._asking.setdefault(key, set()).add(access)
        self._asked.setdefault(access, set()).add(key)
        is_there = self._is_there[key]
        if is_there is None:
            return LookupResult.RETRY
        # What was there may have been removed since.
        return super().lookup(key, access, now_s) if is_there else LookupResult.MISS

    @property
    def has_news(self) -> bool:
        return self._has_news

    def end_call(self, now_s: float) -> None:
        self._has_news |= bool(self._new)
        self._expire(now_s)
        for key in self._new:
            if key in self._is_there:
                self._is_there[key] = key in self._used_s
        self._new = []

    def finish(self, access: RequestAccess) -> None:
        for key in self._asked.pop(access, ()):
            asking = self._asking[key]
            asking.remove(access)
            if not asking:
                del self._asking[key], self._is_there[key]

    def check(self) -> None:
        super().check()
        require(
            self._asking.keys() == self._is_there.keys(),
            "tier: answers are kept that belong to no request",
        )


class PoolTier(SecondaryTier):
    """A server's memory at the end of a network link, as LMCache and Mooncake have it.

    What is there is known at once, to all engines of a fleet. The chunk that was used
    last goes last.

    Parameters
    ----------
    chunk_bytes, capacity_bytes, read_bytes_per_s, write_bytes_per_s, latency_s, ttl_s
        See `SecondaryTier`; of the server's link, which all engines share.
    queue_depth
        Jobs of an engine at once, each way.
    client_bytes_per_s
        Of the link of each engine, each way; None for no narrower one.
    """

    is_shared = True

    def __init__(
        self,
        chunk_bytes: int,
        *,
        capacity_bytes: float,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        latency_s: float = 0.00002,
        ttl_s: float | None = None,
        queue_depth: int = 8,
        client_bytes_per_s: float | None = None,
    ) -> None:
        super().__init__(
            chunk_bytes,
            capacity_bytes=capacity_bytes,
            read_bytes_per_s=read_bytes_per_s,
            write_bytes_per_s=write_bytes_per_s,
            latency_s=latency_s,
            num_readers=queue_depth,
            num_writers=queue_depth,
            client_bytes_per_s=client_bytes_per_s,
            ttl_s=ttl_s,
        )


SECONDARY_TIERS: Mapping[str, type[SecondaryTier]] = {
    "fs": FileSystemTier,
    "pool": PoolTier,
}
"""Tiers behind the host by the name that ``type`` takes."""
