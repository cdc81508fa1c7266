"""The CPU tier against a model that sorts, in random order (invariants 2 and 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.tiers import CPUTier, LookupResult, RequestAccess
from cache.tiers.places import Keys

if TYPE_CHECKING:
    from cache.tiers.extents import Hold

NUM_CHUNKS = 6
PROMPTS = [[1, 2, 3, 4], [1, 2, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34, 35, 36, 37]]


class Client:
    """A request of the machine."""

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys
        self.access = RequestAccess()
        self.noted: dict[int, int] = {}
        self.number = 0
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()


class TierMachine(RuleBasedStateMachine):
    """Requests store, load and end; the model keeps states, places and an order."""

    policy = "lru"
    threshold = 0

    def __init__(self) -> None:
        super().__init__()
        self.tier = CPUTier(
            NUM_CHUNKS,
            eviction_policy=self.policy,
            store_threshold=self.threshold,
            max_tracker_size=4,
        )
        self.clients: list[Client] = []
        self.stores: list[tuple[list[int], Hold]] = []
        self.loads: list[tuple[list[int], Hold]] = []
        self.readers: dict[int, int] = {}  # -1: being written
        self.places: dict[int, int] = {}
        self.left: list[int] = []
        self.num_begun = 0
        self.offers: dict[int, int] = {}  # the oldest offer first

    # -- the model's policy: least recently used, by request -------------------

    def reset_order(self) -> None:
        self.ranks: dict[int, tuple[int, int]] = {}
        self.count = 0

    def missed(self, keys: list[int]) -> None:
        pass

    def showed(self, client: Client, keys: list[int]) -> None:
        if not client.number:
            self.count += 1
            client.number = self.count
        for key in keys:
            here = (client.number, -client.noted[key])
            if key in self.ranks:
                self.ranks[key] = max(self.ranks[key], here)

    def wrote(self, client: Client, key: int) -> None:
        self.ranks[key] = (client.number, -client.noted[key])

    def ended(self, client: Client) -> None:
        for key in sorted(client.noted, key=lambda key: -client.noted[key]):
            if key in self.ranks:
                self.count += 1
                self.ranks[key] = (self.count, 0)

    def choose(self, num_chunks: int, may_go: set[int]) -> list[int]:
        chosen = sorted(may_go, key=self.ranks.__getitem__)[:num_chunks]
        for key in chosen:
            del self.ranks[key]
        return chosen

    # -- the rules --------------------------------------------------------------

    @rule(prompt=st.sampled_from(PROMPTS))
    def arrive(self, prompt: list[int]) -> None:
        if not hasattr(self, "count"):
            self.reset_order()
        self.clients.append(Client(prompt))

    def note(self, client: Client, keys: list[int], reused: list[int]) -> None:
        new = [key for key in keys if key not in client.noted]
        for key in new:
            client.noted[key] = client.keys.index(key)
        if new:
            self.showed(client, new)
        client.reused |= set(reused) - client.inserted

    def wanted(self, lot: list[int]) -> list[int]:
        """Count the offers of a lot; return what of it is to be stored."""
        missing = [key for key in lot if key not in self.readers]
        if not self.threshold:
            return missing
        known = [key for key in lot if key in self.offers]
        for key in known:
            self.offers[key] = self.offers.pop(key) + 1
        others = [key for key in self.offers if key not in known]
        for key in lot:
            if key not in self.offers:
                if len(self.offers) >= 4:
                    if not others:
                        continue
                    del self.offers[others.pop(0)]
                self.offers[key] = 1
        return [key for key in missing if self.offers.get(key, 0) >= self.threshold]

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        first = data.draw(st.integers(0, len(client.keys) - 1))
        lot = client.keys[first : data.draw(st.integers(first + 1, len(client.keys)))]
        missing = self.wanted(lot)
        present = [key for key in lot if self.readers.get(key, -1) >= 0]
        self.missed([key for key in missing if key not in client.missed])
        client.missed |= set(missing)
        self.note(client, [k for k in lot if k in missing or k in present], present)
        prepared = self.tier.prepare_store(
            Keys.of(client.keys), client.access, first, first + len(lot)
        )
        num_needed = max(len(missing) - (NUM_CHUNKS - len(self.readers)), 0)
        may_go = {k for k, n in self.readers.items() if n == 0} - set(lot)
        if missing and num_needed > len(may_go):
            assert prepared is None
            return
        assert prepared is not None
        assert prepared.hold.numbers() == missing
        evicted = self.choose(num_needed, may_go) if missing else []
        assert prepared.evicted_ids.tolist() == [self.places[key] for key in evicted]
        for key in evicted:
            self.left.append(self.places.pop(key))
            del self.readers[key]
        for key in missing:
            if self.num_begun < NUM_CHUNKS:
                self.places[key] = self.num_begun
                self.num_begun += 1
            else:
                self.places[key] = self.left.pop()
            self.readers[key] = -1
            self.wrote(client, key)
        client.inserted |= set(missing)
        assert prepared.chunk_ids.tolist() == [self.places[key] for key in missing]
        self.stores.append((missing, prepared.hold))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        num_found, all_there = self.tier.longest_prefix(Keys.of(client.keys))
        states = [self.readers.get(key) for key in client.keys]
        assert num_found == next(
            (i for i, n in enumerate(states) if n is None), len(states)
        )
        assert all_there == (-1 not in states[:num_found])
        if not (num_found and all_there):
            return
        first = data.draw(st.integers(0, num_found - 1))
        keys = client.keys[first:num_found]
        hold = self.tier.prepare_load(
            Keys.of(client.keys), client.access, first, num_found
        )
        assert hold.chunk_ids.tolist() == [self.places[key] for key in keys]
        for key in keys:
            self.readers[key] += 1
        self.note(client, keys, keys)
        self.loads.append((keys, hold))

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.stores) - 1))
        keys, hold = self.stores.pop(number)
        self.tier.complete_store(hold)
        for key in keys:
            self.readers[key] = 0

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        keys, hold = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.tier.complete_load(hold)
        for key in keys:
            self.readers[key] -= 1

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        client = self.clients.pop(data.draw(st.integers(0, len(self.clients) - 1)))
        self.tier.finish(client.access)
        self.tier.finish(client.access)  # the second does nothing
        self.ended(client)

    @invariant()
    def it_proves_itself(self) -> None:
        self.tier.check()
        states = {-1: LookupResult.HIT_PENDING, None: LookupResult.MISS}
        for prompt in PROMPTS:
            for key in prompt:
                state = self.readers.get(key)
                assert self.tier.lookup(key) is states.get(state, LookupResult.HIT)


class ThresholdMachine(TierMachine):
    threshold = 2


class ARCMachine(TierMachine):
    """The same with the two lists of ARC, which are plain lists here."""

    policy = "arc"

    def reset_order(self) -> None:
        self.count = 0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.target: float = 0.0

    def missed(self, keys: list[int]) -> None:
        for key in reversed(keys):
            if key in self.b1:
                step = max(1, len(self.b2) / len(self.b1))
                self.target = min(self.target + step, NUM_CHUNKS)
                _to_end(self.b1, key)
            elif key in self.b2:
                step = max(1, len(self.b1) / len(self.b2))
                self.target = max(self.target - step, 0)
                _to_end(self.b2, key)

    def showed(self, client: Client, keys: list[int]) -> None:
        pass

    def wrote(self, client: Client, key: int) -> None:
        self.t1.append(key)
        self.b1 = [each for each in self.b1 if each != key]
        self.b2 = [each for each in self.b2 if each != key]

    def ended(self, client: Client) -> None:
        for key in sorted(client.noted, key=lambda key: -client.noted[key]):
            held = self.t1 if key in self.t1 else self.t2 if key in self.t2 else None
            if held is None:
                continue
            if key in client.reused:
                held.remove(key)
                self.t2.append(key)
            elif key in client.inserted:
                _to_end(held, key)

    def choose(self, num_chunks: int, may_go: set[int]) -> list[int]:
        chosen = []
        for _ in range(num_chunks):
            once = next((key for key in self.t1 if key in may_go), None)
            again = next((key for key in self.t2 if key in may_go), None)
            takes_once = once is not None and (
                len(self.t1) >= int(self.target) or again is None
            )
            key = once if takes_once else again
            assert key is not None
            held, ghosts = (self.t1, self.b1) if takes_once else (self.t2, self.b2)
            held.remove(key)
            ghosts.append(key)
            may_go.remove(key)
            chosen.append(key)
        self.b1, self.b2 = self.b1[-NUM_CHUNKS:], self.b2[-NUM_CHUNKS:]
        return chosen

    @invariant()
    def sizes_are_those_of_the_model(self) -> None:
        if hasattr(self, "count"):
            lists: list[Any] = [self.t1, self.t2, self.b1, self.b2]
            sizes = [len(each) for each in lists]
            assert list(self.tier.policy.sizes()) == [*sizes, self.target]


def _to_end(keys: list[int], key: int) -> None:
    keys.remove(key)
    keys.append(key)


TestLRU = TierMachine.TestCase
TestThreshold = ThresholdMachine.TestCase
TestARC = ARCMachine.TestCase
for each in (TestLRU, TestThreshold, TestARC):
    each.settings = settings(stateful_step_count=40)
