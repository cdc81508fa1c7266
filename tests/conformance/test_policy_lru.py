"""The policy `lru` is V1's own order: block id for block id, on the recorded logs.

Golden logs name the blocks of every table, so a single block evicted out of turn shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cache.v1.policies import FIFO, LRU
from sim.studies.conformance import (
    DecisionDriver,
    first_difference,
    load_workload,
    read_log,
)
from sim.studies.conformance.driver import make_scheduler
from tests.shared import SHARED, shared

if TYPE_CHECKING:
    from cache.v1.policies import CachePolicy
    from sim.studies.conformance import Difference

ENDING = ".workload.json"
NAMES = [
    f"{folder}/{path.name.removesuffix(ENDING)}"
    for folder in ("v1", "v1_33")
    for path in sorted((SHARED / "conformance" / folder).glob(f"*{ENDING}"))
]


def difference(name: str, policy: type[CachePolicy]) -> tuple[Difference | None, int]:
    """Where the log and an engine with `policy` part, and its evictions."""
    asked = load_workload(shared(f"conformance/{name}{ENDING}"))
    scheduler = make_scheduler(asked, evictor=policy)
    driver = DecisionDriver(asked, check="small" in name, scheduler=scheduler)
    golden = read_log(shared(f"conformance/{name}.golden.jsonl.gz"))
    found = first_difference(golden, driver.lines())
    return found, driver.scheduler.tables.num_evictions


@pytest.mark.parametrize("name", NAMES or ["v1/light"])
def test_lru_decides_as_the_real_engine(name: str) -> None:
    found, _ = difference(name, LRU)
    assert found is None, found.in_words(("real engine", "lru policy"))


@pytest.mark.parametrize("folder", ["v1", "v1_33"])
def test_logs_tell_policies_apart(folder: str) -> None:
    """Both sets evict, and FIFO in place of LRU shows."""
    shared(f"conformance/{folder}")
    names = [n for n in NAMES if n.startswith(f"{folder}/") and "prefix" in n]
    assert names
    assert any(difference(name, LRU)[1] > 0 for name in names)
    assert any(difference(name, FIFO)[0] for name in names)
