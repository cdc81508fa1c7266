"""Records of a scheduler, call by call: the curves of the 2023 drafts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from cache.sequences import SequenceStatus

if TYPE_CHECKING:
    import pandas as pd

    from sim.scheduler.groups.output import GroupSchedulerOutput
    from sim.scheduler.groups.scheduler import GroupScheduler

_RUNNING = SequenceStatus.RUNNING


def _column() -> list[int]:
    return []


def _share() -> list[float]:
    return []


@dataclass(slots=True)
class Stats:
    """One record for each call that leaves something running or swaps something.

    All lists are equally long. Queues and cache are those right after the call.

    Attributes
    ----------
    timestamps
        Times of the calls, in seconds.
    input_lens
        Tokens of the batch.
    swap_in_lens, swap_out_lens
        Tokens that the moved blocks have room for.
    num_preemption, num_waiting, num_running, num_swapped
        Groups preempted in the call, and groups in the queues.
    gpu_cache_usage, cpu_cache_usage
        Shares of the pools that tables hold.
    num_logical_blocks, num_logical_tokens
        Entries of all GPU tables, and tokens stored in them: what there would be
        without sharing.
    num_physical_blocks, num_physical_tokens
        Blocks that tables hold, and filled slots in them.
    num_reserved_blocks, num_reserved_tokens
        Taken but not filled: blocks without any token, and slots without one.

    Notes
    -----
    Source: the `Stats` of the spring 2023 drafts, which release 0.1.0 replaced by a
    log line.
    """

    timestamps: list[float] = field(default_factory=_share)
    input_lens: list[int] = field(default_factory=_column)
    swap_in_lens: list[int] = field(default_factory=_column)
    swap_out_lens: list[int] = field(default_factory=_column)
    num_preemption: list[int] = field(default_factory=_column)
    num_waiting: list[int] = field(default_factory=_column)
    num_running: list[int] = field(default_factory=_column)
    num_swapped: list[int] = field(default_factory=_column)
    gpu_cache_usage: list[float] = field(default_factory=_share)
    cpu_cache_usage: list[float] = field(default_factory=_share)
    num_logical_blocks: list[int] = field(default_factory=_column)
    num_logical_tokens: list[int] = field(default_factory=_column)
    num_physical_blocks: list[int] = field(default_factory=_column)
    num_physical_tokens: list[int] = field(default_factory=_column)
    num_reserved_blocks: list[int] = field(default_factory=_column)
    num_reserved_tokens: list[int] = field(default_factory=_column)

    def record(
        self, now_s: float, output: GroupSchedulerOutput, scheduler: GroupScheduler
    ) -> None:
        """Note a call that `scheduler` has just finished. O(table entries).

        Parameters
        ----------
        now_s
            Time of the call, in seconds.
        output
            What it decided.
        scheduler
            The scheduler that decided.
        """
        moved = output.blocks_to_swap_in or output.blocks_to_swap_out
        if not (scheduler.running or moved):
            return
        block_size = scheduler.cache_config.block_size
        usage = scheduler.cache_usage()
        num_slots = usage.num_physical_blocks * block_size
        self.timestamps.append(now_s)
        self.input_lens.append(output.num_batched_tokens)
        self.swap_in_lens.append(len(output.blocks_to_swap_in) * block_size)
        self.swap_out_lens.append(len(output.blocks_to_swap_out) * block_size)
        self.num_preemption.append(len(output.preemptions))
        self.num_waiting.append(scheduler.num_waiting)
        self.num_running.append(scheduler.num_running)
        self.num_swapped.append(scheduler.num_swapped)
        self.gpu_cache_usage.append(usage.kv_cache_usage)
        self.cpu_cache_usage.append(usage.cpu_cache_usage)
        self.num_logical_blocks.append(usage.num_logical_blocks)
        self.num_logical_tokens.append(usage.num_logical_tokens)
        self.num_physical_blocks.append(usage.num_physical_blocks)
        self.num_physical_tokens.append(usage.num_physical_tokens)
        self.num_reserved_blocks.append(_num_empty_blocks(scheduler))
        self.num_reserved_tokens.append(num_slots - usage.num_physical_tokens)

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def sharing_saved(self) -> list[float]:
        """Share of the blocks that sharing saves: 1 - physical / logical."""
        return [
            1.0 - physical / logical if logical else 0.0
            for physical, logical in zip(
                self.num_physical_blocks, self.num_logical_blocks, strict=True
            )
        ]

    @property
    def fragmentation(self) -> list[float]:
        """Share of the taken slots that holds no token: reserved / (both)."""
        return [
            reserved / (reserved + filled) if reserved + filled else 0.0
            for reserved, filled in zip(
                self.num_reserved_tokens, self.num_physical_tokens, strict=True
            )
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row a record; the columns are the attributes and both ratios."""
        import pandas as pd  # noqa: PLC0415  (slow, and for plots only)

        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        columns["sharing_saved"] = self.sharing_saved
        columns["fragmentation"] = self.fragmentation
        return pd.DataFrame(columns)


def _num_empty_blocks(scheduler: GroupScheduler) -> int:
    """Blocks in GPU tables without any token."""
    block_size = scheduler.cache_config.block_size
    held: set[int] = set()
    filled: set[int] = set()
    for group in scheduler.running:
        for seq in group.get_seqs(_RUNNING):
            table = scheduler.block_manager.get_block_table(seq)
            held.update(table)
            filled.update(table[: -(-seq.num_computed_tokens // block_size)])
    return len(held - filled)
