"""Decisions of one V1 release, against the logs of another (promise 2).

The set's README measured which releases share which rules; `test_logs` compares each
workload with the release that it names.
"""

from __future__ import annotations

import pytest

from sim.studies.conformance import (
    DecisionDriver,
    DecisionWorkload,
    Difference,
    first_difference,
    load_workload,
    read_log,
)
from tests.shared import SHARED, shared

ENDING = ".workload.json"
LATER_KEYS = (
    "watermark",
    "max_num_active_seqs",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "max_num_scheduled_tokens",
)


def names(folder: str) -> list[str]:
    paths = (SHARED / "conformance" / folder).glob(f"*{ENDING}")
    return sorted(f"{folder}/{path.name.removesuffix(ENDING)}" for path in paths)


def workload(name: str, release: str) -> DecisionWorkload:
    """A workload of the set as if `release` had been asked."""
    original = load_workload(shared(f"conformance/{name}{ENDING}"))
    return original.model_copy(update={"reference": f"vllm {release}"})


def difference(name: str, asked: DecisionWorkload) -> Difference | None:
    golden = shared(f"conformance/{name}.golden.jsonl.gz")
    return first_difference(read_log(golden), DecisionDriver(asked).lines())


def decides_the_same(release: str, name: str) -> bool:
    """Whether the release does as the log's own one, by the set's notes.

    0.8.5 is as 0.11 on chunked FCFS; 0.12 to 0.22 are as 0.11 with chunking on; 0.31
    and 0.32 are 0.33 but for the interval and priority preemption; 0.24 to 0.30 lack
    the lone request's exemption, too.
    """
    config = workload(name, release).config
    minor = int(release.split(".")[1])
    is_fcfs = config["policy"] == "fcfs"
    if name.startswith("v1/"):
        return config["chunked_prefill"] and (minor >= 11 or is_fcfs)
    if minor < 24 or config["prefill_schedule_interval"] > 1 or not is_fcfs:
        return False
    return minor >= 31 or not (
        config["long_prefill_token_threshold"]
        or config["max_num_active_seqs"]
        or config["long_prefill_token_threshold_adaptive"]
    )


@pytest.mark.parametrize(
    ("release", "folder", "num_logs"),
    [
        pytest.param("0.8.5", "v1", 13, marks=pytest.mark.slow),
        ("0.22.0", "v1", 17),
        pytest.param("0.24.0", "v1_33", 14, marks=pytest.mark.slow),
        ("0.31.0", "v1_33", 19),
    ],
)
def test_other_releases_take_the_same_decisions_where_their_rules_do(
    release: str, folder: str, num_logs: int
) -> None:
    shared(f"conformance/{folder}")
    compared = [name for name in names(folder) if decides_the_same(release, name)]
    assert len(compared) >= num_logs
    for name in compared:
        found = difference(name, workload(name, release))
        assert found is None, f"{name}: {found.in_words()}"


@pytest.mark.parametrize(
    ("release", "name"),
    [
        # Each pair differs by the one rule that the log is about.
        ("0.12.0", "v1/no_chunking_skip"),
        ("0.24.0", "v1/bs32_cap"),
        ("0.22.0", "v1_33/prefix_evict_a"),
        ("0.30.0", "v1_33/threshold_preempt_a"),
        ("0.32.0", "v1_33/priority_self_a"),
        ("0.32.0", "v1_33/interval_sparse_a"),
    ],
)
def test_another_releases_rules_are_told_apart(release: str, name: str) -> None:
    asked = workload(name, release)
    if release == "0.22.0":
        config = {k: v for k, v in asked.config.items() if k not in LATER_KEYS}
        asked = asked.model_copy(update={"config": config})
    assert difference(name, asked) is not None


def test_a_key_that_is_not_there_does_not_exist() -> None:
    """The whole-sequence test is on by default in 0.33, but not where it is no key."""
    name = "v1_33/isl_on_a"
    asked = workload(name, "0.33.0")
    key = "scheduler_reserve_full_isl"
    without = {k: v for k, v in asked.config.items() if k != key}
    logs = [
        list(DecisionDriver(asked.model_copy(update={"config": config})).lines())
        for config in (without, without | {key: False})
    ]
    assert logs[0] == logs[1]
    assert difference(name, asked) is None
    assert difference(name, asked.model_copy(update={"config": without})) is not None
