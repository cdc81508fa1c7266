"""Our sglang beside the installed SGLang's own scheduler: `make test-hosted-sglang`."""

from __future__ import annotations

import pytest

from sim.errors import SchedulerError
from sim.scheduler.hosted.sglang_api import installed_sglang
from sim.scheduler.sglang.settings import FIRST_WITH_PLANS, FIRST_WITH_WINDOWS
from sim.studies.conformance import first_difference, load_workload, read_log
from sim.studies.conformance.conform import Coverage, compare
from sim.studies.conformance.random_sglang import random_sglang_workload
from sim.studies.conformance.sglang import hosted_lines
from tests.shared import SHARED, shared

ENDING = ".workload.json"
FOLDER = SHARED / "conformance" / "sglang"
NAMES = [p.name.removesuffix(ENDING) for p in sorted(FOLDER.glob(f"*{ENDING}"))]


def why_missing() -> str:
    """Return why no SGLang can be hosted here; empty if one can."""
    try:
        installed_sglang()
    except SchedulerError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # SGLang's own are none of ours
    pytest.mark.skipif(bool(why_missing()), reason=why_missing()),
]


@pytest.mark.parametrize("name", NAMES or ["fcfs_light_a"])
def test_the_hosted_engine_writes_the_golden_logs(name: str) -> None:
    if installed_sglang() != "0.5.9":
        pytest.skip("the logs are those of 0.5.9")
    workload = load_workload(shared(f"conformance/sglang/{name}{ENDING}"))
    golden = read_log(shared(f"conformance/sglang/{name}.golden.jsonl.gz"))
    difference = first_difference(golden, hosted_lines(workload))
    assert difference is None, difference.in_words(("log", "hosted"))


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_random_workloads_go_as_in_the_real_engine(first: int) -> None:
    coverage = Coverage()
    for seed in range(first, first + 100):
        workload = random_sglang_workload(seed, installed_sglang())
        comparison = compare(workload)
        coverage.add(workload, comparison)
        difference = comparison.difference
        assert difference is None, difference.in_words(("SGLang", "kvsim"))
    assert coverage.num_preemptions > 10
    for name in ("overlap", "evictions", "retractions", "priorities", "chunks"):
        assert coverage.workloads_with[name] > 6, name


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_windows_go_as_in_the_real_engine(first: int) -> None:
    if int(installed_sglang().rpartition(".")[2]) < FIRST_WITH_WINDOWS:
        pytest.skip("its rules of windows are not known here")
    coverage = Coverage()
    for seed in range(first, first + 100):
        workload = random_sglang_workload(seed, installed_sglang(), windows=True)
        comparison = compare(workload)
        coverage.add(workload, comparison)
        difference = comparison.difference
        assert difference is None, difference.in_words(("SGLang", "kvsim"))
    for name in ("windows dropped", "windows dropped inside", "retractions", "chunks"):
        assert coverage.workloads_with[name] > 10, name


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_engines_apart_go_as_the_real_ones(first: int) -> None:
    release = installed_sglang()
    if int(release.rpartition(".")[2]) < FIRST_WITH_PLANS:
        pytest.skip("engines of earlier releases that are apart are not hosted")
    coverage = Coverage()
    for seed in range(first, first + 100):
        workload = random_sglang_workload(seed, release, apart=True)
        comparison = compare(workload)
        coverage.add(workload, comparison)
        difference = comparison.difference
        assert difference is None, difference.in_words(("SGLang", "kvsim"))
    for name in (
        *("overlap", "pages", "priorities", "chunks", "evictions", "retractions"),
        *("aborts", "prompts sent", "joined requests"),
    ):
        assert coverage.workloads_with[name] > 6, name
