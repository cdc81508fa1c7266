"""The slots of each request, shared or freed when it stops or ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from cache.errors import require
from cache.sglang.allocator import NO_SLOTS
from cache.sglang.insertions import FreeingInsertion, WindowInsertion
from cache.sglang.windows import WindowedSlots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.sglang.allocator import SlotAllocator, Slots
    from cache.sglang.nodes import TreeNode
    from cache.sglang.radix_cache import Insertion, RadixCache
    from cache.sglang.slot_table import SlotTable


_MOST: Final = (1 << 63) - 1  # a priority


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

    @property
    def num_evictable_window_tokens(self) -> int:
        """Tokens of layers with a window that an eviction may free."""
        ...

    def make_room(self, num_tokens: int) -> bool:
        """Evict if fewer are available; return whether so many are then."""
        ...

    def slide(self, table: SlotTable, num_tokens: int, least: int = 1) -> None:
        """Free slots of layers with a window that a request has left behind.

        By `num_tokens` that it has stored; if they are `least` or more. Does nothing
        where there are no such layers.
        """
        ...

    def lock(self, table: SlotTable) -> None:
        """Hold the node that a request was found at."""
        ...

    def unlock(self, table: SlotTable) -> None:
        """Let go of it."""
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


class _Tables:
    """Requests' slots in one or two pools."""

    def __init__(self, allocator: SlotAllocator, window_tokens: int) -> None:
        self.allocator = allocator
        self._window_tokens = window_tokens

    def _slide(
        self, table: SlotTable, num_tokens: int, num_kept: int, least: int
    ) -> None:
        """Free the peers of a request's own slots but for so many of the last tokens.

        Source: SGLang 0.5.23, ``mem_cache/common.py`` (`free_swa_out_of_window_slots`).
        """
        slots, size = self.allocator, self.allocator.page_size
        if num_tokens - self._window_tokens < table.num_slid_tokens + least:
            return
        assert isinstance(slots, WindowedSlots)
        first = max(table.num_slid_tokens, table.num_protected_tokens)
        end = max(first, num_tokens - num_kept) // size * size
        slots.free_peers(table.slots[first:end])
        table.num_slid_tokens = max(first, end)

    def _free(self, table: SlotTable) -> None:
        """Free a request's own slots, with those peers that are left."""
        slots, first = self.allocator, table.num_protected_tokens
        if isinstance(slots, WindowedSlots):
            middle = max(table.num_slid_tokens, first)
            slots.free_full(table.slots[first:middle])
            first = middle
        slots.free(table.slots[first:])


class ChunkCache(_Tables):
    """Slots without a tree: nothing is shared.

    Parameters
    ----------
    allocator
        Hands them out.
    window_tokens
        Of layers with a window; 0 without such.

    Source: SGLang 0.5.9, ``mem_cache/chunk_cache.py``.
    """

    num_evictable_tokens = num_protected_tokens = num_evictable_window_tokens = 0

    def __init__(self, allocator: SlotAllocator, window_tokens: int = 0) -> None:
        super().__init__(allocator, window_tokens)

    def match(self, table: SlotTable, tokens: Slots) -> Slots:
        del table, tokens
        return NO_SLOTS

    def make_room(self, num_tokens: int) -> bool:
        return self.allocator.num_allocatable_tokens >= num_tokens

    def slide(self, table: SlotTable, num_tokens: int, least: int = 1) -> None:
        if self._window_tokens:
            self._slide(table, num_tokens, self._window_tokens, least)

    def lock(self, table: SlotTable) -> None:
        pass

    def unlock(self, table: SlotTable) -> None:
        pass

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
        self._free(table)
        table.clear()

    def check(self, tables: Iterable[SlotTable]) -> None:
        """Prove that each slot is free or held once."""
        self.allocator.check([table.slots for table in tables])


class TreeCache(_Tables):
    """Slots of requests beside the tree's; `RadixCache` has the prefixes.

    ::

        table   | the tree's, locked           | its own                     |
                0 ............. num_protected_tokens ......... num_stored_tokens

    A prefix that was prefilled goes into the tree. Where another request had stored the
    same meanwhile, its slots are freed, and the table takes the tree's. With a window
    it goes in only up to what was found and could not be reused, if there was some: the
    next request like it can reuse that.

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
        window = tree.window
        super().__init__(allocator, 0 if window is None else window.num_tokens)
        self.tree = tree
        self._checks_in = checks_in
        self._marks_prompts = marks_prompts

    @property
    def num_evictable_tokens(self) -> int:
        return self.tree.num_evictable_tokens

    @property
    def num_protected_tokens(self) -> int:
        return self.tree.num_protected_tokens

    @property
    def num_evictable_window_tokens(self) -> int:
        window = self.tree.window
        return 0 if window is None else window.num_evictable_tokens

    def match(self, table: SlotTable, tokens: Slots) -> Slots:
        tree = self.tree
        slots, table.node = tree.match(tokens)
        is_all = tree.num_found_tokens == len(slots)
        table.num_branch_tokens = 0 if is_all else tree.num_found_tokens
        return slots

    def make_room(self, num_tokens: int) -> bool:
        slots = self.allocator
        num_missing = num_tokens - slots.num_available_tokens
        num_peers = num_tokens - slots.num_available_peers
        if num_missing > 0 or num_peers > 0:
            # before the unified tree the whole of it, not what is missing
            self.tree.evict(
                max(num_missing, 0) if self.tree.unified else num_tokens,
                max(num_peers, 0),
            )
        return slots.num_allocatable_tokens >= num_tokens

    def slide(self, table: SlotTable, num_tokens: int, least: int = 1) -> None:
        if self._window_tokens:
            # the tree's last node shall hold a whole window, in whole pages
            size = self.allocator.page_size
            num_kept = -(-max(self._window_tokens, size) // size) * size
            self._slide(table, num_tokens, num_kept, least)

    def lock(self, table: SlotTable) -> None:
        if table.node is not None:
            table.boundary = self.tree.lock(table.node)

    def unlock(self, table: SlotTable) -> None:
        if table.node is not None:
            self.tree.unlock(table.node, table.boundary)

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
        if self.tree.unified:
            self._free(table)
        else:
            slots, protected = table.slots, table.num_protected_tokens
            whole = self._whole_pages(table.num_stored_tokens)
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
        tree, until = self.tree, len(tokens)
        branch, protected = table.num_branch_tokens, table.num_protected_tokens
        ends_at_branch = protected < branch <= until
        if ends_at_branch:
            until = branch
        if not is_end:
            self.slide(table, until - 1)
        if not until:
            return
        whole, slots = self._whole_pages(until), table.slots
        tree.insert(
            tokens[:whole],
            slots[:whole],
            priority,
            counts=self._checks_in or not is_chunk,
            num_counted=table.num_inserted_tokens if self._checks_in else 0,
            insertion=self._insertion(table, slots[:whole]),
        )
        table.num_inserted_tokens = max(table.num_inserted_tokens, whole)
        node = tree.latest
        prompt = self._whole_pages(num_prompt_tokens)
        if (
            0 < prompt < whole
            and self._marks_prompts
            and (self._checks_in or is_end)
            and tree.window is None
        ):
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
        if ends_at_branch:
            table.num_branch_tokens = 0
            if not is_end:
                self.slide(table, len(tokens) - 1)

    def _insertion(self, table: SlotTable, slots: Slots) -> Insertion:
        protected = table.num_protected_tokens
        if self.tree.window is None:
            return FreeingInsertion(self.allocator, slots, protected)
        return WindowInsertion(self.tree, slots, protected, table.num_slid_tokens)

    def _hold(
        self, table: SlotTable, protected: int, found: Slots, node: TreeNode
    ) -> None:
        """Lock a node in place of the one that was, and take the slots above it."""
        table.replace(protected, found[protected:])
        assert table.node is not None
        self.unlock(table)
        table.node, table.num_protected_tokens = node, len(found)
        self.lock(table)

    def _let_go(self, table: SlotTable) -> None:
        assert table.node is not None
        self.unlock(table)
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
