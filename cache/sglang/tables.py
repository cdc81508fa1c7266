"""The slots of each request, shared or freed when it stops or ends."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from cache.errors import require
from cache.sglang.allocator import NO_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.sglang.allocator import SlotAllocator, Slots
    from cache.sglang.radix_cache import RadixCache, TreeNode


_MOST: Final = (1 << 63) - 1  # a priority


class SlotTable:
    """The slots of a request in the order of its tokens: a row of ``req_to_token``.

    Attributes
    ----------
    num_stored_tokens
        Slots that it holds.
    num_protected_tokens
        Of these, the first ones that belong to the tree.
    num_inserted_tokens
        Of these, those that the request has put there itself, or found there then.
    node
        The node that it locks; None while it locks none.
    """

    __slots__ = (
        "_slots",
        "node",
        "num_inserted_tokens",
        "num_protected_tokens",
        "num_stored_tokens",
    )

    def __init__(self) -> None:
        self._slots: Slots = NO_SLOTS
        self.num_stored_tokens = 0
        self.num_protected_tokens = 0
        self.num_inserted_tokens = 0
        self.node: TreeNode | None = None

    @property
    def slots(self) -> Slots:
        """All that it holds; a view."""
        return self._slots[: self.num_stored_tokens]

    @property
    def last(self) -> int:
        """Its last slot, or -1."""
        return int(self._slots[self.num_stored_tokens - 1]) if len(self) else -1

    def __len__(self) -> int:
        return self.num_stored_tokens

    def begin(self, slots: Slots) -> None:
        """Take the slots of a cached prefix, in place of what it had."""
        self._slots = slots.copy()
        self.num_stored_tokens = len(slots)

    def append(self, slots: Slots) -> None:
        """Add slots behind the others."""
        until = self.num_stored_tokens + len(slots)
        self._make_room(until)
        self._slots[self.num_stored_tokens : until] = slots
        self.num_stored_tokens = until

    def append_one(self, slot: int) -> None:
        """Add a slot behind the others."""
        at = self.num_stored_tokens
        if at == len(self._slots):
            self._make_room(at + 1)
        self._slots[at] = slot
        self.num_stored_tokens = at + 1

    def replace(self, first: int, slots: Slots) -> None:
        """Put the tree's slots in place of its own, from a token on."""
        self._slots[first : first + len(slots)] = slots

    def clear(self) -> None:
        """Forget all slots."""
        self._slots = NO_SLOTS
        self.num_stored_tokens = self.num_protected_tokens = 0
        self.num_inserted_tokens = 0
        self.node = None

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > len(self._slots):
            room = np.empty(max(num_tokens + 64, num_tokens * 5 // 4), np.int64)
            room[: self.num_stored_tokens] = self.slots
            self._slots = room


class KVCache(Protocol):
    """Slots of requests, as a scheduler asks for them."""

    allocator: SlotAllocator

    @property
    def num_evictable_tokens(self) -> int:
        """Tokens that an eviction may free."""
        ...

    @property
    def num_protected_tokens(self) -> int:
        """Tokens of the tree that requests hold."""
        ...

    def match(self, table: SlotTable, tokens: Slots) -> Slots:
        """Find a cached prefix; note its node, unlocked, and return its slots."""
        ...

    def make_room(self, num_tokens: int) -> bool:
        """Evict if fewer are available; return whether so many are then."""
        ...

    def unfinished(
        self,
        table: SlotTable,
        tokens: Slots,
        priority: int,
        *,
        num_prompt_tokens: int = 0,
        is_chunk: bool,
    ) -> None:
        """Share the slots that a request has prefilled, and go on with it.

        With `num_prompt_tokens` a unified tree has a node that ends with the prompt.
        """
        ...

    def finished(
        self,
        table: SlotTable,
        tokens: Slots,
        priority: int,
        *,
        num_prompt_tokens: int = 0,
    ) -> None:
        """Share the slots that an ended request has stored, and free the rest."""
        ...

    def release(self, table: SlotTable) -> None:
        """Free the slots of a request that will be computed again."""
        ...


class ChunkCache:
    """Slots without a tree: nothing is shared.

    Source: SGLang 0.5.9, ``mem_cache/chunk_cache.py``.
    """

    num_evictable_tokens = num_protected_tokens = 0

    def __init__(self, allocator: SlotAllocator) -> None:
        self.allocator = allocator

    def match(self, table: SlotTable, tokens: Slots) -> Slots:
        del table, tokens
        return NO_SLOTS

    def make_room(self, num_tokens: int) -> bool:
        return self.allocator.num_available_tokens >= num_tokens

    def unfinished(
        self,
        table: SlotTable,
        tokens: Slots,
        priority: int,
        *,
        num_prompt_tokens: int = 0,
        is_chunk: bool,
    ) -> None:
        pass

    def finished(
        self,
        table: SlotTable,
        tokens: Slots,
        priority: int,
        *,
        num_prompt_tokens: int = 0,
    ) -> None:
        del tokens, priority, num_prompt_tokens
        self.release(table)

    def release(self, table: SlotTable) -> None:
        self.allocator.free(table.slots)
        table.clear()

    def check(self, tables: Iterable[SlotTable]) -> None:
        """Prove that each slot is free or held once."""
        self.allocator.check([table.slots for table in tables])


class TreeCache:
    """Slots of requests beside the tree's; `RadixCache` has the prefixes.

    ::

        table   | the tree's, locked           | its own                     |
                0 ............. num_protected_tokens ......... num_stored_tokens

    A prefix that was prefilled goes into the tree. Where another request had stored the
    same meanwhile, its slots are freed, and the table takes the tree's.

    Parameters
    ----------
    allocator, tree
        What both hand out.
    checks_in
        Whether what is stored of a request goes into the unified tree alike before and
        at its end, and counts as a hit once, as from 0.5.22 on.
    marks_prompts
        Whether the unified tree gets a node that ends as a prompt does, as from 0.5.20
        on.

    Source: SGLang 0.5.9, ``mem_cache/radix_cache.py`` (`cache_unfinished_req`,
    `cache_finished_req`), ``mem_cache/common.py``.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        tree: RadixCache,
        *,
        checks_in: bool = False,
        marks_prompts: bool = True,
    ) -> None:
        self.allocator = allocator
        self.tree = tree
        self._checks_in = checks_in
        self._marks_prompts = marks_prompts

    @property
    def num_evictable_tokens(self) -> int:
        return self.tree.num_evictable_tokens

    @property
    def num_protected_tokens(self) -> int:
        return self.tree.num_protected_tokens

    def match(self, table: SlotTable, tokens: Slots) -> Slots:
        slots, table.node = self.tree.match(tokens)
        return slots

    def make_room(self, num_tokens: int) -> bool:
        num_missing = num_tokens - self.allocator.num_available_tokens
        if num_missing > 0:
            # before the unified tree the whole of it, not what is missing
            self.tree.evict(num_missing if self.tree.unified else num_tokens)
        return self.allocator.num_available_tokens >= num_tokens

    def unfinished(
        self,
        table: SlotTable,
        tokens: Slots,
        priority: int,
        *,
        num_prompt_tokens: int = 0,
        is_chunk: bool,
    ) -> None:
        if self.tree.unified:
            self._check_in(
                table, tokens, priority, num_prompt_tokens, is_chunk=is_chunk
            )
            return
        whole = self._whole_pages(len(tokens))
        slots, protected = table.slots, table.num_protected_tokens
        num_found = self.tree.insert(
            tokens[:whole], slots[:whole], priority, counts=not is_chunk
        )
        self.allocator.free(slots[protected:num_found])
        self._hold(table, protected, *self.tree.match(tokens[:whole]))

    def finished(
        self,
        table: SlotTable,
        tokens: Slots,
        priority: int,
        *,
        num_prompt_tokens: int = 0,
    ) -> None:
        if self.tree.unified:
            self._check_in(table, tokens, priority, num_prompt_tokens, is_end=True)
            self.release(table)
            return
        whole = self._whole_pages(table.num_stored_tokens)
        slots, protected = table.slots, table.num_protected_tokens
        num_found = self.tree.insert(tokens[:whole], slots[:whole], priority)
        self.allocator.free(slots[protected:num_found])
        self.allocator.free(slots[whole:])
        self._let_go(table)

    def release(self, table: SlotTable) -> None:
        slots, protected = table.slots, table.num_protected_tokens
        whole = self._whole_pages(table.num_stored_tokens)
        if self.tree.unified:
            whole = protected
        self.allocator.free(slots[protected:whole])
        self.allocator.free(slots[whole:])
        self._let_go(table)

    def _check_in(
        self,
        table: SlotTable,
        tokens: Slots,
        priority: int,
        num_prompt_tokens: int,
        *,
        is_chunk: bool = False,
        is_end: bool = False,
    ) -> None:
        """Put a prefix into the unified tree, with a node that ends as the prompt does.

        Source: SGLang 0.5.22, ``mem_cache/unified_radix_cache.py``
        (`checkpoint_into_tree`); 0.5.20 (`insert_req`, `cache_unfinished_req`), which
        looks an unfinished prefix up again, and does not count chunks as hits.
        """
        if not len(tokens):
            return
        tree, whole = self.tree, self._whole_pages(len(tokens))
        slots, protected = table.slots, table.num_protected_tokens
        tree.insert(
            tokens[:whole],
            slots[:whole],
            priority,
            counts=self._checks_in or not is_chunk,
            num_counted=table.num_inserted_tokens if self._checks_in else 0,
        )
        for first, end in pairwise((0, *tree.passed)):
            self.allocator.free(slots[max(first, protected) : end])
        table.num_inserted_tokens = max(table.num_inserted_tokens, whole)
        node = tree.latest
        prompt = self._whole_pages(num_prompt_tokens)
        if 0 < prompt < whole and self._marks_prompts and (self._checks_in or is_end):
            tree.insert(
                tokens[:prompt],
                slots[:prompt],
                min(priority + 1, _MOST),
                num_counted=prompt,
            )
        if self._checks_in or is_end:
            self._hold(table, protected, tree.slots_above(node), node)
        else:
            self._hold(table, protected, *tree.match(tokens[:whole]))

    def _hold(
        self, table: SlotTable, protected: int, found: Slots, node: TreeNode
    ) -> None:
        """Lock a node in place of the one that was, and take the slots above it."""
        table.replace(protected, found[protected:])
        assert table.node is not None
        self.tree.unlock(table.node)
        self.tree.lock(node)
        table.node, table.num_protected_tokens = node, len(found)

    def _let_go(self, table: SlotTable) -> None:
        assert table.node is not None
        self.tree.unlock(table.node)
        table.clear()

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.tree.page_size * self.tree.page_size

    def check(self, tables: Iterable[SlotTable]) -> None:
        """Prove tree, slots and locks of tables that hold slots, in O(n)."""
        self.tree.check()
        held: list[Slots] = [node.slots for node in self.tree.nodes()]
        locks: dict[int, int] = {}
        for table in tables:
            held.append(table.slots[table.num_protected_tokens :])
            at = table.node
            while at is not None and at.parent is not None:
                locks[id(at)] = locks.get(id(at), 0) + 1
                at = at.parent
        self.allocator.check(held)
        for node in self.tree.nodes():
            require(
                node.lock_ref == locks.get(id(node), 0),
                f"a node is locked {node.lock_ref} times, by "
                f"{locks.get(id(node), 0)} requests",
            )
