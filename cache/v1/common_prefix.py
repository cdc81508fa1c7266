"""Leading blocks that all requests hold, as the release counts them."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from cache.v1.block_tables import BlockTables
from cache.v1.groups.full import FullAttentionManager
from cache.v1.runs.group_tables import GroupRunTables
from cache.v1.runs.tables import RunTables

if TYPE_CHECKING:
    from cache.v1.groups.table import GroupTable
    from cache.v1.tables import TableRequest, Tables


def num_common_prefix_blocks(
    tables: Tables, request: TableRequest, num_tables: int
) -> list[int]:
    """Return how many leading blocks of a request all others hold, too, by group.

    Windows, chunks and states have none, and nothing has any without caching.

    Parameters
    ----------
    tables
        Of an engine.
    request
        Has a table.
    num_tables
        How many requests count as if they had one.

    Notes
    -----
    Source: vLLM 0.17.1, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`get_num_common_prefix_blocks`) and ``kv_cache_coordinator.py``.
    """
    if isinstance(tables, RunTables):
        num_common = _of_runs(request, num_tables)
        if not isinstance(tables, GroupRunTables):
            return [num_common]
        is_full = [isinstance(m, FullAttentionManager) for m in tables.managers]
        return [num_common * each for each in is_full]
    if isinstance(tables, BlockTables) and tables.enable_caching:
        return [
            _of_blocks(own, num_tables) * isinstance(manager, FullAttentionManager)
            for manager, own in zip(tables.managers, request.table.groups, strict=True)
        ]
    return [0]


def _of_runs(request: TableRequest, num_tables: int) -> int:
    num_common = 0
    for extent in request.table.extents():
        if extent.num_refs != num_tables:
            return num_common
        num_common += len(extent.ids)
    # those behind are in this table alone
    return num_common + len(request.table.unregistered) * (num_tables == 1)


def _of_blocks(own: GroupTable, num_tables: int) -> int:
    held_by_all = takewhile(lambda block: block.ref_cnt == num_tables, own.blocks)
    return sum(1 for _ in held_by_all)
