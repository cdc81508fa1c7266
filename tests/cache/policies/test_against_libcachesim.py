"""Our policies against libCacheSim's, an independent implementation, access by access.

Objects of one unit, one access at a time, so that nothing is ever in use when something
is evicted. Deterministic algorithms agree on every single access:

- LRU, FIFO, LFU, ARC; S3-FIFO with its defaults, which are ours (where its small queue
  holds one object only, libCacheSim admits nothing: such sizes are left out).
- W-TinyLFU as far as its structure goes: window, test, segmented main cache. Its counts
  are another matter. libCacheSim counts an object when it is inserted, found in the
  main cache, or tested, but not when it is found in the window, and ages after 32 x the
  main cache's size of hits; its filter lets all counters of an object grow, so counts
  are far too high once thousands of objects have passed. With its rules in place of
  ours, and few enough objects for its filter to be exact, every access agrees. With our
  own counts (those of the paper) hits agree to about a percent of the accesses.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cache.v1.policies import ARC, FIFO, LFU, LRU, S3FIFO, TinyLFU
from tests.cache.policies.serial import hits, loops, with_scans, zipf

libcachesim = pytest.importorskip(
    "libcachesim", reason="libcachesim is not installed (dependency group reference)"
)

STRINGS = {
    "zipf": zipf(1, 12_000, 1000, 0.9),
    "flat": zipf(2, 12_000, 300, 0.4),
    "scans": with_scans(3, 12_000, 800, 0.8),
    "loops": loops(4, 12_000, 600),
}


def their_hits(cache: Any, contents: list[int]) -> list[bool]:
    found = []
    for content in contents:
        request = libcachesim.Request()
        request.obj_id = content
        request.obj_size = 1
        found.append(bool(cache.get(request)))
    return found


@pytest.mark.parametrize("name", STRINGS)
@pytest.mark.parametrize("size", [20, 50, 230])
@pytest.mark.parametrize(
    ("kind", "theirs"),
    [(LRU, "LRU"), (FIFO, "FIFO"), (LFU, "LFU"), (S3FIFO, "S3FIFO"), (ARC, "ARC")],
)
def test_every_access_agrees(kind: Any, theirs: str, size: int, name: str) -> None:
    policy = kind(size) if kind in (S3FIFO, ARC) else kind()
    ours = hits(policy, size, STRINGS[name])
    assert ours == their_hits(getattr(libcachesim, theirs)(size), STRINGS[name])
    assert 0 < sum(ours) < len(ours)


@pytest.mark.parametrize("small", [0.05, 0.25])
@pytest.mark.parametrize("move_to_main", [1, 2, 3])
def test_the_keys_of_s3_fifo_agree(small: float, move_to_main: int) -> None:
    theirs = libcachesim.S3FIFO(
        120,
        small_size_ratio=small,
        ghost_size_ratio=0.5,
        move_to_main_threshold=move_to_main,
    )
    policy = S3FIFO(120, small=small, ghosts=0.5, move_to_main=move_to_main)
    assert hits(policy, 120, STRINGS["scans"]) == their_hits(theirs, STRINGS["scans"])


class TheirCounts:
    """Exact counts, halved from outside."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def age(self) -> None:
        for content in self.counts:
            self.counts[content] //= 2

    def add(self, content: int) -> None:
        self.counts[content] += 1

    def count(self, content: int) -> int:
        return self.counts[content]


class TheirTinyLFU(TinyLFU):
    """Ours with libCacheSim's counting, and parts of the whole size."""

    def __init__(self, num_blocks: int, window: float) -> None:
        super().__init__(num_blocks, window)
        self._sketch = TheirCounts()
        self.num_window = int(num_blocks * window)
        self.num_main = num_blocks - self.num_window
        self.num_main_hits = 0

    def hit(self, block_id: int) -> None:
        if block_id in self._window:
            self._window.pin(block_id)
            return
        super().hit(block_id)
        self.num_main_hits += 1
        if self.num_main_hits % (32 * self.num_main) == 0:
            self._sketch.age()

    def evict(self, incoming: int | None) -> int:
        if self._num_vacant is None:  # their main cache fills both its segments
            for _ in range(self.num_main):
                block_id = self._window.popleft()
                self._sketch.add(self._content[block_id])
                is_full = len(self._probation) >= int(0.2 * self.num_main)
                has_room = len(self._protected) < int(0.8 * self.num_main)
                part = self._protected if is_full and has_room else self._probation
                part.append(block_id)
            self._num_vacant = 0
        return super().evict(incoming)

    def _rarer(self) -> int:
        candidate = self._content[self._window.first]
        loser = super()._rarer()
        self._sketch.add(candidate)
        return loser

    def _unprotect(self) -> None:
        while len(self._protected) > int(0.8 * self.num_main):
            self._probation.append(self._protected.popleft())


@pytest.mark.parametrize(
    ("size", "window", "contents"),
    [
        (1000, 0.01, zipf(1, 30_000, 1100, 0.9)),
        (1000, 0.1, zipf(1, 30_000, 1100, 0.9)),
        (1000, 0.01, zipf(4, 30_000, 1100, 0.6)),
        (300, 0.1, zipf(1, 30_000, 330, 0.9)),
        (300, 0.1, loops(3, 30_000, 270)),
    ],
)
def test_tiny_lfu_agrees_where_their_counts_are_exact(
    size: int, window: float, contents: list[int]
) -> None:
    ours = hits(TheirTinyLFU(size, window), size, contents)
    theirs = libcachesim.WTinyLFU(size, window_size=window)
    assert ours == their_hits(theirs, contents)


@pytest.mark.parametrize("size", [100, 300, 1000])
@pytest.mark.parametrize("alpha", [0.6, 0.9, 1.1])
def test_tiny_lfu_finds_about_as_much(size: int, alpha: float) -> None:
    contents = zipf(7, 20_000, 2 * size, alpha)
    ours = sum(hits(TinyLFU(size), size, contents))
    theirs = sum(their_hits(libcachesim.WTinyLFU(size), contents))
    assert abs(ours - theirs) < 0.015 * len(contents)
    assert ours > sum(hits(LRU(), size, contents))
