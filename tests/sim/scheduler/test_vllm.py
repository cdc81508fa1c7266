"""Hosting a vLLM: our own scheduler under vLLM's names; see `tests.hosted`, too."""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError
from inspect import signature
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from cache.tokens import SegmentTokens
from sim.errors import SchedulerError
from sim.scheduler.hosted import VLLM
from sim.scheduler.hosted import api as vllm_api
from sim.scheduler.hosted import scheduler as hosting
from sim.scheduler.hosted.api import VllmApi, installed_version, nearest_release
from sim.scheduler.hosted.engine import HostedTokens
from sim.scheduler.request import Request
from sim.studies.conformance.conform import compare
from sim.studies.conformance.driver import hosted_scheduler
from sim.studies.conformance.random_v1 import as_workload, random_workload
from tests.sim.scheduler.fake_vllm import (
    Inner,
    SchedulerConfig,
    fake_api,
    load_from,
    modules,
)

if TYPE_CHECKING:
    from sim.scheduler.hosted.scheduler import VllmScheduler
    from sim.studies.conformance import DecisionWorkload

SMALL = {
    "num_gpu_blocks": 20,
    "block_size": 4,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 40,
}


def made(api: VllmApi, **more: Any) -> VllmScheduler:
    arguments: dict[str, Any] = SMALL | more
    with patch.object(hosting, "load_api", lambda: api):
        return VLLM.make({"enable_prefix_caching": True} | arguments)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a vLLM in place of the installed one."""

    def put(api: VllmApi) -> None:
        monkeypatch.setattr(hosting, "load_api", lambda: api)

    return put


# -- decisions --------------------------------------------------------------------


@pytest.mark.parametrize("release", ["0.11", "0.20", "0.33"])
def test_a_hosted_scheduler_decides_as_it_does_without_us(
    release: str, host: Any
) -> None:
    """Ours under vLLM's names, hosted, beside ours as it is."""
    host(fake_api(release))
    num_preemptions = num_hits = num_aborts = 0
    for seed in range(25):
        comparison = compare(random_workload(seed, release))
        assert comparison.difference is None, comparison.difference.in_words()
        num_preemptions += comparison.num_preemptions
        num_hits += sum(
            any(line.get("cached", {}).values()) for line in comparison.lines
        )
        num_aborts += sum("abort" in line for line in comparison.lines)
    assert num_preemptions > 50
    assert num_hits > 10
    assert num_aborts > 3


def test_another_release_is_told_apart(host: Any) -> None:
    host(fake_api("0.32", installed="0.33.0"))
    differing = [
        seed for seed in range(25) if compare(random_workload(seed, "0.33")).difference
    ]
    assert differing


def test_a_hosted_scheduler_proves_its_books(host: Any) -> None:
    host(fake_api())
    from sim.studies.conformance import DecisionDriver  # noqa: PLC0415

    workload = random_workload(1, "0.33")
    driver = DecisionDriver(workload, check=True, scheduler=hosted_scheduler(workload))
    assert list(driver.lines())
    scheduler: Any = driver.scheduler
    usage = scheduler.cache_usage()
    assert usage.num_physical_blocks == usage.num_logical_tokens == 0
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_swapped == 0
    assert scheduler.summary()["hosted_vllm"] == "0.33.0"


# -- what is refused --------------------------------------------------------------


def without(*names: str, release: str = "0.33") -> VllmApi:
    known = modules(release)
    for name in names:
        module, _, attribute = name.rpartition(".")
        delattr(known[module], attribute)
    return VllmApi("0.34.1", load_from(known))


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("vllm.v1.request.Request", "vllm.v1.request has no Request"),
        (
            "vllm.v1.core.kv_cache_utils.init_none_hash",
            "vllm.v1.core.kv_cache_utils has no init_none_hash",
        ),
    ],
)
def test_a_name_that_has_moved_is_named_with_the_version(gone: str, said: str) -> None:
    with pytest.raises(SchedulerError) as refused:
        without(gone)
    assert str(refused.value) == (
        f"the API of vLLM 0.34.1 is not the one of 0.11 to 0.33: {said}; host another "
        f"release, or take scheduler v1"
    )


def test_a_module_that_has_moved_is_named() -> None:
    known = modules()
    del known["vllm.v1.outputs"]
    with pytest.raises(SchedulerError, match=r"there is no module vllm\.v1\.outputs"):
        VllmApi("0.34.1", load_from(known))


def test_a_package_that_has_moved_is_named() -> None:
    def load(name: str) -> Any:
        if name.startswith("vllm.v1"):
            raise ModuleNotFoundError("No module named 'vllm.v1'", name="vllm.v1")
        return modules()[name]

    with pytest.raises(SchedulerError, match=r"there is no module vllm\.v1; host"):
        VllmApi("0.34.1", load)


@pytest.mark.parametrize("needed", ["blake3", "torch"])
def test_a_package_that_vllm_needs_is_named(needed: str) -> None:
    known = modules()
    if needed == "torch":
        del known["torch"]
    load = load_from(known, missing=["vllm.config"])
    with pytest.raises(
        SchedulerError, match=rf"0\.33\.0 cannot be .* pip install {needed} "
    ):
        VllmApi("0.33.0", load)


def test_what_fails_while_vllm_is_imported_is_said_in_a_line() -> None:
    def load(name: str) -> Any:
        raise OSError(f"libcudart.so: cannot open\nshared object ({name})")

    with pytest.raises(SchedulerError) as refused:
        VllmApi("0.33.0", load)
    assert "\n" not in str(refused.value)
    assert "OSError: libcudart.so: cannot open shared object" in str(refused.value)


def change(api: VllmApi, name: str, value: Any) -> VllmApi:
    vars(api)["_found"][name] = value
    return api


def test_an_argument_that_is_gone_is_named() -> None:
    api = change(fake_api(), "KVCacheConfig", lambda num_blocks: num_blocks)
    with pytest.raises(SchedulerError, match="KVCacheConfig takes no kv_cache_tensors"):
        made(api)


def test_an_argument_that_is_new_is_named() -> None:
    api = change(fake_api(), "CacheConfig", lambda layout: layout)
    with pytest.raises(SchedulerError, match="CacheConfig wants layout, which is not"):
        made(api)


@pytest.mark.parametrize("name", ["kv_cache_manager", "waiting"])
def test_a_part_of_the_scheduler_that_is_gone_is_named(name: str) -> None:
    known = modules()
    kind = known["vllm.v1.core.sched.scheduler"].Scheduler

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        delattr(self, name)

    init.__signature__ = signature(kind.__init__)  # type: ignore[attr-defined]
    known["vllm.v1.core.sched.scheduler"].Scheduler = type(  # type: ignore[attr-defined]
        "Scheduler", (kind,), {"__init__": init}
    )
    with pytest.raises(SchedulerError, match=rf"Scheduler has no {name}"):
        made(VllmApi("0.34.0", load_from(known)))


def test_what_vllm_refuses_is_said_in_a_line() -> None:
    with pytest.raises(SchedulerError) as refused:
        made(fake_api(), max_num_batched_tokens=4)
    assert str(refused.value) == (
        "vLLM 0.33.0 refuses or fails in SchedulerConfig: ValueError: "
        "max_num_batched_tokens must be at least max_num_seqs; mend what it names, or "
        "take scheduler v1"
    )


def test_what_a_patched_scheduler_raises_is_said_in_a_line(host: Any) -> None:
    api = fake_api()

    def schedule(self: Any) -> Any:
        raise KeyError("r7")

    change(api, "Scheduler", type("S", (api.Scheduler,), {"schedule": schedule}))
    host(api)
    found = compare(random_workload(0, "0.33")).difference
    assert found is not None
    assert "in Scheduler.schedule: KeyError: 'r7'" in str(found.here[0])


def test_tokens_that_vllm_makes_up_are_noticed(host: Any) -> None:
    """As speculation would: it counts more computed tokens than it was told to."""
    api = fake_api()

    def schedule(self: Any) -> Any:
        output = super(kind, self).schedule()
        for request in self.running:
            request.ours.num_computed_tokens += 1
        return output

    kind = type("S", (api.Scheduler,), {"schedule": schedule})
    change(api, "Scheduler", kind)
    host(api)
    log = compare(random_workload(0, "0.33")).lines
    assert "it does something that hosting does not mirror" in log[-1]["error"]


def test_a_preemption_that_nobody_hears_of_is_noticed(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with blocks that are freed later, by another way."""

    def release(self: Any, request: Any) -> int:
        self.release_now(request)
        return 0

    monkeypatch.setattr(Inner, "_release", release)
    host(fake_api())
    for seed in range(25):
        lines = compare(random_workload(seed, "0.33")).lines
        if "error" in lines[-1]:
            assert "something that hosting does not mirror" in lines[-1]["error"]
            return
    pytest.fail("no workload preempted anybody")


def test_blocks_freed_of_who_does_not_run_are_no_preemption(host: Any) -> None:
    api = fake_api()

    def schedule(self: Any) -> Any:
        for request in self.waiting:
            if not request.ours.block_table:
                self.kv_cache_manager.block_pool.get_num_free_blocks()
                self.freed(request)
        return super(kind, self).schedule()

    def freed(self: Any, request: Any) -> None:
        inner, self.inner.release_now = self.inner.release_now, lambda _: None
        self.kv_cache_manager.free(request)
        self.inner.release_now = inner

    kind = type("S", (api.Scheduler,), {"schedule": schedule, "freed": freed})
    change(api, "Scheduler", kind)
    host(api)
    for seed in range(10):
        assert compare(random_workload(seed, "0.33")).difference is None


def test_a_key_that_the_release_does_not_have_is_refused() -> None:
    with pytest.raises(SchedulerError, match=r"watermark exists from 0\.24 on"):
        made(fake_api("0.11"), watermark=0.1)
    assert made(fake_api("0.11"), watermark=0.0)


def test_a_key_that_a_patched_release_has_dropped_is_refused() -> None:
    api = change(fake_api(), "SchedulerConfig", fake_api("0.11").SchedulerConfig)
    with pytest.raises(SchedulerError, match="SchedulerConfig takes no watermark"):
        made(api, watermark=0.1)


def test_the_releases_own_default_of_a_key_stands() -> None:
    api = fake_api()
    given: list[dict[str, Any]] = []

    class Noting(SchedulerConfig):
        def __init__(self, **arguments: Any) -> None:
            given.append(arguments)
            super().__init__(**arguments)

    Noting.__signature__ = signature(SchedulerConfig)  # type: ignore[attr-defined]
    change(api, "SchedulerConfig", Noting)
    made(api)
    made(api, scheduler_reserve_full_isl=False)
    assert "scheduler_reserve_full_isl" not in given[0]
    assert given[1]["scheduler_reserve_full_isl"] is False


# -- releases ---------------------------------------------------------------------


def test_one_release_is_not_passed_off_as_another() -> None:
    for engine_version in (None, "0.33", "0.33.0"):
        assert made(fake_api(), engine_version=engine_version)
    with pytest.raises(SchedulerError) as refused:
        made(fake_api(), engine_version="0.11.2")
    assert str(refused.value) == (
        "engine_version is 0.11.2, vLLM 0.33.0 is installed and hosted; leave "
        "engine_version out, or install vllm==0.11.2"
    )


@pytest.mark.parametrize(
    ("installed", "nearest"),
    [
        ("0.11.2", "0.11.2"),
        ("0.12.0rc1.dev3+g1234567.cu129", "0.12.0"),
        ("0.33.0+cpu", "0.33.0"),
        ("0.34.1", "0.33"),
    ],
)
def test_a_later_release_is_taken_for_the_newest_known(
    installed: str, nearest: str
) -> None:
    assert nearest_release(installed) == nearest
    assert made(fake_api(installed=installed), engine_version=nearest)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "there is none here; install it"),
        ("0.10.2", r"from 0\.11 on, vLLM 0\.10\.2 is installed"),
        ("0.6.6.post1", r"from 0\.11 on, vLLM 0\.6\.6\.post1 is installed"),
        ("1.0.0", r"from 0\.11 on, vLLM 1\.0\.0 is installed"),
    ],
)
def test_what_cannot_be_hosted_is_refused(
    found: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        assert package == "vllm"
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(vllm_api, "version", version)
    with pytest.raises(SchedulerError, match=said):
        installed_version()


def test_workloads_of_other_generations_are_refused(host: Any) -> None:
    host(fake_api())
    config = {
        "block_size": 4,
        "num_gpu_blocks": 9,
        "num_cpu_blocks": 0,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    old: DecisionWorkload = as_workload("old", "0.1.0", config, [])
    with pytest.raises(SchedulerError, match=r"'vllm 0\.1\.0' is of cacheflow"):
        hosted_scheduler(old)


def test_settings_are_checked_before_vllm_sees_them() -> None:
    with pytest.raises(SchedulerError, match="max_num_seqs must be at least 1, got 0"):
        made(fake_api(), max_num_seqs=0)


def test_equal_workload_tokens_have_equal_ids() -> None:
    request = partial(Request, arrival_s=0.0, max_num_tokens=30, oracle_num_tokens=30)
    first = request(
        request_id=0, num_prompt_tokens=6, tokens=SegmentTokens([(5, 4), (9, 2)], 77)
    )
    second = request(
        request_id=1,
        num_prompt_tokens=9,
        tokens=SegmentTokens([(5, 4), (9, 2), (77, 3)], 78),
    )
    first.num_tokens = 7
    tokens = HostedTokens(has_content=True)
    prompts = [tokens.prompt(each) for each in (first, second)]
    assert prompts[0] == prompts[1][:6]
    assert tokens.output(first, 0) == prompts[1][6]
    assert len({*prompts[1]}) == 9
    alike = HostedTokens(has_content=False)
    assert alike.prompt(first) == [0] * 6
    assert alike.output(first, 0) == 0
