"""`IdTables` that only count: what they refuse, and what `check` finds."""

from __future__ import annotations

import pytest

from cache.errors import CacheError, InvariantError, NoFreeBlocksError
from cache.tokens import SegmentTokens
from cache.v1.id_tables import IdTables
from cache.v1.tables import NOTHING_FOUND
from tests.cache.run_twins import Calls, Twin


def counting(num_gpu_blocks: int = 10, *, unhashed_first: bool = True) -> IdTables:
    tables = IdTables(num_gpu_blocks, 16, unhashed_first=unhashed_first)
    tables.count_only(160, [1, 0])
    return tables


def begun(tables: IdTables, num_tokens: int) -> Twin:
    request = Twin(0, num_tokens, SegmentTokens(((2, num_tokens),), 3))
    tables.begin(request, num_tokens, NOTHING_FOUND)
    request.num_computed_tokens = num_tokens
    return request


@pytest.mark.parametrize("unhashed_first", [True, False])
def test_a_table_gives_back_the_blocks_of_its_tokens(unhashed_first: bool) -> None:
    tables = counting(unhashed_first=unhashed_first)
    request = begun(tables, 33)
    assert tables.extend(request, 49, 33)
    tables.append_blocks([request.table])
    assert tables.append_rounds([{request: request.table}, {}], 1, 3) == [0, 1, 0]
    assert (tables.num_free_blocks, tables.num_logical_blocks) == (3, 6)
    tables.check([request])
    tables.check_count(6)
    request.num_computed_tokens = 81
    assert tables.free(request) == 6
    assert (tables.num_free_blocks, tables.free(request)) == (9, 0)


def test_tokens_beyond_the_most_have_no_blocks() -> None:
    tables = counting(20)
    request = begun(tables, 160)
    request.num_computed_tokens = 200
    assert tables.free(request) == 10


def test_more_blocks_than_are_free_are_refused_and_nothing_changes() -> None:
    tables = counting()
    request = begun(tables, 130)
    assert not tables.extend(request, 146, 130)
    for _ in range(2):
        with pytest.raises(NoFreeBlocksError):
            tables.append_rounds([{request: request.table}], 0, 1)
    assert tables.num_free_blocks == 0


def test_ids_that_were_not_kept_are_not_made_up() -> None:
    tables = counting()
    request = begun(tables, 20)
    for look in (tables.block_ids, tables.num_blocks):
        with pytest.raises(CacheError, match="set `observer` or `keeps_ids`"):
            look(request)
    with pytest.raises(CacheError, match="have no ids"):
        tables.free_block_ids()
    with pytest.raises(CacheError, match="have no ids"):
        tables.observer = Calls()
    tables.observer = None


def test_what_is_held_or_observed_keeps_its_ids() -> None:
    tables = IdTables(10, 16, unhashed_first=True)
    tables.observer = Calls()
    with pytest.raises(CacheError, match="held or observed"):
        tables.count_only(160, [1, 0])
    tables.observer = None
    begun(tables, 20)
    with pytest.raises(CacheError, match="held or observed"):
        tables.count_only(160, [1, 0])


def test_check_finds_a_wrong_count() -> None:
    tables = counting()
    begun(tables, 20)
    with pytest.raises(InvariantError, match="tokens need 1 blocks, 2 held"):
        tables.check_count(1)
    tables.num_free_blocks += 1
    with pytest.raises(InvariantError, match="8 blocks are free and 2 held, of 9"):
        tables.check([])
