"""The gate between waiting and running requests: which find blocks to pass it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import require
from cache.v1.tables import NOTHING_FOUND
from sim.scheduler.admission import FullPrompt, Watermark
from sim.scheduler.v1.policies import NEVER
from sim.scheduler.views import WaitingRequest

if TYPE_CHECKING:
    from collections.abc import Collection

    from cache.v1.block_tables import BlockTables
    from cache.v1.runs.group_tables import GroupRunTables
    from cache.v1.tables import Found, Tables
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.policies import AdmissionDesk
    from sim.scheduler.v1.settings import Settings


class Gate:
    """Lets the head of the queue pass if its blocks are there.

    A head that is refused is not looked at again before that could change: more blocks
    are needed, and fewer free, with every block that decodes take, whether or not it is
    one that was found. When requests end, their blocks may still be too few.

    Parameters
    ----------
    settings, cache
        Of the scheduler.
    tables, groups
        The blocks; `groups` are `tables` if there may be several groups, or None.
    running
        Requests that hold blocks.
    desk
        Asks an admission rule that the engine does not have, if there is one.

    Attributes
    ----------
    head
        The request that was refused last, if it need not be looked at; else None.
    until
        The step up to which it is not, unless something changes.
    num_spare_blocks
        Free blocks that a head leaves to the requests that run.
    reserves_all
        Whether all known tokens of a head must fit, not only those of the call.
    reserves_beside
        Whether they must if others run.
    num_needed_blocks
        Free blocks without which `head` does not pass beside others; 0 if more than
        blocks decides.
    keeps_heads
        Whether a head is kept in `head` at all. Not where settings let it pass without
        a change of blocks or queues.
    keeps_needs
        Whether a head that is kept never comes to need fewer blocks.
    """

    __slots__ = (
        "_block_size",
        "_caches",
        "_desk",
        "_fills_nothing",
        "_groups",
        "_most_slots",
        "_running",
        "_tables",
        "head",
        "keeps_heads",
        "keeps_needs",
        "num_needed_blocks",
        "num_spare_blocks",
        "reserves_all",
        "reserves_beside",
        "until",
    )

    def __init__(
        self,
        settings: Settings,
        cache: CacheConfig,
        tables: Tables,
        groups: BlockTables | GroupRunTables | None,
        *,
        running: Collection[Request],
        desk: AdmissionDesk | None,
    ) -> None:
        self._tables = tables
        self._groups = groups
        self._running = running
        self._desk = desk
        self._block_size = cache.block_size
        self._most_slots = settings.most_slots(cache.block_size)
        self._caches = cache.enable_prefix_caching
        # Whether no running request will fill what `head` waits for: none joins them
        # before it is looked at again.
        self._fills_nothing = False
        self.head: Request | None = None
        self.until = self.num_needed_blocks = 0
        self.keeps_needs = True
        self.num_spare_blocks = int(settings.watermark * cache.num_gpu_blocks)
        self.reserves_all = self.reserves_beside = settings.reserve_full_isl
        # Two admission rules are those of newer releases under other names.
        if type(settings.admission) is FullPrompt:
            self.reserves_beside = True
        elif type(settings.admission) is Watermark:
            num_blocks = settings.admission.num_spare_blocks(cache.num_gpu_blocks)
            self.num_spare_blocks += num_blocks
        self.keeps_heads = (
            groups is None
            and (desk is None or desk.refusals_stand)
            and not settings.skips_over_budget_heads
            and not settings.spaces_prefills
            and not settings.long_prefill_token_threshold_adaptive
        )

    @property
    def is_plain(self) -> bool:
        """Whether nothing but blocks and queues decides of a head."""
        return self.keeps_heads and self._desk is None

    def look_again(self) -> None:
        """Let the next call look at the head of the queue: something has changed."""
        self.head = None
        self._fills_nothing = False
        if self._caches:
            self._tables.watch(None, 0, NOTHING_FOUND)

    def shut(self, head: Request, until: int, num_needed_blocks: int) -> None:
        """Keep the head of the queue out; see `until` and `num_needed_blocks`."""
        self.head, self.until = head, until
        self._fills_nothing = False
        self.num_needed_blocks = num_needed_blocks if self.keeps_needs else 0

    def note_freed(self) -> None:
        """Let the next call look at the head if blocks that came free may suffice."""
        if self.num_needed_blocks <= self._tables.num_free_blocks or not self._running:
            self.look_again()

    def is_shut(self, step: int) -> bool:
        """Whether `head` need not be looked at in a step."""
        return step <= self.until and not self._tables.watch_hit

    def num_steps_shut(self, step: int) -> int:
        """Return for how many steps from `step` on `head` need not be looked at."""
        # It is in the step that fills a block it waits for.
        tables = self._tables
        if self._caches:
            if tables.watch_hit:
                return 0
            if not self._fills_nothing:
                if tables.will_fill_watched(self._running):
                    return 0
                self._fills_nothing = True
        return self.until - step

    def lets_in(
        self,
        request: Request,
        num_tokens: int,
        found: Found,
        step: int,
        *,
        num_external_tokens: int = 0,
    ) -> bool:
        """Whether the head of the queue gets its first slots, up to `num_tokens`.

        Parameters
        ----------
        request, found
            The head, and what was just found of it.
        num_tokens
            What it is to have computed after the step, hits included.
        step
            That step.
        num_external_tokens
            How many of `num_tokens` are to be loaded, behind what was found.
        """
        groups, is_alone = self._groups, not self._running
        num_spare = 0 if is_alone else self.num_spare_blocks
        num_free = self._tables.num_free_blocks - num_spare
        most_slots, num_whole = self._most_slots, request.num_tokens
        num_slots = num_tokens if num_tokens < most_slots else most_slots
        num_all_slots = num_whole if num_whole < most_slots else most_slots
        if groups is None:
            num_beside = found.num_revived - found.num_blocks
            num_all = num_blocks = -(-num_slots // self._block_size) + num_beside
            if num_slots < num_all_slots:
                num_all = -(-num_all_slots // self._block_size) + num_beside
        else:
            needed, loads = groups.num_needed_blocks, num_external_tokens
            num_blocks, num_all = (
                needed(
                    *(request, num_slots, found),
                    is_whole=False,
                    num_external_tokens=loads,
                ),
                needed(
                    *(request, num_all_slots, found),
                    is_whole=True,
                    num_external_tokens=loads,
                ),
            )
        reserves = self.reserves_all if is_alone else self.reserves_beside
        num_needed = num_all if reserves and num_all > num_blocks else num_blocks
        num_steps = NEVER
        # Of a free block that was found, others may come to hold a copy.
        num_lacking = num_needed - found.num_revived + num_spare
        if num_needed <= num_free:
            num_lacking = 0
            if self._desk is None or is_alone:
                return True
            head = WaitingRequest(
                request, num_needed_blocks=num_needed, num_full_blocks=num_all
            )
            if self._desk.admits(head, num_free, self._running):
                return True
            if found.num_blocks:
                return False  # a free block's copy, held by others, may be found next
            if self.keeps_heads:
                num_steps = self._desk.num_standing_steps
        if groups is not None and reserves and not num_external_tokens:
            groups.refused(request, num_all_slots)
        # Where the budget cuts a prompt, a hit that is lost might lower what is needed.
        is_cut = num_tokens < request.num_tokens and not reserves and self._caches
        if self.keeps_heads and num_steps and not is_cut:
            self.shut(request, step + num_steps, num_lacking)
            self._tables.watch(request, request.num_tokens, found)
        return False

    def check(self) -> None:
        """Prove that running requests fill nothing that is waited for, if so believed.

        Raises
        ------
        InvariantError
            If one of them may.
        """
        require(
            not self._fills_nothing
            or not self._tables.will_fill_watched(self._running),
            "gate: a running request may fill what the head of the queue waits for",
        )
