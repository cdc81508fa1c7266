"""The free-block queue: order, O(1) removal, and its own proof."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.block import KVCacheBlock
from cache.errors import CacheError, InvariantError, NoFreeBlocksError
from cache.v1.free_queue import FreeKVCacheBlockQueue


def make(num_blocks: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    blocks = [KVCacheBlock(i) for i in range(num_blocks)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_takes_from_the_front_and_appends_at_the_back() -> None:
    _, queue = make(4)
    first = queue.popleft()
    queue.append_n(queue.popleft_n(2))
    queue.append(first)
    assert ids(queue) == [3, 1, 2, 0]


def test_puts_blocks_before_everything_in_their_order() -> None:
    _, queue = make(4)
    queue.prepend_n(queue.popleft_n(3)[::-1])
    assert ids(queue) == [2, 1, 0, 3]
    queue.prepend_n([])
    queue.prepend_n(queue.popleft_n(4))
    assert ids(queue) == [2, 1, 0, 3]
    queue.check()


def test_removes_from_the_middle() -> None:
    blocks, queue = make(4)
    queue.remove(blocks[2])
    assert ids(queue) == [0, 1, 3]
    assert len(queue) == 3


def test_refuses_to_remove_what_is_not_there() -> None:
    blocks, queue = make(3)
    queue.remove(blocks[1])
    with pytest.raises(CacheError, match="block 1 is not in the free queue"):
        queue.remove(blocks[1])
    assert ids(queue) == [0, 2]


def test_refuses_to_take_more_than_there_are() -> None:
    _, queue = make(2)
    with pytest.raises(NoFreeBlocksError, match="cannot take 3 blocks: 2 are free"):
        queue.popleft_n(3)
    assert ids(queue) == [0, 1]
    queue.popleft_n(2)
    with pytest.raises(NoFreeBlocksError):
        queue.popleft()


def test_check_finds_a_wrong_count() -> None:
    _, queue = make(2)
    queue.num_free_blocks = 3
    with pytest.raises(InvariantError, match="2 blocks linked, 3 counted"):
        queue.check()


def test_check_finds_a_one_sided_link() -> None:
    blocks, queue = make(3)
    blocks[1].prev_free_block = blocks[2]
    with pytest.raises(InvariantError, match="does not link back"):
        queue.check()


class QueueMachine(RuleBasedStateMachine):
    """The queue against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.queue = make(12)
        self.model = list(range(12))
        self.outside: list[int] = []

    @rule(n=st.integers(0, 5))
    def pop(self, n: int) -> None:
        if n > len(self.model):
            with pytest.raises(NoFreeBlocksError):
                self.queue.popleft_n(n)
            return
        taken = [block.block_id for block in self.queue.popleft_n(n)]
        assert taken == self.model[:n]
        self.model = self.model[n:]
        self.outside += taken

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.model))
        self.queue.remove(self.blocks[block_id])
        self.model.remove(block_id)
        self.outside.append(block_id)

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = data.draw(st.permutations(self.outside))
        chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
        self.queue.append_n([self.blocks[i] for i in chosen])
        self.model += chosen
        self.outside = [i for i in self.outside if i not in chosen]

    @invariant()
    def equals_the_model(self) -> None:
        self.queue.check()
        assert ids(self.queue) == self.model


TestQueue = QueueMachine.TestCase
