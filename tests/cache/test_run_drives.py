"""`RunTables` against `KVCacheManager` over long seeded histories, and over a trace."""

from __future__ import annotations

from collections import deque
from itertools import islice
from random import Random

import pytest

from cache.prompt_tree import PromptTree
from cache.tokens import ListTokens, RunTokens, SegmentTokens, TokenIds, TokenRuns
from tests.cache.run_twins import Twin, Twins
from tests.shared import shared
from workloads.traces.mooncake import MooncakeTraceReader


class Drive:
    """A random history of a few requests over few segments."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.twins = Twins(
            random.randint(2, 41),
            random.randint(1, 8),
            unhashed_first=random.random() < 0.5,
            observed=random.random() < 0.3,
        )
        self.tree = PromptTree() if random.random() < 0.5 else None
        self.num_requests = 0
        self.prompts: list[list[tuple[int, int]]] = []
        self.most_copies = 0

    def run(self, num_operations: int) -> None:
        operations = (self.come, self.come_back, self.go_on, self.decode, self.leave)
        for _ in range(num_operations):
            self.random.choices(operations, (6, 3, 2, 7, 3))[0]()
            if self.random.random() < 0.1:
                self.twins.watch(self.random.choice([None, *self.twins.waiting]))
            self.twins.compare()
            self.twins.check()
            self.most_copies = max(self.most_copies, self.twins.num_copies)

    def tokens(self, prompt: list[tuple[int, int]]) -> TokenIds:
        kind = self.random.random()
        if kind < 0.1 and self.tree is None:
            return RunTokens(TokenRuns.from_segments([*prompt, (103, 10_000)]))
        if kind < 0.2:
            return ListTokens([k for k, length in prompt for _ in range(length)] * 99)
        return SegmentTokens(prompt, 100 + self.random.randint(0, 3), self.tree)

    def prompt(self) -> list[tuple[int, int]]:
        """Segments of which many are cut short, or a prompt that came before."""
        random, size = self.random, self.twins.block_size
        if self.prompts and random.random() < 0.25:
            return random.choice(self.prompts)
        if self.twins.live and random.random() < 0.2:
            quoted = random.choice(self.twins.live).quoted(random.randint(0, 5 * size))
            if quoted is not None:
                return quoted
        most = random.choice([3 * size, 12 * size])
        prompt = [
            (random.choice([0, 1, 2, 100, 101, 102]), random.randint(0, most))
            for _ in range(random.randint(1, 3))
        ]
        if random.random() < 0.4:  # full hits: the last block is computed again
            prompt = [(key, -(-length // size) * size) for key, length in prompt]
        self.prompts = [prompt, *self.prompts[:4]]
        return prompt

    def come(self) -> None:
        prompt = self.prompt()
        num_tokens = sum(length for _, length in prompt)
        if not num_tokens:
            return
        request = Twin(self.num_requests, num_tokens, self.tokens(prompt))
        self.num_requests += 1
        if not self.twins.admit(request, self.random.choice([5, 1000])):
            self.twins.waiting.append(request)
            if len(self.twins.waiting) > 5:
                self.forget(self.twins.waiting[0])

    def forget(self, request: Twin) -> None:
        if request is self.twins.watched:
            self.twins.watch(None)
        self.twins.waiting.remove(request)

    def come_back(self) -> None:
        if self.twins.waiting:
            request = self.random.choice(self.twins.waiting)
            if self.twins.admit(request, self.random.choice([5, 1000])):
                self.forget(request)

    def go_on(self) -> None:
        unfinished = self.twins.partly_computed()
        if unfinished:
            self.twins.extend(self.random.choice(unfinished), self.random.randint(1, 9))

    def decode(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            starved = self.twins.decode(self.twins.decoding())
            if starved:
                self.twins.preempt(starved[-1])
            self.twins.compare()

    def leave(self) -> None:
        if self.twins.live:
            request = self.random.choice(self.twins.live)
            if self.random.random() < 0.5:
                self.twins.preempt(request)
            else:
                self.twins.free(request)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_history_is_the_same(seed: int) -> None:
    drive = Drive(seed)
    drive.run(400)
    assert drive.num_requests > 70
    if drive.twins.fast.num_usable_blocks > 8:
        assert drive.twins.fast.num_evictions > 100
        assert drive.most_copies > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1025))
def test_longer_histories_are_the_same(seed: int) -> None:
    Drive(seed).run(2000)


def conversations(num_requests: int) -> list[Twin]:
    reader = MooncakeTraceReader(shared("traces/mooncake_fast25_conversation.jsonl"))
    tree = PromptTree()
    return [
        Twin(
            spec.request_id,
            spec.num_prompt_tokens,
            SegmentTokens(spec.prompt, spec.output_segment, tree),
        )
        for spec in islice(reader.read(), num_requests)
    ]


@pytest.mark.parametrize(
    ("block_size", "unhashed_first"),
    [
        (16, True),
        (48, False),  # cuts the trace's ids of 512
        pytest.param(16, False, marks=pytest.mark.slow),
        pytest.param(48, True, marks=pytest.mark.slow),
    ],
)
def test_a_trace_of_conversations_is_the_same(
    block_size: int, unhashed_first: bool
) -> None:
    twins = Twins(9000 // (block_size // 16), block_size, unhashed_first=unhashed_first)
    held: deque[Twin] = deque()
    for request in conversations(200):
        while not twins.admit(request, request.num_tokens):
            twins.free(held.popleft())
        held.append(request)
        for _ in range(2 * block_size):
            if twins.decode(twins.decoding()[-4:]):
                twins.free(held.popleft())
        if request.request_id % 10 == 0:
            twins.compare()
            twins.check()
    twins.compare()
    assert twins.fast.num_evictions > 1000
    assert twins.num_hit_blocks > 1000
