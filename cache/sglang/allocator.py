"""Token slots and pages: which are free, in the order in which they are handed out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cache.errors import CacheConfigError, NoFreeBlocksError, require

if TYPE_CHECKING:
    from collections.abc import Iterable

Slots = npt.NDArray[np.int64]
"""Token slots, or token ids, in the order of a request's tokens."""

NO_SLOTS: Slots = np.zeros(0, np.int64)


class SlotAllocator:
    """Slots of a pool; with pages, whole pages of consecutive slots.

    ::

        taken     from the front
        freed     slots: appended; pages: each call's, sorted, put in front
        need_sort freed ones wait on a list of their own, which is merged in and sorted
                  when an allocation needs more than the other list has
    in_order  pages are put in front in the order of a request's tokens, not sorted

    Slot 0 is never handed out, nor page 0.

    Parameters
    ----------
    num_tokens
        Size of the pool in tokens, a multiple of `page_size`.
    page_size
        Tokens of a page; 1 for single slots.
    need_sort
        See above; the release sets it where prefill and decode are apart.
    in_order
        See above; so do 0.5.19 to 0.5.23.

    Attributes
    ----------
    num_available_tokens
        Free slots.

    Notes
    -----
    Source: SGLang 0.5.9, ``mem_cache/allocator.py`` (`TokenToKVPoolAllocator`,
    `PagedTokenToKVPoolAllocator`).
    """

    def __init__(
        self,
        num_tokens: int,
        page_size: int = 1,
        *,
        need_sort: bool = False,
        in_order: bool = False,
    ) -> None:
        if page_size < 1 or num_tokens < page_size or num_tokens % page_size:
            raise CacheConfigError(
                f"max_total_num_tokens must be a multiple of page_size {page_size} "
                f"and at least one page, got {num_tokens}"
            )
        self.num_tokens = num_tokens
        self.page_size = page_size
        self.need_sort = need_sort
        self._in_order = in_order
        self.num_available_tokens = num_tokens
        ids = np.arange(1, num_tokens // page_size + 1)
        self._free = deque([ids])
        self._num_free = len(ids)  # pages in `_free`; the others are in `_released`
        self._released: deque[Slots] = deque()
        self._group: list[Slots] | None = None

    @property
    def num_available_peers(self) -> int:
        """Free slots of layers with a window, if there are such."""
        return self.num_available_tokens

    @property
    def num_allocatable_tokens(self) -> int:
        """Free slots, of both kinds where there are two."""
        return min(self.num_available_tokens, self.num_available_peers)

    # -- taking ---------------------------------------------------------------

    def allocate(self, num_tokens: int) -> Slots:
        """Take single slots from the front.

        Raises
        ------
        NoFreeBlocksError
            If there are fewer; nothing changes.
        """
        return self._take(num_tokens, num_tokens)

    def extend(
        self, prefixes: Iterable[tuple[int, int, int]], num_tokens: int
    ) -> list[Slots]:
        """Take slots for requests that grow by many tokens, in batch order.

        Parameters
        ----------
        prefixes
            Of each: its length before, after, and its last slot (or -1). What is left
            of its last page is filled first.
        num_tokens
            By which all of them grow.

        Returns
        -------
        list of Slots
            The new slots of each.

        Raises
        ------
        NoFreeBlocksError
            If there are too few pages; nothing changes.
        """
        grown = list(prefixes)
        size = self.page_size
        if size == 1:
            taken = self._take(num_tokens, num_tokens)
            bounds = np.cumsum([after - before for before, after, _ in grown])
            return np.split(taken, bounds[:-1])
        counts = [-(-after // size) - -(-before // size) for before, after, _ in grown]
        pages = self._take(sum(counts), num_tokens // size + len(grown) + 1)
        found: list[Slots] = []
        first = 0
        for (before, after, last), count in zip(grown, counts, strict=True):
            num_filled = min(after, -(-before // size) * size) - before
            filled = last + 1 + np.arange(num_filled)
            own = pages[first : first + count]
            first += count
            fresh = (own[:, None] * size + np.arange(size)).ravel()
            rest = after - before - num_filled
            found.append(np.concatenate((filled, fresh[:rest])))
        return found

    def decode(self, lasts: Slots, lengths: Slots) -> Slots:
        """Take a slot for each of the requests of a batch, in its order.

        Parameters
        ----------
        lasts
            The last slot of each.
        lengths
            Tokens that each has stored.

        Raises
        ------
        NoFreeBlocksError
            If there are too few; nothing changes.
        """
        size = self.page_size
        if size == 1:
            return self._take(len(lengths), len(lengths))
        opens = lengths % size == 0
        pages = self._take(int(np.count_nonzero(opens)), len(lengths))
        slots = lasts + 1
        slots[opens] = pages * size
        return slots

    def _take(self, num_pages: int, num_needed: int) -> Slots:
        """Take pages from the front; `num_needed` decides about sorting."""
        if self.need_sort and num_needed > self._num_free:
            self._merge()
        if num_pages > self._num_free:
            raise NoFreeBlocksError(
                f"{num_pages} pages of {self.page_size} tokens are needed, "
                f"{self._num_free} are free"
            )
        self._num_free -= num_pages
        self.num_available_tokens -= num_pages * self.page_size
        free, found = self._free, []
        while num_pages:
            ids = free.popleft()
            if len(ids) > num_pages:
                free.appendleft(ids[num_pages:])
                ids = ids[:num_pages]
            found.append(ids)
            num_pages -= len(ids)
        return np.concatenate(found) if found else NO_SLOTS

    def _merge(self) -> None:
        if self._released:
            free = np.concatenate((*self._free, *self._released))
            ids = np.sort(free, kind="stable")  # runs that are sorted mostly
            self._free, self._num_free = deque([ids]), len(ids)
            self._released.clear()

    # -- freeing --------------------------------------------------------------

    def free(self, slots: Slots) -> None:
        """Give slots back, in a call of the release's.

        With `in_order` they begin with a page, of which no other call has a part.
        """
        if not len(slots):
            return
        size = self.page_size
        ids = slots[::size] // size if self._in_order else slots // size
        if self._group is None:
            self._release(ids)
        else:
            self._group.append(ids)

    def _release(self, ids: Slots) -> None:
        size = self.page_size
        if size > 1 and not self._in_order:
            ids = np.unique(ids)
        self.num_available_tokens += len(ids) * size
        into = self._released if self.need_sort else self._free
        if size == 1:
            into.append(ids)
        else:
            into.appendleft(ids)
        if not self.need_sort:
            self._num_free += len(ids)

    def begin_group(self) -> None:
        """Collect freed slots until `end_group`."""
        self._group = []

    def end_group(self) -> None:
        """Free the slots that were collected, in one call."""
        group, self._group = self._group, None
        if group:
            self._release(np.concatenate(group))

    def check(self, held: Iterable[Slots]) -> None:
        """Prove that each slot is free or held once, in O(pool).

        Parameters
        ----------
        held
            Slots that are held, those of the tree once. A page counts as held with its
            first slot.
        """
        size = self.page_size
        free = [*self._free, *self._released]
        ids = np.concatenate((NO_SLOTS, *free))
        require(
            len(ids) * size == self.num_available_tokens,
            f"{len(ids) * size} free tokens, {self.num_available_tokens} counted",
        )
        own = np.concatenate((NO_SLOTS, *held))
        require(len(own) == len(np.unique(own)), "a token slot is held by two requests")
        pages = np.unique(own // size)
        whole = np.sort(np.concatenate((ids, pages)))
        expected = np.arange(1, self.num_tokens // size + 1)
        require(
            np.array_equal(whole, expected),
            "token slots are lost, or free and held at once",
        )


class SlotCounts(SlotAllocator):
    """`SlotAllocator` that counts slots and tells none from another: all are 0.

    What a request or a tree holds is told by its length. As many are free as there
    would be, since no page belongs to two of them.
    """

    def take_pages(self, num_pages: int) -> None:
        """Take pages.

        Raises
        ------
        NoFreeBlocksError
            If there are fewer; nothing changes.
        """
        if num_pages > self._num_free:
            raise NoFreeBlocksError(
                f"{num_pages} pages of {self.page_size} tokens are needed, "
                f"{self._num_free} are free"
            )
        self._num_free -= num_pages
        self.num_available_tokens -= num_pages * self.page_size

    def extend(
        self, prefixes: Iterable[tuple[int, int, int]], num_tokens: int
    ) -> list[Slots]:
        size = self.page_size
        grown = [(before, after) for before, after, _ in prefixes]
        self.take_pages(
            sum(-(-after // size) - -(-before // size) for before, after in grown)
        )
        zeros = np.zeros(num_tokens, np.int64)
        return [zeros[: after - before] for before, after in grown]

    def _take(self, num_pages: int, num_needed: int) -> Slots:
        del num_needed
        self.take_pages(num_pages)
        return np.zeros(num_pages, np.int64)

    def free(self, slots: Slots) -> None:
        num_pages = -(-len(slots) // self.page_size)
        self._num_free += num_pages
        self.num_available_tokens += num_pages * self.page_size

    def begin_group(self) -> None:
        pass

    def end_group(self) -> None:
        pass

    def check(self, held: Iterable[Slots]) -> None:
        """Prove that the free pages are as many as those that no table holds."""
        size = self.page_size
        num_held = sum(-(-len(slots) // size) for slots in held)
        require(
            num_held + self._num_free == self.num_tokens // size
            and self.num_available_tokens == self._num_free * size,
            f"{num_held} pages are held and {self._num_free} free of "
            f"{self.num_tokens // size}, {self.num_available_tokens} tokens counted",
        )


class RequestSlots:
    """Rows of the table of requests: taken from the front, returned to the end.

    Parameters
    ----------
    num_slots
        How many requests may hold one.
    first
        The first row that is given out: 1 from 0.5.11 on, which pads with row 0.
    from_end
        Whether rows are taken from the end, as in 0.5.19.

    Notes
    -----
    Source: SGLang 0.5.9, 0.5.11 and 0.5.23, ``mem_cache/memory_pool.py``
    (`ReqToTokenPool`).
    """

    def __init__(
        self, num_slots: int, *, first: int = 0, from_end: bool = False
    ) -> None:
        self.num_slots = num_slots
        self._from_end = from_end
        self._rows = range(first, first + num_slots)
        self._free = deque(self._rows)

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Take the first free row."""
        if not self._free:
            raise NoFreeBlocksError(f"all {self.num_slots} request slots are taken")
        return self._free.popleft()

    def take_all(self, num_slots: int) -> list[int]:
        """Take rows for the requests of a batch, as many as there are."""
        if not self._from_end:
            return [self.take() for _ in range(num_slots)]
        return [self._free.pop() for _ in range(num_slots)][::-1]

    def free(self, slot: int) -> None:
        """Return a row."""
        self._free.append(slot)

    def check(self, taken: Iterable[int]) -> None:
        """Prove that each row is free or taken once."""
        require(
            sorted([*self._free, *taken]) == list(self._rows),
            "a request slot is lost, or taken twice",
        )
