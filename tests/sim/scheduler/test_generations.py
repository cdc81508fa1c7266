"""Facts that each generation states about itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import TYPE_CHECKING

import pytest

from sim.config.engine import EngineConfig
from sim.scheduler.generations import (
    GENERATION_KEYS,
    GENERATIONS,
    OURS,
    SCHEDULERS,
    generation_behind,
    generation_of,
)
from sim.scheduler.settings import CacheConfig

if TYPE_CHECKING:
    from sim.scheduler.generation import Generation

EACH = pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS)


@EACH
def test_its_parts_belong_together(generation: Generation) -> None:
    parts = generation.parts()
    assert generation_behind(parts.scheduler) is generation
    assert SCHEDULERS[generation.name] is parts.scheduler
    assert is_dataclass(parts.settings)
    assert generation.takes(generation.engine_version) or generation.is_hosted


@EACH
def test_its_keys_are_keys_of_the_engine_that_it_reads(generation: Generation) -> None:
    parts = generation.parts()
    own = {each.metadata.get("key", each.name) for each in fields(parts.settings)}
    read = own | {each.name for each in fields(CacheConfig)}
    assert generation.keys <= EngineConfig.model_fields.keys()
    policies = {"admission", "preemption_victim"}  # may stand beside the settings
    # These are read where the pool is planned, and where a step is priced.
    planned = {"disable_hybrid_kv_cache_manager", "prefix_match_unit"}
    planned |= {"disable_hybrid_swa_memory", "swa_full_tokens_ratio"}
    planned |= {"mamba_cache_dtype", "mamba_ssm_cache_dtype", "gdn_prefill_backend"}
    priced = {"cudagraph_capture_sizes", "disable_cascade_attn"}
    priced |= {"override_generation_config"}
    assert generation.keys - policies - planned - priced <= read


@pytest.mark.parametrize("name", OURS)
def test_it_is_made_of_engine_arguments(name: str) -> None:
    arguments = {
        "num_gpu_blocks": 20,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 40,
        "sliding_window": None,
        "of_another_engine": 1,
    }
    scheduler = GENERATIONS[name].make(arguments)
    assert generation_behind(scheduler) is GENERATIONS[name]
    scheduler.check()


def test_a_release_has_one_generation_at_most() -> None:
    for release in ("0.1.0", "0.2.7", "0.7.3", "0.8", "0.33", "5.17"):
        assert sum(each.takes(release) for each in OURS.values()) == 1
        assert generation_of(release).takes(release)
    assert generation_of(None) is generation_of("0.3") is GENERATIONS["v1"]
    assert generation_behind(object()) is None
    assert frozenset().union(*(g.keys for g in OURS.values())) == GENERATION_KEYS


def test_the_cache_is_a_frozen_value() -> None:
    cache = CacheConfig(16, 100)
    with pytest.raises(FrozenInstanceError):
        cache.block_size = 8  # type: ignore[misc]


def test_no_scheduler_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, sim.scheduler.generations\n"
        "print([name for name in sys.modules if name.endswith('.scheduler')"
        " and name != 'sim.scheduler'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "names", ["v1 import Scheduler, V1Scheduler", "v0 import Scheduler"]
)
def test_names_of_a_folder_are_there_in_a_fresh_process(names: str) -> None:
    code = f"from sim.scheduler.{names}"
    subprocess.run([sys.executable, "-c", code], check=True)
