"""Our `sglang` against logs of later releases' own schedulers (promise 2).

Of 0.5.23, and where a name begins with `of_0_5_12` and so on of that release. Names
end with the seed of `random_sglang_workload` that they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.studies.conformance import (
    driver_of,
    first_difference,
    load_workload,
    read_log,
    write_log,
)
from sim.studies.conformance.conform import Comparison, Coverage

HERE = Path(__file__).parent / "sglang_releases"
ENDING = ".workload.json"
NAMES = sorted(path.name.removesuffix(ENDING) for path in HERE.glob(f"*{ENDING}"))


@pytest.mark.parametrize("name", NAMES)
def test_decisions_equal_the_real_engines(name: str, tmp_path: Path) -> None:
    golden, ours = HERE / f"{name}.golden.jsonl.gz", tmp_path / "ours.jsonl.gz"
    workload = load_workload(HERE / f"{name}{ENDING}")
    driver = driver_of(workload, check=True)
    write_log(driver.lines(), ours)
    difference = first_difference(read_log(golden), read_log(ours))
    assert difference is None, difference.in_words(("real engine", "kvsim"))
    evictions = [each for line in read_log(golden) for each in line.get("evict", ())]
    num_tokens = sum(length for _, nodes, *_ in evictions for length, _ in nodes)
    num_pages = num_tokens // workload.config["page_size"]
    assert driver.scheduler.summary()["num_evictions"] == num_pages


def test_the_logs_meet_its_rules() -> None:
    coverage = Coverage()
    for name in NAMES:
        workload = load_workload(HERE / f"{name}{ENDING}")
        lines = list(read_log(HERE / f"{name}.golden.jsonl.gz"))
        coverage.add(workload, Comparison(None, lines))
    missing = {
        *("overlap", "pages", "mixed batches", "priorities", "order lpm"),
        *("order dfs-weight", "order lof", "retractions", "requests pushed out"),
        *("evictions", "chunks", "aborts", "deaths", "windows dropped inside"),
    } - {*(+coverage.workloads_with)}
    assert not missing
