"""`hf_fifo` against the real continuous batching of transformers (promise 2).

The logs in `hf_fifo/` were written by the real engine, and hold its semantics where it
is not installed; with it, hundreds of random workloads go through both.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sim.studies.conformance import (
    DecisionDriver,
    first_difference,
    load_workload,
    read_log,
    write_log,
)
from tests.conformance.hf_cases import (
    GOLDEN,
    Case,
    random_case,
    shrunk,
    text_of,
    workload_text,
)
from tests.conformance.hf_reference import Reference, why_missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.studies.conformance import Difference

FOLDER = Path(__file__).parent / "hf_fifo"
ENDING = ".workload.json"
NAMES = sorted(path.name.removesuffix(ENDING) for path in FOLDER.glob(f"*{ENDING}"))
NUM_CASES, CASES_A_TEST = 400, 20

needs_transformers = pytest.mark.skipif(
    why_missing() is not None, reason=why_missing() or ""
)


# -- logs of the real engine ----------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_decisions_equal_the_real_engines(name: str, tmp_path: Path) -> None:
    golden, ours = FOLDER / f"{name}.golden.jsonl.gz", tmp_path / "ours.jsonl.gz"
    driver = DecisionDriver(load_workload(FOLDER / f"{name}{ENDING}"), check=True)
    write_log(driver.lines(), ours)
    difference = first_difference(read_log(golden), read_log(ours))
    assert difference is None, difference.in_words(("real engine", "kvsim"))


def test_the_logs_show_every_rule() -> None:
    assert set(NAMES) == set(GOLDEN)
    seen: Counter[str] = Counter()
    for name in NAMES:
        config = load_workload(FOLDER / f"{name}{ENDING}").config
        seen["table"] += bool(config["max_blocks_per_request"])
        seen["plain"] += not config["enable_prefix_caching"]
        for line in read_log(FOLDER / f"{name}.golden.jsonl.gz"):
            seen.update(mode for _, mode in line.get("preempt", ()))
            seen.update(key for key in ("abort", "error", "stalled") if key in line)
            seen["back"] += "swap_in" in line
            seen["hit"] += any(line.get("cached", {}).values())
    assert min(seen.values()) > 0
    assert {"swap", "recompute", "abort", "error", "stalled"} < set(seen)
    assert seen["swap"] >= 50
    assert seen["recompute"] >= 50


def test_a_changed_rule_is_found() -> None:
    """Without its safety margin the engine admits more: the logs must notice."""
    unequal = 0
    for name in NAMES:
        workload = load_workload(FOLDER / f"{name}{ENDING}")
        config = workload.config | {
            "safety_margin": 1.0 - workload.config["safety_margin"]
        }
        changed = workload.model_copy(update={"config": config})
        golden = read_log(FOLDER / f"{name}.golden.jsonl.gz")
        unequal += first_difference(golden, DecisionDriver(changed).lines()) is not None
    assert unequal > len(NAMES) // 2


# -- the real engine ------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A model this small is slower on several."""
    import torch  # noqa: PLC0415

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def compared(case: Case) -> tuple[Difference | None, list[dict[str, Any]]]:
    """Return where we part from the real engine, and its log."""
    theirs = list(Reference(case.workload, case.early_ends).lines())
    ours = DecisionDriver(case.workload, check=True).lines()
    return first_difference(theirs, ours), theirs


def differs(case: Case) -> bool:
    return compared(case)[0] is not None


@needs_transformers
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("default")  # the reference's own are none of ours
@pytest.mark.parametrize("first", range(0, NUM_CASES, CASES_A_TEST))
def test_random_workloads_go_as_in_the_real_engine(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + CASES_A_TEST):
        case = random_case(seed)
        difference, lines = compared(case)
        if difference is not None:
            small = shrunk(case, differs)
            least = compared(small)[0]
            assert least is not None
            pytest.fail(
                f"seed {seed}: {least.in_words(('real engine', 'kvsim'))}\n"
                f"{text_of(small)}"
            )
        seen.update({mode for line in lines for _, mode in line.get("preempt", ())})
    # All in all at least 50 cases of each, which is 2.5 of 20.
    assert seen["swap"] >= 2
    assert seen["recompute"] >= 1


@needs_transformers
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_the_real_engine_still_writes_the_logs(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.gz"
    write_log(Reference(load_workload(FOLDER / f"{name}{ENDING}")).lines(), log)
    golden = FOLDER / f"{name}.golden.jsonl.gz"
    assert first_difference(read_log(golden), read_log(log)) is None


# -- the search for the smallest case -------------------------------------------


def test_a_case_is_shrunk_to_what_still_differs() -> None:
    case = random_case(3)
    wanted = case.workload.requests[1].id

    def shows(part: Case) -> bool:
        return any(r.id == wanted and r.output_len >= 3 for r in part.workload.requests)

    small = shrunk(case, shows)
    assert [(r.id, r.output_len) for r in small.workload.requests] == [(wanted, 3)]


def test_cases_are_files_that_kvsim_decisions_reads(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(workload_text(random_case(5).workload))
    assert load_workload(path).requests == random_case(5).workload.requests
    with gzip.open(FOLDER / f"{NAMES[0]}.golden.jsonl.gz", "rt") as text:
        assert json.loads(next(text))["t"] == 0
