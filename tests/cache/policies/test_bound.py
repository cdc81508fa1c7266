"""No policy finds more than the clairvoyant one; that one finds Belady's bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.tokens import SegmentTokens
from cache.v1.policies import CACHE_POLICIES, CachePolicy, Clairvoyant
from tests.cache.policies.serial import SerialCache, loops, with_scans, zipf
from tests.oracles.v1_manager import KVCacheManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock

OTHERS = sorted(set(CACHE_POLICIES) - {"clairvoyant"})


def make(kind: str, num_blocks: int) -> CachePolicy:
    cls = CACHE_POLICIES[kind]
    takes_size = kind in ("s3_fifo", "arc", "tiny_lfu")
    return cls(num_blocks) if takes_size else cls()  # type: ignore[call-arg]


class Known:
    """The future of a reference string: request i reads its i-th content."""

    def __init__(self, reads: Sequence[Sequence[int]]) -> None:
        self.reads = reads
        self.by_content: dict[int, list[int]] = {}
        for number, contents in enumerate(reads):
            for content in contents:
                self.by_content.setdefault(content, []).append(number)

    def readers(self, content: int) -> Sequence[int]:
        return self.by_content.get(content, ())

    def contents(self, request_id: int) -> Sequence[int]:
        return self.reads[request_id]


def num_hits(policy: CachePolicy, num_blocks: int, contents: list[int]) -> int:
    cache = SerialCache(policy, num_blocks)
    found = 0
    for number, content in enumerate(contents):
        policy.begins(number)
        found += cache.access(content)
        policy.check()
    return found


def min_hits(num_blocks: int, contents: list[int]) -> int:
    """Belady's MIN with bypass, by its definition: slow and plain."""
    kept: set[int] = set()
    found = 0
    for now, content in enumerate(contents):
        found += content in kept
        kept.add(content)
        if len(kept) > num_blocks:
            rest = contents[now + 1 :]
            kept.remove(
                max(
                    kept,
                    key=lambda c: (
                        rest.index(c) if c in rest else len(rest),
                        c,
                    ),
                )
            )
    return found


@given(
    contents=st.lists(st.integers(1, 12), min_size=1, max_size=60),
    num_blocks=st.integers(2, 8),
)
def test_no_policy_beats_the_clairvoyant_one(
    contents: list[int], num_blocks: int
) -> None:
    future = Known([[content] for content in contents])
    best = num_hits(Clairvoyant(future), num_blocks, contents)
    # A block is held for its own access, so the newest always has one.
    assert min_hits(num_blocks - 1, contents) <= best <= min_hits(num_blocks, contents)
    for kind in OTHERS:
        assert num_hits(make(kind, num_blocks), num_blocks, contents) <= best, kind


@pytest.mark.parametrize(
    "num_blocks", [10, 60, pytest.param(200, marks=pytest.mark.slow)]
)
def test_no_policy_beats_it_on_longer_strings(num_blocks: int) -> None:
    for contents in (
        zipf(1, 1500, 300, 0.8),
        with_scans(2, 1500, 300, 0.8),
        loops(3, 1500, 300),
    ):
        future = Known([[content] for content in contents])
        best = num_hits(Clairvoyant(future), num_blocks, contents)
        for kind in OTHERS:
            found = num_hits(make(kind, num_blocks), num_blocks, contents)
            assert found <= best, kind


@dataclass
class Served:
    """A request as the manager needs it."""

    request_id: int
    num_tokens: int
    tokens: SegmentTokens
    num_computed_tokens: int = 0
    block_table: list[KVCacheBlock] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_quiet_tokens: int = 0

    @property
    def parent_id(self) -> int:
        return self.request_id


Prompt = tuple[tuple[int, int], ...]


def served(number: int, prompt: Prompt) -> Served:
    num_tokens = sum(length for _, length in prompt)
    return Served(number, num_tokens, SegmentTokens(prompt, 10_000 + number))


def prefix_hits(policy: CachePolicy, num_blocks: int, prompts: list[Prompt]) -> int:
    """Serve prompts one after the other in a pool of `num_blocks` usable blocks."""
    manager = KVCacheManager(
        num_blocks + 1, 1, enable_caching=True, unhashed_first=True, policy=policy
    )
    found = 0
    for number, prompt in enumerate(prompts):
        request = served(number, prompt)
        hits = manager.get_computed_blocks(request)
        found += len(hits)
        assert manager.allocate_slots(request, request.num_tokens - len(hits), hits)
        request.num_computed_tokens = request.num_tokens
        manager.check([request])
        manager.free(request)
        manager.check([])
    return found


prompt = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4
)
prompts = st.lists(prompt.map(tuple), min_size=1, max_size=25)


@given(prompts=prompts, num_blocks=st.integers(12, 30))
def test_no_policy_finds_more_of_prefixes(
    prompts: list[Prompt], num_blocks: int
) -> None:
    requests = [served(number, prompt) for number, prompt in enumerate(prompts)]
    reads = []
    for request in requests:
        contents: list[int] = []
        request.tokens.extend_block_hashes(contents, request.num_tokens - 1, 1)
        reads.append(contents)
    best = prefix_hits(Clairvoyant(Known(reads)), num_blocks, prompts)
    bound = belady_prefix_hits(prompts, num_blocks)
    assert best <= bound
    for kind in OTHERS:
        assert prefix_hits(make(kind, num_blocks), num_blocks, prompts) <= bound, kind


def belady_prefix_hits(prompts: list[Prompt], num_blocks: int) -> int:
    from workloads.analysis.belady import belady_hits, next_reads  # noqa: PLC0415
    from workloads.analysis.paths import block_paths  # noqa: PLC0415
    from workloads.spec import RequestSpec  # noqa: PLC0415

    specs = [
        RequestSpec(number, float(number), prompt, 1, 10_000 + number)
        for number, prompt in enumerate(prompts)
    ]
    return belady_hits(next_reads(block_paths(specs, 1)), num_blocks)
