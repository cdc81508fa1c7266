"""The host's tier with others behind it: every chunk goes to all, and comes back."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from cache.errors import TierError, require
from cache.tiers.device import TierJob
from cache.tiers.lookups import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.cpu import CPUTier
    from cache.tiers.extents import Hold
    from cache.tiers.places import Keys
    from cache.tiers.secondary import SecondaryTier

MAX_RETRY_S = 60.0
"""Seconds for which a request may be told to ask for a chunk again."""


class InFlight(NamedTuple):
    """A job between the host and a tier behind it.

    Attributes
    ----------
    tier
        Its name.
    job
        What is copied.
    held
        Chunks of the host that are read, or written, until it has ended; also those of
        a lot that the tier had already.
    access
        Of the request that asked for it.
    """

    tier: str
    job: TierJob
    held: Sequence[Hold]
    access: RequestAccess


class TierHierarchy:
    """Tiers behind the host's, which is the way to all of them.

    ::

        GPU <--> host --complete_store--> every tier behind it
                  ^                          |
                  +------- promotion --------+   asked for by a look-up that misses

    A look-up asks the host first, then the tiers in their order. A chunk that one of
    them has takes a place in the host at once, and is read there from the end of the
    call on; the request asks again. Where the host has no place to give, it counts as
    missing; so does one that the request has brought before, and that had to go again
    before it was loaded. What is stored in the host is written to all tiers, and stays
    in the host until that has ended.

    Parameters
    ----------
    host
        The tier that the GPU copies to and from.
    tiers
        Those behind it by name, in the order in which they are asked. Several
        hierarchies may share one.

    Attributes
    ----------
    now_s
        Until when it was followed, in seconds.
    on_end
        Told of each job that has ended.
    num_promoted_chunks
        Chunks that were brought into the host so far, by tier.
    num_lost_chunks
        Look-ups so far of chunks that a request had brought and that had to go again.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/tiering/manager.py``
    (`TieringOffloadingManager`). There a request brings what it has lost again, without
    an end where the host has less room than its prompt.
    """

    def __init__(self, host: CPUTier, tiers: Mapping[str, SecondaryTier]) -> None:
        self.host = host
        self.tiers = tiers
        self._clients = {name: tier.join() for name, tier in tiers.items()}
        self._has_left = False
        self.now_s = 0.0
        self.on_end: Callable[[InFlight], None] | None = None
        self.num_promoted_chunks: Counter[str] = Counter()
        self.num_lost_chunks = 0
        self._in_flight: list[InFlight] = []
        # Keys and chunks of what a call brings to the host.
        self._promoting: dict[tuple[str, RequestAccess], dict[int, Hold]] = {}
        self._sources: dict[RequestAccess, dict[int, str]] = {}
        self._unanswered = ""  # the tier that said RETRY last, in this call
        # Since when a request has been told RETRY of a chunk and nothing else.
        self._unanswered_s: dict[RequestAccess, dict[int, float]] = {}

    @property
    def has_pending_work(self) -> bool:
        """Whether something is on its way, or a look-up has not been answered."""
        return bool(self._in_flight) or any(t.has_news for t in self.tiers.values())

    @property
    def num_promoting_chunks(self) -> int:
        """Places of the host that are written from tiers behind it."""
        waiting = sum(map(len, self._promoting.values()))
        return waiting + sum(
            len(each.job.keys) for each in self._in_flight if each.job.is_load
        )

    def cascading_chunks(self) -> set[int]:
        """Return the places of the host that are read to be written behind it."""
        moved = (each.held for each in self._in_flight if not each.job.is_load)
        holds = [hold for held in moved for hold in held]
        return {place for hold in holds for place in hold.chunk_ids.tolist()}

    # -- time -----------------------------------------------------------------

    def follow(self, now_s: float) -> bool:
        """Note jobs that have ended by now, in seconds; say whether any was a load."""
        self.now_s = now_s
        for tier in self.tiers.values():
            tier.follow(now_s)
        ended = [each for each in self._in_flight if each.job.has_ended]
        if not ended:
            return False
        self._in_flight = [each for each in self._in_flight if not each.job.has_ended]
        for each in ended:
            self._let_go(each)
            if self.on_end is not None:
                self.on_end(each)
        return any(each.job.is_load for each in ended)

    def next_news_s(self, wait_s: float) -> float:
        """Return when a request that was to ask again may be told more.

        Parameters
        ----------
        wait_s
            Seconds to the next call, if it comes at once.
        """
        if any(tier.has_news for tier in self.tiers.values()):
            return self.now_s + wait_s
        return min(
            (
                self.tiers[each.tier].device.next_change_s()
                for each in self._in_flight
                if each.job.is_load
            ),
            default=inf,
        )

    # -- loading --------------------------------------------------------------

    def longest_prefix(
        self, keys: Keys, access: RequestAccess, first: int = 0, stop: int | None = None
    ) -> tuple[int, bool]:
        """Look leading chunks up, and bring into the host what is behind it.

        Parameters
        ----------
        keys, access, first, stop
            See `CPUTier.prepare_load`.

        Returns
        -------
        (int, bool)
            How many are somewhere, or may be; and whether all these are in the host.
        """
        stop = keys.stop if stop is None else stop
        at, is_ready, numbers = first, True, keys.numbers(first, stop)
        while at < stop:
            num_there, are_ready = self.host.longest_prefix(keys, at, stop)
            is_ready &= are_ready
            at += num_there
            if at == stop:
                break
            found = self._look_behind(numbers[at - first], keys, access, at)
            if found is LookupResult.MISS:
                break
            is_ready = False
            at += 1
        return at - first, is_ready

    def _look_behind(
        self, key: int, keys: Keys, access: RequestAccess, position: int
    ) -> LookupResult:
        asks_again = False
        for name, tier in self.tiers.items():
            found = tier.lookup(key, access, self.now_s)
            if found is LookupResult.RETRY:
                asks_again, self._unanswered = True, name
                continue
            if found is LookupResult.HIT:
                self._unanswered_s.get(access, {}).pop(key, None)
                return self._promote(name, key, keys, access, position)
            if found is not LookupResult.MISS:
                raise TierError(
                    f"{type(tier).__name__}: lookup must return HIT, MISS or RETRY of "
                    f"LookupResult, got {found!r}"
                )
        if asks_again:
            self._wait(key, access)
            return LookupResult.RETRY
        self._unanswered_s.get(access, {}).pop(key, None)
        return LookupResult.MISS

    def _wait(self, key: int, access: RequestAccess) -> None:
        """Hold a tier to an answer in the end, however many requests give up asking."""
        asked_s = self._unanswered_s.setdefault(access, {})
        if self.now_s - asked_s.setdefault(key, self.now_s) > MAX_RETRY_S:
            raise TierError(
                f"{type(self.tiers[self._unanswered]).__name__}: lookup has said RETRY "
                f"of a chunk and nothing else for {MAX_RETRY_S:g} s; it must say HIT "
                f"or MISS in the end"
            )

    def _promote(
        self, name: str, key: int, keys: Keys, access: RequestAccess, position: int
    ) -> LookupResult:
        brought = self._sources.setdefault(access, {})
        if key in brought:
            self.num_lost_chunks += 1
            return LookupResult.MISS
        prepared = self.host.prepare_store(keys, access, position, position + 1)
        if prepared is None:
            return LookupResult.MISS
        if prepared.spans:
            self.tiers[name].prepare_load(key, self.now_s)
            self._promoting.setdefault((name, access), {})[key] = prepared.hold
            brought[key] = name
        return LookupResult.HIT_PENDING

    def loaded(self, keys: Sequence[int], access: RequestAccess) -> Counter[str]:
        """Note the chunks that a request loads; count those it had brought, by tier."""
        brought = self._sources.pop(access, {})
        return Counter(brought[key] for key in keys if key in brought)

    def end_call(self) -> None:
        """End a call of the scheduler: what was asked for begins to be read."""
        for (name, access), holds in self._promoting.items():
            self.num_promoted_chunks[name] += len(holds)
            self._submit(name, [*holds], [*holds.values()], access, is_load=True)
        self._promoting = {}
        for tier in self.tiers.values():
            tier.end_call(self.now_s)
        asked, self._unanswered = self.tiers.get(self._unanswered), ""
        if asked is not None and not asked.has_news:
            raise TierError(
                f"{type(asked).__name__}: lookup said RETRY, and has_news is False: no "
                f"engine that rests would ask again; let it be True until all is known"
            )

    def _submit(
        self,
        name: str,
        keys: Sequence[int],
        held: Sequence[Hold],
        access: RequestAccess,
        *,
        is_load: bool,
    ) -> None:
        job = TierJob(keys, is_load=is_load, client=self._clients[name])
        self.tiers[name].device.submit(job, self.now_s)
        self._in_flight.append(InFlight(name, job, held, access))

    # -- storing --------------------------------------------------------------

    def stored(self, hold: Hold, access: RequestAccess) -> None:
        """Write chunks that a job has stored in the host to the tiers behind it."""
        if self._has_left:
            return
        keys = hold.numbers()
        for name, tier in self.tiers.items():
            taken = tier.prepare_store(keys, self.now_s)
            if taken:
                if not set(keys).issuperset(taken):
                    raise TierError(
                        f"{type(tier).__name__}: prepare_store must return some of the "
                        f"chunks that it is given, and no others"
                    )
                held = [self.host.hold(hold)]
                self._submit(name, taken, held, access, is_load=False)

    def finish(self, access: RequestAccess) -> None:
        """Note a request that has ended, and whose stores have reached the host."""
        self._sources.pop(access, None)
        self._unanswered_s.pop(access, None)
        for tier in self.tiers.values():
            tier.finish(access)

    def leave(self, now_s: float) -> None:
        """Let go of all tiers: the engine is gone, and with it what was on its way."""
        for name, tier in self.tiers.items():
            tier.leave(self._clients[name], now_s)
        for each in self._in_flight:  # the host's own books, gone with it
            self._let_go(each)
        self._in_flight = []
        self._has_left = True

    def _let_go(self, moved: InFlight) -> None:
        host = self.host
        let_go = host.complete_store if moved.job.is_load else host.complete_load
        for hold in moved.held:
            let_go(hold)

    # -- proof ----------------------------------------------------------------

    def check(self) -> None:
        """Prove the tiers, and that what is copied is held in the host. O(n).

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        for tier in self.tiers.values():
            tier.check()
        for each in self._in_flight:
            is_written = each.job.is_load
            require(
                all(self.host.holds(h, is_written=is_written) for h in each.held),
                f"tiers: a chunk on its way between the host and {each.tier} is not "
                f"held in the host",
            )
